"""Serves a language model over the cache: generation, block pools, offloading to host memory, and connectors."""
