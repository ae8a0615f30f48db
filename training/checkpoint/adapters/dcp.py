"""torch.distributed.checkpoint over our store: base and delta, verified and fenced, without changing the calls.

    writer = RetomaWriter("s3://bucket/run")              # one for the whole training: it holds the token
    dcp.save(state, storage_writer=writer)                # committed and durable when it returns
    dcp.load(state, storage_reader=RetomaReader("s3://bucket/run"))

Of several ranks each has a writer, and they commit one checkpoint together:

    writer = RetomaWriter("s3://bucket/run", group=host_exchange())

DCP keeps its metadata and every value that is no tensor as pickles. Here they are the typed JSON of any other
checkpoint, so that `IncrementalCheckpointer` restores what DCP saved, and DCP loads what it saved.

DCP raises what goes wrong as `CheckpointException`, which `except Exception` does not catch; `retoma_error` finds
our error in it.
"""

from __future__ import annotations

from torch.distributed.checkpoint.api import CheckpointException

from training.checkpoint.adapters.dcp_reader import RetomaReader
from training.checkpoint.adapters.dcp_writer import RetomaWriter
from training.errors import RetomaError

__all__ = ["RetomaReader", "RetomaWriter", "retoma_error"]


def retoma_error(error: BaseException | None) -> RetomaError | None:
    """Our error inside DCP's `CheckpointException`, or None if there is none."""
    if isinstance(error, RetomaError):
        return error
    if isinstance(error, CheckpointException):
        found = (retoma_error(inner) for inner, _ in error.failures.values())
        return next((inner for inner in found if inner is not None), None)
    return None
