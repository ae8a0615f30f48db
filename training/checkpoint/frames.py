"""The frames of a chain, decoded and verified. Knows no torch: commands and compaction use it, too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import numpy as np

from training.checkpoint.chain import ChunkPlan
from training.checkpoint.coding.cast import cast_frame, round_to_bf16
from training.checkpoint.coding.chunks import Bytes, ChunkData
from training.checkpoint.coding.codec import apply_frame, frame_digest, release_gil
from training.checkpoint.manifest import FRAME_BYTES
from training.checkpoint.reader import PIECE_BYTES, PackReader
from training.checkpoint.store import Store
from training.errors import Corrupt

_PIECES_BYTES = 64 * 1024 * 1024  # of all packs of a chain together, while its frames are mapped
_LEAST_PIECE_BYTES = 256 * 1024
_AHEAD = 2  # frames that are done before their turn, for each thread
T = TypeVar("T")


Chosen = Mapping[str, Collection[int]]  # chunk -> the numbers of frames


def read_chunks(
    store: Store, plans: dict[str, ChunkPlan], executor: Executor, chosen: Chosen | None = None
) -> dict[str, ChunkData]:
    """The bytes of chunks, verified frame by frame.

    Args:
        store: the run's store.
        plans: of all chunks.
        executor: threads that read and decode.
        chosen: the frames that are needed; default: all. What lies between those of a chunk has any bytes.

    Raises:
        Corrupt: names the pack or chunk.
    """
    chosen = (
        {key: range(len(p.sources)) for key, p in plans.items()} if chosen is None else _with_sources(plans, chosen)
    )
    plans = {key: plan for key, plan in plans.items() if key in chosen}
    chunks = {key: ChunkData(p.item_bytes, np.empty(p.size_bytes, np.uint8)) for key, p in plans.items()}
    stored = {key: plan for key, plan in plans.items() if plan.cast_from is None}
    sources = (
        one for k, p in stored.items() for number in sorted(chosen[k]) for one in reversed(p.sources[number])
    )
    with PackReader(store, sources) as reader:
        _run_all(executor, _reads(reader, stored, chunks, chosen))
        _run_all(executor, _casts({k: p for k, p in plans.items() if k not in stored}, chunks, chosen))
    return chunks


def _with_sources(plans: dict[str, ChunkPlan], chosen: Chosen) -> Chosen:
    """And the frames that rounded copies are computed from: two for each."""
    found = {key: set(numbers) for key, numbers in chosen.items()}
    for key, numbers in chosen.items():
        source = plans[key].cast_from
        if source is not None:
            last = len(plans[source].sources)
            twice = {at for number in numbers for at in (2 * number, 2 * number + 1) if at < last}
            found.setdefault(source, set()).update(twice)
    return found


def read_frame(reader: PackReader, key: str, plan: ChunkPlan, number: int, out: Bytes) -> None:
    """One frame of a chunk: from its full form on, all deltas are applied while it is in the cache.

    Raises:
        Corrupt: something is missing or damaged, or the result is not what was committed.
    """
    sources = plan.sources[number]
    for source in reversed(sources):
        try:
            apply_frame(source.codec, source.delta, reader.take(source), out, plan.item_bytes)
        except Corrupt as error:
            raise Corrupt(f"{source.pack}: {error.message}", hint=error.hint, key=source.pack) from error
    _check_frame(key, plan, number, out, sources[0].pack)


def _reads(
    reader: PackReader, plans: dict[str, ChunkPlan], chunks: dict[str, ChunkData], chosen: Chosen
) -> Iterator[Callable[[], None]]:
    for key, plan in plans.items():
        frames = chunks[key].frames()
        for number in sorted(chosen[key]):
            yield partial(read_frame, reader, key, plan, number, frames[number])


def _casts(
    plans: dict[str, ChunkPlan], chunks: dict[str, ChunkData], chosen: Chosen
) -> Iterator[Callable[[], None]]:
    def cast(key: str, plan: ChunkPlan, number: int, out: Bytes) -> None:
        assert plan.cast_from is not None  # noqa: S101 - the caller chose
        out[:] = cast_frame(number, out.size, chunks[plan.cast_from].data)
        _check_frame(key, plan, number, out, plan.cast_from)

    for key, plan in plans.items():
        frames = chunks[key].frames()
        for number in sorted(chosen[key]):
            yield partial(cast, key, plan, number, frames[number])


def _check_frame(key: str, plan: ChunkPlan, number: int, out: Bytes, place: str) -> None:
    expected, actual = plan.sources[number][0].frame.digest, frame_digest(out)
    if expected != actual:
        raise Corrupt(f"chunk {key} frame {number}: expected digest {expected}, actual {actual}", key=place)


def _run_all(executor: Executor, jobs: Iterator[Callable[[], None]]) -> None:
    """All jobs; after a failure none that has not begun."""
    futures = [executor.submit(job) for job in jobs]
    try:
        for future in futures:
            future.result()
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def map_frames(
    store: Store, plans: dict[str, ChunkPlan], work: Callable[[Bytes, int], T], threads: int = 1
) -> Iterator[tuple[str, int, T]]:
    """(chunk, frame number, result of `work`) of every stored frame, in order.

    `work` is given the bytes of a frame, after they were verified, and the bytes of an item; any thread does it.
    Copies that are computed from another chunk are verified on the way, and not yielded. Memory is bounded by a few
    frames for each thread and 64 MiB of encoded pieces, whatever the state's size.

    Raises:
        Corrupt: names the pack or chunk.
    """
    if threads > 1:
        release_gil()
    stored = {key: plan for key, plan in plans.items() if plan.cast_from is None}
    casts = _CastCheck(plans)
    links = max((len(sources) for plan in stored.values() for sources in plan.sources), default=1)
    piece_bytes = min(PIECE_BYTES, max(_LEAST_PIECE_BYTES, _PIECES_BYTES // links))
    sources = (one for plan in stored.values() for frame in plan.sources for one in reversed(frame))

    def job(key: str, plan: ChunkPlan, number: int) -> tuple[T, Bytes | None]:
        out = np.empty(plan.frame_bytes(number), np.uint8)
        read_frame(reader, key, plan, number, out)
        return work(out, plan.item_bytes), round_to_bf16(out) if casts.has_copies(key) else None

    waiting: deque[tuple[str, int, Future[tuple[T, Bytes | None]]]] = deque()

    def take() -> tuple[str, int, T]:
        key, number, future = waiting.popleft()
        result, half = future.result()
        if half is not None:
            casts.check(key, number, half)
        return key, number, result

    with (
        PackReader(store, sources, piece_bytes) as reader,
        ThreadPoolExecutor(threads, "retoma-frames") as executor,
    ):
        try:
            for key, plan in stored.items():
                for number in range(len(plan.sources)):
                    waiting.append((key, number, executor.submit(job, key, plan, number)))
                    if len(waiting) > _AHEAD * threads:
                        yield take()
            while waiting:
                yield take()
        finally:
            for _, _, future in waiting:
                future.cancel()


def read_frames(store: Store, plans: dict[str, ChunkPlan], threads: int = 1) -> None:
    """Read and verify every frame, and keep nothing. Raises `Corrupt` naming the pack or chunk."""
    for _ in map_frames(store, plans, _nothing, threads):
        pass


def _nothing(frame: Bytes, item_bytes: int) -> None:
    """Verified is all that it had to be."""


class _CastCheck:
    """Holds rounded copies against their digests while the chunks that they are copies of stream by.

    One frame of a copy belongs to two of its source, so that half a frame is held back for each copy.
    """

    def __init__(self, plans: dict[str, ChunkPlan]) -> None:
        self._plans = plans
        self._copies: dict[str, list[str]] = {}
        for key, plan in plans.items():
            if plan.cast_from is not None:
                self._copies.setdefault(plan.cast_from, []).append(key)
        self._halves: list[Bytes] = []

    def has_copies(self, key: str) -> bool:
        """Whether any chunk is computed from this one."""
        return key in self._copies

    def check(self, key: str, number: int, half: Bytes) -> None:
        """Count frame `number` of a source, rounded."""
        self._halves.append(half)
        last = number == len(self._plans[key].sources) - 1
        if number % 2 == 0 and not last:
            return
        whole = np.concatenate(self._halves)
        self._halves.clear()
        assert whole.size <= FRAME_BYTES  # noqa: S101 - frames come in order
        for copy in self._copies[key]:
            _check_frame(copy, self._plans[copy], number // 2, whole, key)
