"""Incremental checkpoints: base + delta, committed by one manifest, fenced by a token."""
