"""Rebuild the KV cache of vLLM: modes, sizes, layouts, buffers, and the scale views that lie in them."""
