"""Notebooks to pages and workshops. Knows nothing of KV caches."""
