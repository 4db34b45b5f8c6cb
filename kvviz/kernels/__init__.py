"""Triton kernels that write, read and gather the cache, on a GPU or in Triton's interpreter."""
