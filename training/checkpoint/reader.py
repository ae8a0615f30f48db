"""Reads the frames of a chain from its packs, in few large pieces and ahead of need.

A store may be an object store, where each request costs milliseconds: frames that lie together are read together.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from training.checkpoint.chain import Source
from training.checkpoint.coding.codec import encoded_checksum
from training.checkpoint.store import Store
from training.errors import Corrupt

PIECE_BYTES = 8 * 1024 * 1024
_GAP_BYTES = 64 * 1024  # bytes that nobody asked for, read rather than asked around
_AHEAD = 8  # pieces that are read before their turn: bounds memory, with those of the chain in use
_THREADS = 4


@dataclass
class _Piece:
    """A range of a pack that is read with one request, and kept until its last frame was taken."""

    pack: str
    start: int
    stop: int
    frames: int = 0
    data: Future[bytes] | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class PackReader:
    """Hands out encoded frames, each one once and checked against its checksum.

    Args:
        store: the run's store.
        sources: all frames that will be taken, in about that order.
        piece_bytes: read with one request. One piece of each pack of the chain is in memory at a time.
    """

    def __init__(self, store: Store, sources: Iterable[Source], piece_bytes: int = PIECE_BYTES) -> None:
        self._store = store
        wanted = list(dict.fromkeys(sources))
        self._pieces = _plan(wanted, piece_bytes)
        self._starts = {pack: [piece.start for piece in pieces] for pack, pieces in self._pieces.items()}
        first_use = {id(piece): piece for piece in (self._piece(source) for source in wanted)}
        self._queue = list(reversed(first_use.values()))
        self._lock = threading.Lock()
        self._fetchers = ThreadPoolExecutor(_THREADS, "retoma-fetch")
        self._fetch_ahead(_AHEAD)

    def take(self, source: Source) -> memoryview:
        """The encoded bytes of a frame.

        Raises:
            Corrupt: the pack is missing or cut, or the bytes are not those that were committed.
        """
        piece, frame = self._piece(source), source.frame
        data = self._fetch(piece).result()
        start = frame.offset - piece.start
        encoded = memoryview(data)[start : start + frame.length]
        with piece.lock:
            piece.frames -= 1
            done = not piece.frames
            if done:
                piece.data = None
        if done:
            self._fetch_ahead(1)
        actual = encoded_checksum(encoded)
        if actual != frame.checksum:
            place = f"{source.pack} at {frame.offset}+{frame.length}"
            raise Corrupt(f"{place}: expected checksum {frame.checksum}, actual {actual}", key=source.pack)
        return encoded

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fetchers.shutdown(cancel_futures=True)

    def _piece(self, source: Source) -> _Piece:
        index = bisect_right(self._starts[source.pack], source.frame.offset) - 1
        return self._pieces[source.pack][index]

    def _fetch(self, piece: _Piece) -> Future[bytes]:
        with piece.lock:
            if piece.data is None:
                read = self._store.read
                piece.data = self._fetchers.submit(read, piece.pack, piece.start, piece.stop - piece.start)
            return piece.data

    def _fetch_ahead(self, count: int) -> None:
        with self._lock:
            pieces = [self._queue.pop() for _ in range(min(count, len(self._queue)))]
        for piece in pieces:
            if piece.frames:  # not taken already by somebody who did not wait for us
                self._fetch(piece)


def _plan(sources: list[Source], piece_bytes: int) -> dict[str, list[_Piece]]:
    """Pieces of each pack, ascending."""
    by_pack: dict[str, list[Source]] = {}
    for source in sources:
        by_pack.setdefault(source.pack, []).append(source)
    pieces: dict[str, list[_Piece]] = {}
    for pack, found in by_pack.items():
        pieces[pack] = []
        for source in sorted(found, key=lambda one: one.frame.offset):
            start, stop = source.frame.offset, source.frame.offset + source.frame.length
            last = pieces[pack][-1] if pieces[pack] else None
            if last is None or start > last.stop + _GAP_BYTES or stop > last.start + piece_bytes:
                last = _Piece(pack, start, stop)
                pieces[pack].append(last)
            last.stop = max(last.stop, stop)
            last.frames += 1
    return pieces
