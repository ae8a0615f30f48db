"""Stores: where the bytes of a checkpoint live."""
