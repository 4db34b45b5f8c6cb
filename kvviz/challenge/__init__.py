"""Make caches with one unknown fault from a seed, for notebook 11, and check the answers. Torch is not needed."""
