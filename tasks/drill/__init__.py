"""Drills: real faults in a real training on a stack of its own, measured and judged."""
