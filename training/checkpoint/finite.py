"""Finds the first number in a snapshot that is not finite, at about the bandwidth of the memory."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from training.checkpoint.coding.chunks import Bytes
from training.checkpoint.manifest import Tensor
from training.checkpoint.state.dtypes import dtype_of
from training.checkpoint.state.snapshot import Snapshot

PIECE_BYTES = 1024 * 1024  # stays in the cache between the two looks at it
# Bits of infinity; the real and the imaginary part of a complex number are two numbers.
_INFINITY = {
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float32": (np.uint32, 0x7F800000),
    "float64": (np.uint64, 0x7FF0000000000000),
    "complex32": (np.uint16, 0x7C00),
    "complex64": (np.uint32, 0x7F800000),
    "complex128": (np.uint64, 0x7FF0000000000000),
}
_SIGNED = {np.uint16: np.int16, np.uint32: np.int32, np.uint64: np.int64}


class NotFinite(NamedTuple):
    """A tensor that holds a NaN or an infinity."""

    key: str
    bad: int
    size: int

    def __str__(self) -> str:
        return f"{self.bad} of {self.size} numbers of {self.key} are not finite"


def find_not_finite(snapshot: Snapshot, tensors: Iterable[Tensor]) -> NotFinite | None:
    """The first of the tensors that is not finite."""
    for entry in tensors:
        size_bytes = int(np.prod(entry.shape, dtype=np.int64)) * dtype_of(entry.dtype).itemsize
        data = snapshot.chunks[entry.chunk].data[entry.start : entry.start + size_bytes]
        if not is_finite(data, entry.dtype):
            return _describe(entry, data)
    return None


def is_finite(data: Bytes, dtype: str) -> bool:
    """Whether there is no NaN and no infinity among the floating-point numbers of `data`."""
    pieces = (data[start : start + PIECE_BYTES] for start in range(0, data.size, PIECE_BYTES))
    if dtype not in _INFINITY:
        return not any(_not_finite_bytes(dtype)[piece].any() for piece in pieces)
    unsigned, infinity = _INFINITY[dtype]
    # As an integer, a positive number grows with its size, and so does a negative one read without its sign: the
    # largest of each tells all, and no copy is made.
    negative = infinity | 1 << (8 * np.dtype(unsigned).itemsize - 1)
    for piece in pieces:
        if piece.view(_SIGNED[unsigned]).max() >= infinity or piece.view(unsigned).max() >= negative:
            return False
    return True


def _describe(entry: Tensor, data: Bytes) -> NotFinite:
    values = torch.from_numpy(data.copy()).view(dtype_of(entry.dtype))
    if entry.dtype.startswith("float8"):
        values = values.float()
    if entry.dtype == "complex32":
        values = values.view(torch.float16)
    return NotFinite(entry.key, int((~torch.isfinite(values)).sum()), values.numel())


@cache
def _not_finite_bytes(dtype: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For each byte whether it is a number that is not finite. All float8 are a byte long."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype_of(dtype)).float()
    return (~torch.isfinite(every)).numpy()
