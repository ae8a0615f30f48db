"""Bit for bit: what a state holds, written down without any help from the engine under test."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(value: Any) -> Any:
    """A value that compares equal exactly when type, dtype, shape and every bit are equal.

    Mappings compare as dicts, and memory layout does not count: the engine gives back plain dicts and contiguous
    tensors, and says so.
    """
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), tuple(value.shape), tensor_bytes(value))
    if isinstance(value, np.ndarray | np.generic):
        native = np.asarray(value)
        native = native.astype(native.dtype.newbyteorder("="))
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        return (kind, str(native.dtype), native.shape, native.tobytes())
    if isinstance(value, dict):
        return ("dict", [(type(key).__name__, key, bits(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [bits(item) for item in value])
    if isinstance(value, float):
        return ("float", struct.pack(">d", value))
    return (type(value).__name__, value)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The logical elements in row-major order, as bytes, gathered through integers and numpy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return b""
    if tensor.dtype.itemsize > 8:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.dtype.itemsize]).numpy().tobytes()


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of random bit patterns: NaN payloads, subnormals and -0.0 included."""
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
