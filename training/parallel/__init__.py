"""A training on many ranks: how it is cut, how its ranks agree, and how they are launched."""
