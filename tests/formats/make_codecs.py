"""Writes the run with every codec of format 1: `python -m tests.formats.make_codecs FOLDER`. See make_v1.py."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any, Literal

import torch

from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.care.compact import compact
from training.checkpoint.store import LocalStore

BOUNDED: list[Literal["int8", "int4"] | None] = [None, "int8", "int4"]  # of each attempt
SAVES = 3  # of each attempt
COMPACTED = (2, 5)


def state_at(step: int) -> dict[str, Any]:
    """What was given to `save` as sequence `step`: from integers alone, so that it is the same everywhere."""
    ramp = torch.arange(12000, dtype=torch.float32)
    master = (ramp * 7 % 1009 - 504) / 512 + step * (ramp % 17 - 8) / 65536
    table = ((torch.arange(256 * 33) * 31 % 251).float() / 256).view(256, 33)
    table[step::97] += step / 64
    return {
        "model": {"w": master.bfloat16()},
        "optimizer": {"master": master, "exp_avg_sq": (ramp * 3 % 499 + 1) / 4096 * (1 + step / 128)},
        "table": table,
        "noise": ((torch.arange(4500) * 48271 + step * 40692) * 69621 % 65521).to(torch.int32),
    }


def main(folder: Path) -> None:
    """Three attempts: lossless, int8, int4; in the second one a checkpoint is compacted."""
    socket.gethostname = lambda: "host.example"
    for attempt, bounded in enumerate(BOUNDED):
        with IncrementalCheckpointer(
            folder, run="codecs-1", deltas_per_base=100, bounded=bounded, clock=lambda: 1767323045.0
        ) as checkpointer:
            checkpointer.restore()
            for step in range(attempt * SAVES, (attempt + 1) * SAVES):
                checkpointer.save(state_at(step), position=Position(epoch=step))
        if attempt == 1:
            compact(LocalStore(folder), *COMPACTED, nonce=lambda: "0123456789abcdef")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
