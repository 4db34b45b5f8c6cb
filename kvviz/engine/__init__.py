"""What writes, reads and moves the bytes: Triton kernels, connectors, a language model, the story's runs."""
