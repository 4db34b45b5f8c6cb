"""vLLM's KV cache, rebuilt: modes, sizes, layouts, real buffers and the scale views over them."""
