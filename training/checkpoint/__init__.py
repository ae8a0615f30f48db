"""Incremental checkpoints: base + delta, committed by one manifest, fenced by a token.

Importing this package imports no torch; `IncrementalCheckpointer` does when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.checkpoint.manifest import Health, Manifest, MetricPoint, Position, Ref
from training.checkpoint.store import open_store

if TYPE_CHECKING:
    from training.checkpoint.checkpointer import IncrementalCheckpointer
    from training.checkpoint.quarantine import RollbackPolicy
    from training.checkpoint.restore import RestoredState, restore_checkpoint

__all__ = [
    "Health",
    "IncrementalCheckpointer",
    "Manifest",
    "MetricPoint",
    "Position",
    "Ref",
    "RestoredState",
    "RollbackPolicy",
    "open_store",
    "restore_checkpoint",
]

_LAZY = {
    "IncrementalCheckpointer": "training.checkpoint.checkpointer",
    "RestoredState": "training.checkpoint.restore",
    "RollbackPolicy": "training.checkpoint.quarantine",
    "restore_checkpoint": "training.checkpoint.restore",
}


def __getattr__(name: str) -> Any:
    """Load the half that needs torch on first use: the supervisor must start in a blink."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
