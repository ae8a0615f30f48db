"""From a snapshot and the last committed state to coded frames, in the order of the chunks.

For each chunk the cheapest of: the same as before, a rounded copy of another chunk, a bounded delta (if the user
allows one), a lossless delta, and full.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from training.checkpoint.coding.bounded import BoundedCodec, can_be_bounded, encode_bounded, is_second_moment
from training.checkpoint.coding.cast import cast_frame, find_source, largest_error
from training.checkpoint.coding.choices import Choices, OneChoice
from training.checkpoint.coding.chunks import Bytes, ChunkData
from training.checkpoint.coding.codec import (
    apply_frame,
    changed_groups,
    encode_difference,
    encode_frame,
    frame_digest,
    is_sparse,
    prefers_delta,
)
from training.checkpoint.manifest import BALANCED, CAST, CODEC, Chunk, Frame

FRAMES_IN_FLIGHT = 4  # coded frames that wait for their turn: bounds memory at 16 MiB and a little
R = TypeVar("R")


@dataclass
class Reference:
    """The last committed state, against which the next deltas are taken.

    Attributes:
        chunks: its bytes; of a bounded checkpoint the reconstructed ones.
        digests: of each frame.
        sources: of each chunk that was stored as a rounded copy, the chunk that it is a copy of.
    """

    chunks: dict[str, ChunkData]
    digests: dict[str, list[str]]
    sources: dict[str, str] = field(default_factory=dict)

    def previous(self, key: str, chunk: ChunkData) -> tuple[list[Bytes], list[str]] | None:
        """Frames and digests of the same chunk, or None if a delta to it cannot be taken."""
        old = self.chunks.get(key)
        if old is None or key in self.sources:
            return None
        if (old.item_bytes, old.data.size) != (chunk.item_bytes, chunk.data.size):
            return None
        return old.frames(), self.digests[key]


class CodedFrame(NamedTuple):
    """One frame. `encoded` is None if it is the same as before, and empty if it is computed from another chunk."""

    number: int
    digest: str
    encoded: bytes | None
    seconds: float = 0.0  # of CPU time


class CodedChunk(NamedTuple):
    """How a chunk was coded; its frames have come before it."""

    key: str
    mode: Literal["full", "delta", "same"]
    codec: str = CODEC
    source: str | None = None
    bound: float | None = None

    @property
    def label(self) -> str:
        """For counting."""
        return self.mode if self.mode == "same" or self.codec in (CODEC, BALANCED) else self.codec

    def entry(self, data: ChunkData, digest: str, frames: list[Frame]) -> Chunk:
        """What the manifest says about it."""
        assert self.mode != "same"  # noqa: S101 - it would say nothing
        return Chunk(
            key=self.key,
            mode=self.mode,
            codec=self.codec,
            item_bytes=data.item_bytes,
            size_bytes=data.data.size,
            digest=digest,
            frames=tuple(frames),
            source=self.source,
            bound=self.bound,
        )


@dataclass
class _ChunkEncoder:
    """Codes the frames of one chunk without loss, each as a job that any thread may do."""

    key: str
    chunk: ChunkData
    previous: tuple[list[Bytes], list[str]] | None
    choice: OneChoice

    def code(self, number: int, frame: Bytes) -> CodedFrame:
        """One frame."""
        started = time.thread_time()
        item_bytes = self.chunk.item_bytes
        if self.previous is None:
            encoded = encode_frame(frame, item_bytes)
            return CodedFrame(number, frame_digest(frame), encoded, time.thread_time() - started)
        old = self.previous[0][number]
        groups = changed_groups(frame, old)
        if not groups.any():
            return CodedFrame(number, self.previous[1][number], None, time.thread_time() - started)

        def measure() -> bool:
            return is_sparse(groups) or prefers_delta(frame, old, item_bytes, groups)

        if self.choice.prefers_delta(measure):
            encoded = encode_difference(frame, old, item_bytes, groups)
        else:
            encoded = encode_frame(frame, item_bytes)
        return CodedFrame(number, frame_digest(frame), encoded, time.thread_time() - started)

    def outcome(self) -> CodedChunk:
        """How the chunk was coded, when all of its frames are."""
        if self.previous is not None and self.choice.delta is None:
            return CodedChunk(self.key, "same")  # no frame had to choose
        return CodedChunk(self.key, "delta", BALANCED) if self.choice.delta else CodedChunk(self.key, "full")


def code_chunks(
    chunks: Mapping[str, ChunkData],
    reference: Reference | None,
    choices: Choices,
    bounded: BoundedCodec | None,
    executor: Executor,
) -> Iterator[CodedFrame | CodedChunk]:
    """For each chunk: its coded frames, then how it was coded. Rounded copies come last.

    A bounded chunk is overwritten by what a reader will reconstruct, since the next delta is taken to that.
    """
    return _in_order(_start_all(chunks, reference, choices, bounded, executor))


def start(executor: Executor, job: Callable[[], R]) -> Future[R]:
    """Hand a job to the executor, or do it here when the interpreter is on its way out.

    A script that ends without `close()` still has its last save committed: the interpreter waits for the saving
    thread, but its executors take no new jobs by then.
    """
    try:
        return executor.submit(job)
    except RuntimeError:
        return _done(job())


def _start_all(
    chunks: Mapping[str, ChunkData],
    reference: Reference | None,
    choices: Choices,
    bounded: BoundedCodec | None,
    executor: Executor,
) -> Iterator[Future[CodedFrame | CodedChunk | _ChunkEncoder]]:
    # Found before anything is overwritten, coded last: a copy follows what became of its source.
    found = {key: find_source(key, chunks, choices.sources.get(key)) for key in chunks}
    choices.sources = {key: source for key, source in found.items() if source is not None}
    for key, chunk in chunks.items():
        if key in choices.sources:
            continue
        previous = reference.previous(key, chunk) if reference is not None else None
        encoder = _ChunkEncoder(key, chunk, previous, OneChoice(choices, key))
        whole = None
        if bounded is not None and previous is not None:
            whole = _bounded(encoder, bounded, choices, executor)
        if whole is not None:
            for item in whole:
                yield _done(item)
            continue
        for number, frame in enumerate(chunk.frames()):
            yield start(executor, partial(encoder.code, number, frame))
        yield _done(encoder)
    for key, source in choices.sources.items():
        for item in _cast(key, source, chunks, reference):
            yield _done(item)


def _in_order(futures: Iterator[Future[Any]]) -> Iterator[Any]:
    """Results in order, with a bounded number of jobs in flight."""
    waiting: deque[Future[Any]] = deque()
    for future in futures:
        waiting.append(future)
        if len(waiting) >= FRAMES_IN_FLIGHT:
            yield _result(waiting.popleft())
    while waiting:
        yield _result(waiting.popleft())


def _result(future: Future[Any]) -> Any:
    found = future.result()
    return found.outcome() if isinstance(found, _ChunkEncoder) else found


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _cast(
    key: str, source: str, chunks: Mapping[str, ChunkData], reference: Reference | None
) -> list[CodedFrame | CodedChunk]:
    """All frames without bytes: the digests prove that the copy was restored.

    Where the source was bounded, its copy follows what a reader will reconstruct, and has a bound, too.
    """
    frames, worst = [], 0.0
    for number, copy in enumerate(chunks[key].frames()):
        cast = cast_frame(number, copy.size, chunks[source].data)
        if not np.array_equal(cast, copy):
            worst = max(worst, largest_error(cast, copy))
            copy[:] = cast
        frames.append(CodedFrame(number, frame_digest(copy), b""))
    if _is_unchanged(key, source, [frame.digest for frame in frames], chunks, reference):
        return [*(frame._replace(encoded=None) for frame in frames), CodedChunk(key, "same", CAST, source)]
    return [*frames, CodedChunk(key, "full", CAST, source, worst or None)]


def _is_unchanged(
    key: str, source: str, digests: list[str], chunks: Mapping[str, ChunkData], reference: Reference | None
) -> bool:
    """Whether copy and source are those of the last checkpoint: the copy is listed again when either changes."""
    if reference is None or reference.sources.get(key) != source or reference.digests[key] != digests:
        return False
    old = reference.chunks.get(source)
    return old is not None and np.array_equal(old.data, chunks[source].data)


def _bounded(
    encoder: _ChunkEncoder, bounded: BoundedCodec, choices: Choices, executor: Executor
) -> list[CodedFrame | CodedChunk] | None:
    """The chunk in bounded frames, or None: it is no float32, little of it changed, or the bound cannot be held."""
    assert encoder.previous is not None  # noqa: S101 - the caller looked
    key = encoder.key
    if not (can_be_bounded(encoder.chunk) and choices.may_be_bounded(key)):
        return None
    news, (olds, digests) = encoder.chunk.frames(), encoder.previous
    groups = [changed_groups(new, old) for new, old in zip(news, olds, strict=True)]
    if all(is_sparse(found) for found in groups):
        return None  # lossless costs little
    changed = [number for number, found in enumerate(groups) if found.any()]
    allowed = bounded.bound_of(key, encoder.chunk.data)
    for codec in bounded.codecs_of(key) if allowed is not None else ():
        results, worst = _quantise(encoder, codec, changed, executor)
        if allowed is not None and worst <= allowed:
            break
    else:
        choices.cannot_be_bounded(key)
        return None
    frames: list[CodedFrame | CodedChunk] = []
    for number, new in enumerate(news):
        if number not in results:
            frames.append(CodedFrame(number, digests[number], None))
            continue
        encoded, seconds = results[number]
        _replace(new, olds[number], codec, encoded, encoder.chunk.item_bytes)
        frames.append(CodedFrame(number, frame_digest(new), encoded, seconds))
    return [*frames, CodedChunk(key, "delta", codec, bound=worst)]


def _quantise(
    encoder: _ChunkEncoder, codec: str, changed: list[int], executor: Executor
) -> tuple[dict[int, tuple[bytes, float]], float]:
    """Frames by number with the CPU seconds they took, and the largest error of any element. Changes nothing."""
    assert encoder.previous is not None  # noqa: S101 - the caller looked
    news, olds = encoder.chunk.frames(), encoder.previous[0]
    root = is_second_moment(encoder.key)

    def work(number: int) -> tuple[bytes, float, float]:
        started = time.thread_time()
        encoded, error = encode_bounded(codec, news[number], olds[number], root)
        return encoded, error, time.thread_time() - started

    coded = list(_in_order(start(executor, partial(work, number)) for number in changed))
    frames = {number: (encoded, seconds) for number, (encoded, _, seconds) in zip(changed, coded, strict=True)}
    return frames, max(error for _, error, _ in coded)


def _replace(new: Bytes, old: Bytes, codec: str, encoded: bytes, item_bytes: int) -> None:
    """What a reader will have becomes what the next delta is taken to."""
    new[:] = old
    apply_frame(codec, True, encoded, new, item_bytes)
