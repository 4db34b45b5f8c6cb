"""Whose byte is it? Finds the bytes that strided views of any engine must not share. Imports nothing else of kvviz."""
