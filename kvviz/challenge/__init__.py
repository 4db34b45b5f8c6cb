"""Unknown caches from a seed, sound or with one fault, and the check of an answer."""
