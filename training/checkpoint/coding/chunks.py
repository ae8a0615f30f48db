"""Bytes of a state in host memory, by chunk and frame. Knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from training.checkpoint.manifest import FRAME_BYTES

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass
class ChunkData:
    """The bytes of one chunk in host memory.

    Attributes:
        item_bytes: bytes of an item.
        data: all bytes, contiguous.
        dtype: name of the tensor's dtype, for a chunk that is one tensor; empty for a slab.
    """

    item_bytes: int
    data: Bytes
    dtype: str = ""

    def frames(self) -> list[Bytes]:
        """Views of at most `FRAME_BYTES` each; none for an empty chunk."""
        return [self.data[at : at + FRAME_BYTES] for at in range(0, self.data.size, FRAME_BYTES)]
