"""Runs notebooks and writes them as HTML pages, and makes copies of the notebooks for a workshop.

This package knows nothing about KV caches: it works for any folder of notebooks. Here a page is an HTML page, a cell is
a cell of a notebook, and a kernel is a Jupyter kernel.
"""
