"""Writes the run of format 1 that must restore for ever: `python -m tests.formats.make_v1 EMPTY_FOLDER`.

Run once, with the version that introduced the format. A later version must read what is committed, not rewrite it.
"""

from __future__ import annotations

import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.checkpoint import IncrementalCheckpointer, Position

DTYPES = """
    bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64
    complex32 complex64 complex128
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
""".split()


def tensor(dtype: torch.dtype, items: int, step: int) -> torch.Tensor:
    """Byte i holds (i * 37 + step * 11) mod 251: every dtype gets odd bit patterns, whatever they mean."""
    raw = (np.arange(items * dtype.itemsize) * 37 + step * 11) % 251
    return torch.from_numpy(raw.astype(np.uint8)).view(dtype)


def state_at(step: int) -> dict[str, Any]:
    """What was saved as sequence `step`; the layout changes at step 3."""
    tied = torch.full((3,), float(step))
    state: dict[str, Any] = {
        "large": torch.arange(8200, dtype=torch.float32).view(82, 100) * (step + 1),
        "frozen": torch.arange(5000, dtype=torch.int32),
        "dtypes": {name: tensor(getattr(torch, name), 7, step) for name in DTYPES},
        "shapes": [torch.tensor(step), torch.empty(0, 3), torch.arange(6).view(2, 3).T + step],
        "tied": {"a": tied, "b": tied},
        "numpy": (np.arange(5, dtype=np.uint16) + step, np.float32(step) / 3, np.array(7 + step)),
        "python": [
            None,
            True,
            step,
            -(2**80),
            0.1 * step,
            -0.0,
            float("inf"),
            "é~/",
            b"\x00\xff",
            (),
            {1: "i", "1": "s"},
        ],
        "milestones": Counter({2: 1, 4: 2}),
    }
    if step >= 3:
        state["new"] = torch.full((4200,), step, dtype=torch.bfloat16)
        del state["shapes"]
    return state


def main(folder: Path) -> None:
    """Base and delta by a first attempt; a delta and a changed layout by a second one; a base at last."""
    socket.gethostname = lambda: "host.example"
    for steps in ([0, 1], [2, 3, 4]):
        with IncrementalCheckpointer(folder, run="format-1", clock=lambda: 1767323045.0) as checkpointer:
            checkpointer.restore()
            for step in steps:
                checkpointer.save(
                    state_at(step),
                    position=Position(epoch=step // 2, step=10 * step, sample=320 * step),
                    base=step == 4,
                    meta={"metrics": {"accuracy": step / 10}},
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
