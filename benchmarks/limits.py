"""What no engine can beat: the entropy of what changed, and the speed of memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks.recording import Recording

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Array = np.ndarray[Any, np.dtype[Any]]


def floor_ratio(recording: Recording) -> float:
    """Order-0 entropy of one delta in the middle of the recording, in parts of the raw state.

    Tensor by tensor: which rows changed (a bit for each row, at its entropy), and of the changed rows each byte
    plane on its own, at the entropy of its histogram: of the difference modulo 2^n or of the new values, whichever
    is less. An order-0 coder of whole planes cannot be smaller; one that sees more than single bytes can.
    """
    live = recording.start()
    middle = max(1, (recording.count - 1) // 2)
    for number in range(1, middle):
        recording.advance(live, number)
    before = {path: value.clone() for path, value in live.items()}
    recording.advance(live, middle)
    bits = sum(_bits(before[path], value) for path, value in live.items())
    return bits / 8 / sum(value.nbytes for value in live.values())


def _bits(before: torch.Tensor, after: torch.Tensor) -> float:
    kind = _UNSIGNED[after.element_size()]
    old, new = (_items(value).view(kind) for value in (before, after))
    if new.ndim < 2:
        old, new = old.reshape(1, -1), new.reshape(1, -1)
    old, new = old.reshape(len(old), -1), new.reshape(len(new), -1)
    changed = (old != new).any(1)
    old, new = old[changed], new[changed]
    return _mask_bits(changed) + min(_plane_bits(new - old), _plane_bits(new))


def _items(value: torch.Tensor) -> Array:
    return np.ascontiguousarray(value.numpy())


def _mask_bits(changed: Array) -> float:
    share = float(changed.mean()) if changed.size else 0.0
    if share in (0.0, 1.0):
        return 0.0
    return float(-changed.size * (share * np.log2(share) + (1 - share) * np.log2(1 - share)))


def _plane_bits(items: Array) -> float:
    if not items.size:
        return 0.0
    planes = np.ascontiguousarray(items).reshape(-1).view(np.uint8).reshape(items.size, -1)
    bits = 0.0
    for plane in planes.T:
        counts = np.bincount(plane, minlength=256)
        counts = counts[counts > 0]
        bits -= float((counts * np.log2(counts / len(plane))).sum())
    return bits


def memcpy_mb_s(megabytes: int = 256) -> float:
    """Bytes copied a second by one thread between two buffers that are far larger than the caches; best of 5."""
    torch.set_num_threads(1)
    source = torch.ones(megabytes * 1_000_000, dtype=torch.uint8)
    target = torch.empty_like(source).copy_(source)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return megabytes / best
