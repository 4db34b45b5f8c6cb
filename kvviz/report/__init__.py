"""Runs notebooks and writes them as HTML pages, and makes copies of the notebooks for a workshop.

This package knows nothing about KV caches: it works for any folder of notebooks.
"""
