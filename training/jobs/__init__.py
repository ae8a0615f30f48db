"""Example jobs, one file each with its YAML beside it."""
