"""Bounded coding of float32 differences: int8 or int4 with a scale for each block, and a stated error bound.

The difference is taken to the *reconstructed* state before, so that errors do not add up along a chain. Of a second
moment the square root is coded, as the optimizer divides by it. Whoever resumes from such a checkpoint resumes from
a state that is near the one that was saved, not equal to it.

Block-wise quantisation of optimizer state: Dettmers et al., 8-bit Optimizers via Block-wise Quantization,
arXiv 2110.02861; here of differences, linear, and followed by zstd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from training.checkpoint.coding.chunks import Bytes, ChunkData
from training.checkpoint.coding.codec import decode_frame, encode_frame, scratch
from training.checkpoint.manifest import BOUNDED
from training.errors import Corrupt

BLOCK_ITEMS = 2048
_SECOND_MOMENTS = {"exp_avg_sq", "max_exp_avg_sq"}
_ROOT = 1  # flag: square roots are coded
_HEADER_BYTES = 8
_RELATIVE_BOUND = {"int8-blocks": 0.02, "int4-blocks": 0.2}

Quanta = np.ndarray[Any, np.dtype[np.int8]]


@dataclass(frozen=True)
class BoundedCodec:
    """What the user allows.

    Attributes:
        name: `int8`, or `int4` (weights and first moments in 4 bits, second moments in 8).
        relative_bound: largest error of an element relative to the largest magnitude in its tensor; a tensor that
            cannot hold it is coded without loss. Default: 0.02 in 8 bits, 0.2 in 4.
    """

    name: Literal["int8", "int4"]
    relative_bound: float | None = None

    def codecs_of(self, key: str) -> tuple[str, ...]:
        """Codecs for a chunk, the smallest first. The next one is taken where the bound cannot be held."""
        return ("int8-blocks",) if self.name == "int8" or is_second_moment(key) else ("int4-blocks", "int8-blocks")

    def bound_of(self, key: str, data: Bytes) -> float | None:
        """Largest allowed error of an element, in the tensor's own units; None if it holds what is not finite."""
        values = data.view(np.float32)
        largest = max(float(values.max()), -float(values.min())) if values.size else 0.0
        relative = (
            self.relative_bound if self.relative_bound is not None else _RELATIVE_BOUND[self.codecs_of(key)[0]]
        )
        return relative * largest if np.isfinite(largest) else None


def is_second_moment(key: str) -> bool:
    """Whether a chunk holds running averages of squared gradients, by the name of torch's optimizers."""
    return key.rpartition("/")[2] in _SECOND_MOMENTS


def can_be_bounded(chunk: ChunkData) -> bool:
    """Whole tensors of float32 only: everything else is small, or exact by nature."""
    return chunk.dtype == "float32"


def encode_bounded(codec: str, new: Bytes, old: Bytes, root: bool) -> tuple[bytes, float]:
    """Quantise the difference of a frame.

    Args:
        codec: `int8-blocks` or `int4-blocks`.
        new, old: float32 as bytes; `old` is the reconstructed frame before.
        root: take the difference of square roots.

    Returns:
        The encoded frame, and the largest error of any element after decoding it as a reader would; infinite if
        the frame cannot be coded this way.
    """
    levels = 2 ** (BOUNDED[codec] - 1) - 1
    goal, start = new.view(np.float32), old.view(np.float32)
    if root and (float(goal.min()) < 0 or float(start.min()) < 0):
        return b"", float("inf")
    blocks = -(-goal.size // BLOCK_ITEMS)
    steps = np.zeros(blocks * BLOCK_ITEMS, np.float32)
    with np.errstate(all="ignore"):
        np.subtract(np.sqrt(goal) if root else goal, np.sqrt(start) if root else start, out=steps[: goal.size])
        grid = steps.reshape(blocks, BLOCK_ITEMS)
        scales = np.maximum(grid.max(axis=1), -grid.min(axis=1)) / np.float32(levels)
        if not np.isfinite(scales).all():
            return b"", float("inf")
        np.multiply(grid, np.where(scales > 0, 1 / np.maximum(scales, 1e-45), 0)[:, None], out=grid)
        np.clip(np.rint(grid, out=grid), -levels, levels, out=grid)
    small = grid.astype(np.int8).reshape(-1)
    quanta = _pack(small) if BOUNDED[codec] == 4 else small.view(np.uint8)
    scale_bytes = encode_frame(scales.view(np.uint8), 4)
    header = bytes([_ROOT if root else 0, 0, 0, 0]) + len(scale_bytes).to_bytes(4, "little")
    encoded = b"".join((header, scale_bytes, encode_frame(quanta, 1)))
    return encoded, error_of(codec, encoded, new, old)


def error_of(codec: str, encoded: bytes, new: Bytes, old: Bytes) -> float:
    """Largest error of any element, found by decoding."""
    out = scratch("reconstructed", old.size)
    np.copyto(out, old)
    apply_bounded(codec, encoded, out)
    values = out.view(np.float32)
    np.subtract(values, new.view(np.float32), out=values)
    error = max(float(values.max()), -float(values.min()))
    return error if np.isfinite(error) else float("inf")


def apply_bounded(codec: str, encoded: bytes | memoryview, out: Bytes) -> None:
    """The next reconstructed frame from the one in `out`: plus step times scale, in single precision.

    Raises:
        Corrupt: bytes that do not decode.
    """
    if out.size % 4:
        raise Corrupt(f"a bounded frame of {out.size} bytes holds no float32")
    values = out.view(np.float32)
    blocks = -(-values.size // BLOCK_ITEMS)
    start = _HEADER_BYTES + int.from_bytes(encoded[4:8], "little")
    scales = np.empty(blocks * 4, np.uint8)
    decode_frame(encoded[_HEADER_BYTES:start], scales)
    packed = np.empty(blocks * BLOCK_ITEMS * BOUNDED[codec] // 8, np.uint8)
    decode_frame(encoded[start:], packed)
    quanta = _unpack(packed) if BOUNDED[codec] == 4 else packed.view(np.int8)
    steps = quanta.astype(np.float32).reshape(blocks, BLOCK_ITEMS)
    np.multiply(steps, scales.view(np.float32)[:, None], out=steps)
    change = steps.reshape(-1)[: values.size]
    if encoded[0] & _ROOT:
        np.sqrt(values, out=values)
        np.maximum(np.add(values, change, out=values), 0, out=values)
        np.multiply(values, values, out=values)
    else:
        np.add(values, change, out=values)


def _pack(quanta: Quanta) -> Bytes:
    """Two numbers from -7 to 7 in a byte, each plus 8, the first one in the low half."""
    halves = (quanta + 8).astype(np.uint8)
    return np.bitwise_or(halves[0::2], np.left_shift(halves[1::2], 4), dtype=np.uint8)


def _unpack(packed: Bytes) -> Quanta:
    quanta = np.empty(packed.size * 2, np.int8)
    quanta[0::2] = (packed & 15).view(np.int8) - 8
    quanta[1::2] = (packed >> 4).view(np.int8) - 8
    return quanta
