"""Figures for paper and slides, drawn with matplotlib."""
