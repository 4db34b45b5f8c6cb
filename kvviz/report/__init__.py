"""Notebooks as self-contained pages: they are run, rendered and tied together. Knows nothing of KV caches."""
