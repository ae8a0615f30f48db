"""How a model is trained, in process: torch, the checkpoint engine and its stores. Usable alone."""
