"""Triton kernels that write, read and gather the KV cache, on a GPU or in Triton's interpreter on the CPU."""
