"""Bytes of a state and their frames: differences, compression, and the choice among the forms of a chunk."""
