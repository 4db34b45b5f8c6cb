"""Whose byte is it? Judges anybody's strided views. Needs numpy, and nothing else of kvviz."""
