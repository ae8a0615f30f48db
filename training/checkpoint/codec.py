"""Lossless coding of frames: difference modulo 2^n, byte shuffle, zstd level 1, in blosc2.

The difference is taken on the bit patterns as unsigned integers, item by item, so that any order of applying the
deltas of a chain gives the same bits, NaN payloads and -0.0 included.
"""

from __future__ import annotations

import json
from typing import Any

import blosc2
import numpy as np
import xxhash

from training.checkpoint.manifest import CODEC
from training.checkpoint.snapshot import Bytes
from training.errors import Corrupt

_BLOCK_BYTES = 256 * 1024
_SAMPLE_BYTES = 64 * 1024
_DELTA_GAIN = 0.97  # a delta must be at least this much smaller, since restoring it costs a second decode

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}


def release_gil() -> None:
    """Let training run beside the encoder: without this it slows to a third (measured)."""
    blosc2.set_releasegil(True)


def encode_frame(raw: Bytes, item_bytes: int) -> bytes:
    """Compress one frame of decoded bytes."""
    return blosc2.compress2(  # type: ignore[no-any-return]
        raw,
        codec=blosc2.Codec.ZSTD,
        clevel=1,
        filters=[blosc2.Filter.SHUFFLE],
        typesize=item_bytes,
        blocksize=_BLOCK_BYTES,
        splitmode=blosc2.SplitMode.ALWAYS_SPLIT,
        nthreads=1,
    )


def decode_frame(encoded: bytes, out: Bytes, codec: str = CODEC) -> None:
    """Decompress one frame into `out`, which must have exactly its size.

    Raises:
        Corrupt: unknown codec, or the bytes do not decode to that size.
    """
    if codec != CODEC:
        raise Corrupt(f"unknown codec {codec!r}; this version reads {CODEC!r}", hint="upgrade retoma")
    try:
        if int.from_bytes(encoded[4:8], "little") != out.size:  # blosc2 header: bytes 4-8 are the decoded size
            raise Corrupt(f"a frame does not decode to {out.size} bytes")
        blosc2.decompress2(encoded, dst=out, nthreads=1)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, Corrupt):
            raise
        raise Corrupt(f"a frame does not decode: {error}") from error


def subtract(new: Bytes, old: Bytes, item_bytes: int) -> Bytes:
    """`new - old` item by item, modulo 2 to the bits of an item, as bytes. 16 bytes are two items of 8."""
    kind = _UNSIGNED[item_bytes]
    return np.subtract(new.view(kind), old.view(kind)).view(np.uint8)  # type: ignore[no-any-return]


def add_in_place(target: Bytes, delta: Bytes, item_bytes: int) -> None:
    """`target += delta`, the inverse of `subtract`."""
    view = target.view(_UNSIGNED[item_bytes])
    np.add(view, delta.view(_UNSIGNED[item_bytes]), out=view)


def prefers_delta(new: Bytes, old: Bytes, item_bytes: int) -> bool:
    """Whether a delta is worth it, judged by coding a sample of one changed frame both ways."""
    middle = new.size // 2 // 16 * 16
    sample = slice(middle, middle + _SAMPLE_BYTES) if new.size > 2 * _SAMPLE_BYTES else slice(0, _SAMPLE_BYTES)
    delta = encode_frame(subtract(new[sample], old[sample], item_bytes), item_bytes)
    return len(delta) < _DELTA_GAIN * len(encode_frame(new[sample].copy(), item_bytes))


def frame_digest(raw: Bytes) -> str:
    """xxh3_128 of the decoded bytes of a frame, hex."""
    return xxhash.xxh3_128_hexdigest(raw.data)


def encoded_checksum(encoded: bytes) -> str:
    """xxh3_64 of the encoded bytes of a frame, hex."""
    return xxhash.xxh3_64_hexdigest(encoded)


def chunk_digest(frame_digests: list[str]) -> str:
    """Digest of a chunk: over the digests of its frames, so that a part can be verified alone."""
    return xxhash.xxh3_128_hexdigest("".join(frame_digests).encode())


def state_digest(layout_digest: str, values: list[Any], chunks: dict[str, tuple[int, int, str]]) -> str:
    """Digest of a whole state: its structure, its scalars, and all its bytes.

    Args:
        layout_digest: of the structure.
        values: the scalars as typed JSON.
        chunks: key -> (item bytes, size in bytes, chunk digest).
    """
    rows = [layout_digest, json.dumps(values, separators=(",", ":"))]
    rows += [f"{key}\0{item}\0{size}\0{value}" for key, (item, size, value) in sorted(chunks.items())]
    return "xxh3_128:" + xxhash.xxh3_128_hexdigest("\n".join(rows).encode())
