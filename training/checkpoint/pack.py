"""From a snapshot to packs in the store and the chunk list of a manifest; only what changed is written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from training.checkpoint.codec import (
    chunk_digest,
    encode_frame,
    encoded_checksum,
    frame_digest,
    prefers_delta,
    state_digest,
    subtract,
)
from training.checkpoint.manifest import Chunk, Frame, Pack, pack_key
from training.checkpoint.snapshot import Bytes, ChunkData, Snapshot
from training.checkpoint.store import Store

PACK_BYTES = 64 * 1024 * 1024
_IN_FLIGHT = 4  # encoded frames that wait for their turn: bounds memory at 16 MiB and a little
R = TypeVar("R")


@dataclass
class Reference:
    """The last committed state, against which the next deltas are taken."""

    chunks: dict[str, ChunkData]
    digests: dict[str, list[str]]  # of each frame

    def previous(self, key: str, chunk: ChunkData) -> tuple[list[Bytes], list[str]] | None:
        """Frames and digests of the same chunk, or None if it is new or has another shape."""
        old = self.chunks.get(key)
        if old is None or (old.item_bytes, old.data.size) != (chunk.item_bytes, chunk.data.size):
            return None
        return old.frames(), self.digests[key]


@dataclass
class Written:
    """What became of a snapshot."""

    chunks: list[Chunk]
    packs: list[Pack]
    digests: dict[str, list[str]]
    state_digest: str
    encode_seconds: float
    upload_seconds: float

    @property
    def size_bytes(self) -> int:
        """Bytes of all packs."""
        return sum(pack.size_bytes for pack in self.packs)


@dataclass
class PackWriter:
    """Collects encoded frames into packs and puts each one when it is full."""

    store: Store
    token: int
    sequence: int
    packs: list[Pack] = field(default_factory=list)
    upload_seconds: float = 0.0
    _parts: list[bytes] = field(default_factory=list)
    _size_bytes: int = 0

    def append(self, number: int, encoded: bytes, decoded_digest: str) -> Frame:
        """Place one frame; it may be written later, at the latest by `flush`."""
        if self._parts and self._size_bytes + len(encoded) > PACK_BYTES:
            self.flush()
        frame = Frame(
            number=number,
            pack=len(self.packs),
            offset=self._size_bytes,
            length=len(encoded),
            checksum=encoded_checksum(encoded),
            digest=decoded_digest,
        )
        self._parts.append(encoded)
        self._size_bytes += len(encoded)
        return frame

    def flush(self) -> None:
        """Put the open pack, if it holds anything."""
        if not self._parts:
            return
        started = time.perf_counter()
        self.store.put(pack_key(self.token, self.sequence, len(self.packs)), self._parts)
        self.upload_seconds += time.perf_counter() - started
        self.packs.append(Pack(size_bytes=self._size_bytes))
        self._parts, self._size_bytes = [], 0


def write_packs(snapshot: Snapshot, reference: Reference | None, writer: PackWriter, executor: Executor) -> Written:
    """Encode what differs from the reference (everything, if there is none) and put it.

    Returns when all packs are durable. Nothing is committed yet.
    """
    started = time.perf_counter()
    digests: dict[str, list[str]] = {}
    whole: dict[str, tuple[int, int, str]] = {}
    chunks = []
    for key, chunk in snapshot.chunks.items():
        frames = chunk.frames()
        digests[key] = list(_in_order(executor, (partial(frame_digest, frame) for frame in frames)))
        whole[key] = (chunk.item_bytes, chunk.data.size, chunk_digest(digests[key]))
        previous = reference.previous(key, chunk) if reference else None
        changed = [i for i, d in enumerate(digests[key]) if previous is None or previous[1][i] != d]
        if previous is not None and not changed:
            continue
        delta = previous is not None and prefers_delta(
            frames[changed[0]], previous[0][changed[0]], chunk.item_bytes
        )
        old = previous[0] if previous is not None and delta else None
        encoded = _in_order(
            executor, (_encoder(frames[i], old[i] if old else None, chunk.item_bytes) for i in changed)
        )
        chunks.append(
            Chunk(
                key=key,
                mode="delta" if delta else "full",
                item_bytes=chunk.item_bytes,
                size_bytes=chunk.data.size,
                digest=whole[key][2],
                frames=tuple(
                    writer.append(i, data, digests[key][i]) for i, data in zip(changed, encoded, strict=True)
                ),
            )
        )
    writer.flush()
    seconds = time.perf_counter() - started - writer.upload_seconds
    whole_digest = state_digest(snapshot.layout_digest, snapshot.values, whole)
    return Written(chunks, writer.packs, digests, whole_digest, seconds, writer.upload_seconds)


def _encoder(new: Bytes, old: Bytes | None, item_bytes: int) -> Callable[[], bytes]:
    return lambda: encode_frame(new if old is None else subtract(new, old, item_bytes), item_bytes)


def _in_order(executor: Executor, jobs: Iterator[Callable[[], R]]) -> Iterator[R]:
    """Results in the order of the jobs, with a bounded number of them in flight."""
    waiting: deque[Future[R]] = deque()
    for job in jobs:
        waiting.append(_submit(executor, job))
        if len(waiting) >= _IN_FLIGHT:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _submit(executor: Executor, job: Callable[[], R]) -> Future[R]:
    """Hand a job to the executor, or do it here when the interpreter is on its way out.

    A script that ends without `close()` still has its last save committed: the interpreter waits for the saving
    thread, but its executors take no new jobs by then.
    """
    try:
        return executor.submit(job)
    except RuntimeError:
        done: Future[R] = Future()
        done.set_result(job())
        return done
