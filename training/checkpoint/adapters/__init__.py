"""Other people's ways in and out: torch.distributed.checkpoint, plain torch files, safetensors.

Importing this package imports no torch; its modules do.

The only modules of the engine that read or write pickles, because the files of others are pickles. They do so
through readers that know a closed set of names, never on the way to or from a store.
"""
