"""Coded frames become packs in the store and the chunk list of a manifest. Coding and uploading overlap."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from training.checkpoint.coding.bounded import BoundedCodec
from training.checkpoint.coding.choices import Choices
from training.checkpoint.coding.codec import chunk_digest, encoded_checksum, state_digest
from training.checkpoint.coding.encode import CodedFrame, Reference, code_chunks, start
from training.checkpoint.manifest import Chunk, Frame, Pack, PackName
from training.checkpoint.store import NoSpace, Store
from training.errors import RetomaError

if TYPE_CHECKING:
    from training.checkpoint.state.snapshot import Snapshot  # imports torch; commands write packs without it

PACK_BYTES = 32 * 1024 * 1024  # so that the first pack of a large save is on its way while the rest is coded
_UPLOADS = 2  # packs on their way: bounds memory at three packs, with the open one


@dataclass
class Written:
    """What became of a snapshot."""

    chunks: list[Chunk]
    packs: list[Pack]
    reference: Reference
    state_digest: str
    modes: dict[str, int]
    encode_seconds: float  # of CPU time, all threads together
    upload_seconds: float = 0.0  # of all packs together; they may overlap

    @property
    def size_bytes(self) -> int:
        """Bytes of all packs."""
        return sum(pack.size_bytes for pack in self.packs)


@dataclass
class PackWriter:
    """Collects encoded frames into packs and puts each one in the background when it is full.

    Attributes:
        first: place of the first pack among those of all ranks, as far as it can be known before: if each rank
            before this one writes one pack, rank 0 need not count the frames' packs anew.
    """

    store: Store
    name: PackName
    uploaders: Executor
    first: int = 0
    packs: list[Pack] = field(default_factory=list)
    upload_seconds: float = 0.0
    _parts: list[bytes] = field(default_factory=list)
    _size_bytes: int = 0
    _uploads: deque[Future[float]] = field(default_factory=deque)

    def append(self, number: int, encoded: bytes, decoded_digest: str) -> Frame:
        """Place one frame. Raises the error of an upload that failed."""
        if self._parts and self._size_bytes + len(encoded) > PACK_BYTES:
            self._flush()
        if not encoded:  # computed from another chunk
            return Frame(number, 0, 0, 0, "", decoded_digest)
        frame = Frame(
            number=number,
            pack=self.first + len(self.packs),
            offset=self._size_bytes,
            length=len(encoded),
            checksum=encoded_checksum(encoded),
            digest=decoded_digest,
        )
        self._parts.append(encoded)
        self._size_bytes += len(encoded)
        return frame

    def flush(self) -> None:
        """The open pack is on its way, too."""
        if self._parts:
            self._flush()

    def finish(self) -> None:
        """Put the open pack and wait until all of them are durable."""
        self.flush()
        while self._uploads:
            self._await_one()

    def settle(self) -> None:
        """After a failure: let no upload go on unseen."""
        for upload in self._uploads:
            with contextlib.suppress(Exception):
                upload.result()

    def discard(self) -> None:
        """Delete what was written for nothing, as far as the store answers; the collector finds what stays."""
        self.settle()
        with contextlib.suppress(RetomaError, OSError):
            for index in range(len(self.packs)):
                self.store.delete(self.name.key(index))

    def _flush(self) -> None:
        while len(self._uploads) >= _UPLOADS:
            self._await_one()
        self._uploads.append(start(self.uploaders, self._put(len(self.packs), self._parts)))
        self.packs.append(Pack(size_bytes=self._size_bytes, rank=self.name.rank))
        self._parts, self._size_bytes = [], 0

    def _put(self, index: int, parts: list[bytes]) -> Callable[[], float]:
        def upload() -> float:
            started = time.perf_counter()
            self.store.put(self.name.key(index), parts)
            return time.perf_counter() - started

        return upload

    def _await_one(self) -> None:
        self.upload_seconds += self._uploads.popleft().result()


def write_packs(
    snapshot: Snapshot,
    reference: Reference | None,
    writer: PackWriter,
    encoders: Executor,
    *,
    choices: Choices,
    bounded: BoundedCodec | None = None,
    meanwhile: Callable[[Written], None] = lambda _: None,
) -> Written:
    """Encode what differs from the reference (everything, if there is none) and put it.

    Returns when all packs are durable. Nothing is committed yet.

    Args:
        snapshot: what to write.
        reference: what was written before.
        writer: of packs.
        encoders: threads.
        choices: of modes.
        bounded: deltas with a bounded error.
        meanwhile: called when all is coded and the last packs are on their way.
    """
    try:
        written = _code(snapshot, reference, writer, encoders, choices, bounded)
        writer.flush()
        meanwhile(written)
        writer.finish()
        written.upload_seconds = writer.upload_seconds
        return written
    except NoSpace:
        writer.discard()
        raise
    except BaseException:
        # A store that is away would be waited for again, and a pack that is there may be somebody else's.
        writer.settle()
        raise


def _code(
    snapshot: Snapshot,
    reference: Reference | None,
    writer: PackWriter,
    executor: Executor,
    choices: Choices,
    bounded: BoundedCodec | None,
) -> Written:
    chunks: list[Chunk] = []
    found = Reference(dict(snapshot.chunks), {})
    whole: dict[str, tuple[int, int, str]] = {}
    modes: Counter[str] = Counter()
    digests: list[str] = []
    frames: list[Frame] = []
    seconds = 0.0
    for coded in code_chunks(snapshot.chunks, reference, choices, bounded, executor):
        if isinstance(coded, CodedFrame):
            digests.append(coded.digest)
            seconds += coded.seconds
            if coded.encoded is not None:
                frames.append(writer.append(coded.number, coded.encoded, coded.digest))
            continue
        data = snapshot.chunks[coded.key]
        digest = chunk_digest(digests)
        found.digests[coded.key], whole[coded.key] = digests, (data.item_bytes, data.data.size, digest)
        modes[coded.label] += 1
        if coded.source is not None:
            found.sources[coded.key] = coded.source
        if coded.mode != "same":
            chunks.append(coded.entry(data, digest, frames))
        digests, frames = [], []
    whole_digest = state_digest(snapshot.layout_digest, snapshot.values, whole)
    return Written(chunks, writer.packs, found, whole_digest, dict(modes), seconds)
