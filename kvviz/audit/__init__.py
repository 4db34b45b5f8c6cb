"""Whose byte is it? Finds the bytes on which strided views disagree, in any engine. Needs numpy, and no kvviz room."""
