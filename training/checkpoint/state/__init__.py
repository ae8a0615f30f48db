"""A state of a training as bytes: taken apart, copied, and put together again."""
