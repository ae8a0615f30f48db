"""Lossless coding of frames: byte planes and zstd level 1 in blosc2, alone or as a balanced difference.

The difference of a frame is taken on the bit patterns as unsigned integers, new minus old, modulo 2^n, so that NaN
payloads and -0.0 survive. To each byte but for a carry 0x80 is added (one addition of 0x8080...): small differences
of either sign then share their upper bytes, which would be 0x00 or 0xff at random otherwise and cost a bit each.
It is the representation with digits from -128 to 127 instead of 0 to 255.

Where less than half of the 64-byte groups of a frame changed, only these are coded, behind a bitmap.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import blosc2
import numpy as np
import xxhash

from training.checkpoint.coding.chunks import Bytes
from training.checkpoint.manifest import BALANCED, BOUNDED, CODEC
from training.errors import Corrupt

GROUP_BYTES = 64  # what is coded or left out together in a sparse frame: half a row of 32 floats
_SPARSE_BELOW = 0.5  # share of changed groups; above it a bitmap saves too little
_SPARSE_MARK = b"S"  # a blosc2 chunk begins with its format version, a number below 32
_BLOCK_BYTES = 256 * 1024
_SAMPLE_GROUPS = 256  # 16 KiB: coding it twice costs a tenth of coding a chunk of 256 KiB
_DELTA_GAIN = 0.97  # a delta must be at least this much smaller, since restoring it costs a second decode

_UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}
_CENTRE = {size: kind(int("80" * kind().itemsize, 16)) for size, kind in _UNSIGNED.items()}
_local = threading.local()
Mask = np.ndarray[Any, np.dtype[np.bool_]]


def release_gil() -> None:
    """Let training run beside the encoder: without this it slows to a third (measured)."""
    blosc2.set_releasegil(True)


def scratch(name: str, size_bytes: int) -> Bytes:
    """Memory of this thread, reused: a fresh 4 MiB array costs as many page faults as its compression time / 6."""
    buffer: Bytes | None = getattr(_local, name, None)
    if buffer is None or buffer.size < size_bytes:
        buffer = np.empty(size_bytes, np.uint8)
        setattr(_local, name, buffer)
    return buffer[:size_bytes]


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


def decode_frame(encoded: bytes | memoryview, out: Bytes) -> None:
    """Decompress one frame into `out`, which must have exactly its size.

    Raises:
        Corrupt: the bytes do not decode to that size.
    """
    try:
        if int.from_bytes(encoded[4:8], "little") != out.size:  # blosc2 header: bytes 4-8 are the decoded size
            raise Corrupt(f"a frame does not decode to {out.size} bytes")
        blosc2.decompress2(encoded, dst=out, nthreads=1)
    except (RuntimeError, ValueError) as error:
        if isinstance(error, Corrupt):
            raise
        raise Corrupt(f"a frame does not decode: {error}") from error


def changed_groups(new: Bytes, old: Bytes) -> Mask:
    """Which groups of `GROUP_BYTES` differ; the last one may be short. Runs at the speed of memory."""
    whole = new.size // GROUP_BYTES * GROUP_BYTES
    words = whole // 8
    differ = scratch("differ", words).view(np.bool_)
    np.not_equal(new[:whole].view(np.uint64), old[:whole].view(np.uint64), out=differ)
    groups: Mask = differ.view(np.uint64) != 0
    if whole == new.size:
        return groups
    return np.append(groups, bool((new[whole:] != old[whole:]).any()))


def encode_difference(new: Bytes, old: Bytes, item_bytes: int, groups: Mask) -> bytes:
    """The difference to the frame before, dense or sparse.

    Args:
        new, old: decoded bytes of the frame, of the same size.
        item_bytes: bytes of an item.
        groups: from `changed_groups`.
    """
    if not is_sparse(groups):
        return encode_frame(_subtract(new, old, item_bytes), item_bytes)
    changed_new, changed_old = _gather(new, groups), _gather(old, groups)
    bitmap = encode_frame(np.packbits(groups), 1)
    values = encode_frame(_subtract(changed_new, changed_old, item_bytes), item_bytes) if groups.any() else b""
    return b"".join((_SPARSE_MARK, len(bitmap).to_bytes(4, "little"), bitmap, values))


def is_sparse(groups: Mask) -> bool:
    """Whether so little changed that a bitmap pays."""
    return bool(np.count_nonzero(groups) < _SPARSE_BELOW * groups.size)


def _gather(frame: Bytes, groups: np.ndarray[Any, Any]) -> Bytes:
    """Some groups, by mask or by number, one after the other; a short last one is filled up with zeros."""
    changed: Bytes = _grouped(frame)[groups]
    return changed.reshape(-1)


def apply_frame(codec: str, delta: bool, encoded: bytes | memoryview, out: Bytes, item_bytes: int) -> None:
    """Turn the frame of the checkpoint before, in `out`, into this one. A full frame needs no checkpoint before.

    Raises:
        Corrupt: unknown codec, or bytes that do not decode.
    """
    if codec == CODEC and not delta:
        decode_frame(encoded, out)
    elif codec == CODEC:  # as the first checkpoints of format 1 have it: a plain difference
        difference = scratch("decoded", out.size)
        decode_frame(encoded, difference)
        _add(out, difference, item_bytes, 0)
    elif codec == BALANCED and delta:
        _apply_difference(encoded, out, item_bytes)
    elif codec in BOUNDED and delta:
        from training.checkpoint.coding.bounded import apply_bounded

        apply_bounded(codec, encoded, out)
    else:
        raise Corrupt(f"unknown codec {codec!r}", hint="upgrade retoma, or read it with the version that wrote it")


def _apply_difference(encoded: bytes | memoryview, out: Bytes, item_bytes: int) -> None:
    if bytes(encoded[:1]) != _SPARSE_MARK:
        difference = scratch("decoded", out.size)
        decode_frame(encoded, difference)
        _add(out, difference, item_bytes, _CENTRE[item_bytes])
        return
    start = 5 + int.from_bytes(encoded[1:5], "little")
    count = -(-out.size // GROUP_BYTES)
    bitmap = np.empty(-(-count // 8), np.uint8)
    decode_frame(encoded[5:start], bitmap)
    groups = np.unpackbits(bitmap, count=count).view(np.bool_)
    if not groups.any():
        return
    difference = np.empty(np.count_nonzero(groups) * GROUP_BYTES, np.uint8)
    decode_frame(encoded[start:], difference)
    grouped = _grouped(out)
    changed = grouped[groups].reshape(-1)
    _add(changed, difference, item_bytes, _CENTRE[item_bytes])
    grouped[groups] = changed.reshape(-1, GROUP_BYTES)
    if out.size % GROUP_BYTES:  # a short last group was filled up in a copy
        np.copyto(out, grouped.reshape(-1)[: out.size])


def _grouped(frame: Bytes) -> Bytes:
    """Rows of `GROUP_BYTES`; a copy if the last one had to be filled up."""
    short = -frame.size % GROUP_BYTES
    whole: Bytes = np.append(frame, np.zeros(short, np.uint8)) if short else frame
    return whole.reshape(-1, GROUP_BYTES)


def _subtract(new: Bytes, old: Bytes, item_bytes: int) -> Bytes:
    """`new - old + 0x8080...`, item by item, modulo 2 to the bits of an item. 16 bytes are two items of 8."""
    kind = _UNSIGNED[item_bytes]
    difference = scratch("difference", new.size)
    out = difference.view(kind)
    np.subtract(new.view(kind), old.view(kind), out=out)
    np.add(out, _CENTRE[item_bytes], out=out)
    return difference


def _add(target: Bytes, difference: Bytes, item_bytes: int, centre: Any) -> None:
    """`target += difference - centre`."""
    kind = _UNSIGNED[item_bytes]
    view = target.view(kind)
    np.add(view, difference.view(kind), out=view)
    if centre:
        np.subtract(view, centre, out=view)


def prefers_delta(new: Bytes, old: Bytes, item_bytes: int, groups: Mask) -> bool:
    """Whether a difference is worth it, judged by coding a sample of what changed both ways."""
    changed = np.flatnonzero(groups)
    first = max(0, changed.size - _SAMPLE_GROUPS) // 2
    chosen = changed[first : first + _SAMPLE_GROUPS]
    was, now = _gather(old, chosen), _gather(new, chosen)
    delta = encode_frame(_subtract(now, was, item_bytes), item_bytes)
    return len(delta) < _DELTA_GAIN * len(encode_frame(now, item_bytes))


def frame_digest(raw: Bytes) -> str:
    """xxh3_128 of the decoded bytes of a frame, hex."""
    return xxhash.xxh3_128_hexdigest(raw.data)


def encoded_checksum(encoded: bytes | memoryview) -> str:
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
