"""Makes caches with one unknown fault from a seed, and checks answers. Notebook 11 uses this package, without torch."""
