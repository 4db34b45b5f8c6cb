"""Figures for notebooks, papers and slides, drawn with matplotlib."""
