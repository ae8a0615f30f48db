"""bfloat16 copies of float32 masters: computed from the master instead of stored, so that they cost nothing.

Rounding is to nearest, ties to even, on the bits: `(x + 0x7fff + (x >> 16 & 1)) >> 16` modulo 2^32. A copy that
was made otherwise, a NaN that was cast by other rules included, differs somewhere and is stored like any chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from training.checkpoint.coding.chunks import Bytes, ChunkData
from training.checkpoint.manifest import FRAME_BYTES

_SAMPLES = 64


def round_to_bf16(source: Bytes) -> Bytes:
    """Bytes of float32 -> bytes of bfloat16, half as many."""
    bits = source.view(np.uint32)
    return (((bits >> 16) & 1) + np.uint32(0x7FFF) + bits >> 16).astype(np.uint16).view(np.uint8)


def cast_frame(number: int, size_bytes: int, source: Bytes) -> Bytes:
    """Frame `number`, `size_bytes` long, of the copy of a whole chunk of float32."""
    start = 2 * number * FRAME_BYTES
    return round_to_bf16(source[start : start + 2 * size_bytes])


def largest_error(new: Bytes, old: Bytes) -> float:
    """Largest distance between elements of two runs of bfloat16."""
    wide = [(run.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for run in (new, old)]
    return float(np.abs(wide[0] - wide[1]).max())


def find_source(key: str, chunks: Mapping[str, ChunkData], remembered: str | None) -> str | None:
    """The chunk of float32 that a chunk of bfloat16 is an exact copy of, or None.

    Args:
        key: the chunk of bfloat16.
        chunks: the whole snapshot.
        remembered: what it was the last time; tried first.
    """
    copy = chunks[key]
    if copy.dtype != "bfloat16" or not copy.data.size:
        return None
    candidates: Iterable[str] = (
        name for name, c in chunks.items() if c.dtype == "float32" and c.data.size == 2 * copy.data.size
    )
    if remembered is not None and remembered in chunks:
        candidates = [remembered, *(name for name in candidates if name != remembered)]
    return next((name for name in candidates if _is_copy(copy, chunks[name])), None)


def _is_copy(copy: ChunkData, source: ChunkData) -> bool:
    if (source.dtype, source.data.size) != ("float32", 2 * copy.data.size):
        return False
    step = max(1, copy.data.size // 2 // _SAMPLES)
    sample = np.ascontiguousarray(source.data.view(np.uint32)[::step])
    if not np.array_equal(round_to_bf16(sample.view(np.uint8)).view(np.uint16), copy.data.view(np.uint16)[::step]):
        return False
    return all(
        np.array_equal(frame, cast_frame(number, frame.size, source.data))
        for number, frame in enumerate(copy.frames())
    )
