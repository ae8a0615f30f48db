"""From the store back to a state. Every byte is verified before anything is handed out."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from training.checkpoint.codec import (
    add_in_place,
    chunk_digest,
    decode_frame,
    encoded_checksum,
    frame_digest,
    state_digest,
)
from training.checkpoint.history import candidates, read_committed, read_parent
from training.checkpoint.manifest import (
    FRAME_BYTES,
    Committed,
    Frame,
    Layout,
    Manifest,
    Position,
    manifest_key,
    pack_key,
)
from training.checkpoint.pack import Reference
from training.checkpoint.snapshot import Bytes, ChunkData, layout_digest, rebuild
from training.checkpoint.store import Store
from training.checkpoint.token import Skipped
from training.errors import Corrupt

_MAX_CHAIN = 10_000


class RestoredState(dict[str, Any]):
    """The state as it was given to `save`, with what is known about it.

    A plain dict otherwise: `model.load_state_dict(checkpointer.restore())` works.

    Attributes:
        checkpoint: the manifest and its reference.
        skipped: newer checkpoints that were not intact, and why.
    """

    def __init__(self, state: dict[str, Any], checkpoint: Committed, skipped: Iterable[Skipped]) -> None:
        super().__init__(state)
        self.checkpoint = checkpoint
        self.skipped = tuple(skipped)

    @property
    def manifest(self) -> Manifest:
        """The manifest of the restored checkpoint."""
        return self.checkpoint.manifest

    @property
    def position(self) -> Position:
        """What comes next."""
        return self.manifest.position

    @property
    def epoch(self) -> int:
        """The epoch of the position; with `save_checkpoint(state, epoch)`, the number given there."""
        return self.position.epoch


class _Source(NamedTuple):
    """Where one frame's bytes lie."""

    pack: str
    frame: Frame
    codec: str
    delta: bool


@dataclass
class _Plan:
    """All that is needed to read one chunk: for each frame its sources, newest first, ending in a full one."""

    item_bytes: int
    size_bytes: int
    digest: str
    sources: list[list[_Source]]
    open_frames: set[int] = field(default_factory=set)

    def frame_digests(self) -> list[str]:
        """Digest of each decoded frame, as the newest manifest that wrote it says."""
        return [sources[0].frame.digest for sources in self.sources]


def restore_newest(
    store: Store,
    run: str,
    before: int | None = None,
    threads: int | None = None,
    notes: Iterable[Skipped] = (),
) -> tuple[RestoredState | None, Reference | None, list[Skipped]]:
    """The newest intact checkpoint that the history admits, its bytes as a reference, and what was skipped.

    Args:
        store: the run's store.
        run: name of the run.
        before: look only at tokens below this one (the attempt that asks).
        threads: that read and decode; default: as many as there are cores, 4 at most.
        notes: what is wrong with the store already; reported with what is skipped.

    Raises:
        Corrupt: the run has checkpoints and none of them is intact. Never silently starts from zero.
    """
    skipped = list(notes)
    found = False
    for token, sequence in candidates(store, before, skipped):
        found = True
        try:
            state, reference = _restore(store, token, sequence, run, skipped, threads)
        except Corrupt as error:
            skipped.append(Skipped(key=error.key or manifest_key(token, sequence), reason=error.message))
            continue
        return state, reference, skipped
    if found:
        raise Corrupt(
            f"none of the run's checkpoints is intact: {'; '.join(item.reason for item in skipped[:5])}",
            hint="restore the objects from a backup of the store, or start a new run",
            run=run,
        )
    return None, None, skipped


def restore_checkpoint(
    store: Store, token: int, sequence: int, run: str | None = None, threads: int | None = None
) -> RestoredState:
    """One given checkpoint, read-only: claims nothing and seals nothing.

    Raises:
        Corrupt: something in its chain is missing or damaged.
    """
    return _restore(store, token, sequence, run, [], threads)[0]


def _restore(
    store: Store, token: int, sequence: int, run: str | None, skipped: list[Skipped], threads: int | None
) -> tuple[RestoredState, Reference]:
    chain = _chain(store, read_committed(store, token, sequence, run))
    head = chain[0].manifest
    layout = _layout(chain)
    plans = _plan(chain, {entry.chunk for entry in layout.tensors})
    _check_packs(store, chain)
    chunks = {key: ChunkData(p.item_bytes, np.empty(p.size_bytes, np.uint8)) for key, p in plans.items()}
    with ThreadPoolExecutor(threads or min(4, os.cpu_count() or 1), "retoma-restore") as executor:
        _read_all(store, plans, chunks, executor)
    state = rebuild(layout, head.values, chunks)
    reference = Reference(chunks, {key: plan.frame_digests() for key, plan in plans.items()})
    return RestoredState(state, chain[0], skipped), reference


def _chain(store: Store, head: Committed) -> list[Committed]:
    """Head, parent, ... down to the base, each held against the digest that its child recorded."""
    chain = [head]
    while chain[-1].manifest.kind != "base":
        if len(chain) > _MAX_CHAIN:
            raise Corrupt(f"the chain of {head.manifest.key} has no base within {_MAX_CHAIN} checkpoints")
        chain.append(read_parent(store, chain[-1]))
    return chain


def _layout(chain: list[Committed]) -> Layout:
    head = chain[0].manifest
    layout = next((c.manifest.layout for c in chain if c.manifest.layout is not None), None)
    if layout is None or layout_digest(layout) != head.layout_digest:
        raise Corrupt(f"{head.key}: the structure of the state is not in its chain", key=head.key)
    return layout


def _plan(chain: list[Committed], live: set[str]) -> dict[str, _Plan]:
    """Gather the sources of every frame of every live chunk, from the head towards the base."""
    head = chain[0].manifest
    plans: dict[str, _Plan] = {}
    for committed in chain:
        manifest = committed.manifest
        keys = manifest.pack_keys()
        for chunk in manifest.chunks:
            plan = plans.get(chunk.key)
            if plan is None and chunk.key in live:
                count = -(-chunk.size_bytes // FRAME_BYTES)
                plan = _Plan(chunk.item_bytes, chunk.size_bytes, chunk.digest, [[] for _ in range(count)])
                plan.open_frames = set(range(count))
                plans[chunk.key] = plan
            if plan is None or (plan.item_bytes, plan.size_bytes) != (chunk.item_bytes, chunk.size_bytes):
                continue
            for frame in chunk.frames:
                if frame.number in plan.open_frames:
                    source = _Source(keys[frame.pack], frame, chunk.codec, chunk.mode == "delta")
                    plan.sources[frame.number].append(source)
                    if chunk.mode == "full":
                        plan.open_frames.discard(frame.number)
    _check_plan(head, plans, live)
    return plans


def _check_plan(head: Manifest, plans: dict[str, _Plan], live: set[str]) -> None:
    """The whole set, before a byte is read: nothing absent, nothing without a start, all digests as committed."""
    missing = sorted(live - plans.keys())
    if missing or len(plans) != head.chunk_count:
        raise Corrupt(f"{head.key}: chunks are missing from its chain: {missing[:3]}", key=head.key)
    for key, plan in plans.items():
        if plan.open_frames:
            raise Corrupt(f"{head.key}: chunk {key} has no full frame to start from", key=head.key)
        if chunk_digest(plan.frame_digests()) != plan.digest:
            raise Corrupt(f"{head.key}: the frames of chunk {key} do not belong together", key=head.key)
    actual = state_digest(
        head.layout_digest, head.values, {k: (p.item_bytes, p.size_bytes, p.digest) for k, p in plans.items()}
    )
    if actual != head.state_digest:
        raise Corrupt(f"{head.key}: expected state digest {head.state_digest}, actual {actual}", key=head.key)


def _check_packs(store: Store, chain: list[Committed]) -> None:
    """Every pack of the chain is there with exactly the size that was committed."""
    sizes: dict[str, int] = {}
    for token in {c.manifest.token for c in chain}:
        sizes.update(store.list(f"packs/{token:06d}/"))
    for committed in chain:
        manifest = committed.manifest
        for index, pack in enumerate(manifest.packs):
            key = pack_key(manifest.token, manifest.sequence, index)
            if sizes.get(key) != pack.size_bytes:
                found = f"{sizes[key]} bytes" if key in sizes else "missing"
                raise Corrupt(f"{key}: expected {pack.size_bytes} bytes, actual {found}", key=key)


def _read_all(store: Store, plans: dict[str, _Plan], chunks: dict[str, ChunkData], executor: Executor) -> None:
    """Chunk by chunk and frame by frame: all deltas of a frame are applied while it is in the cache."""
    jobs = [
        executor.submit(_read_frame, store, key, out, sources, plan.item_bytes)
        for key, plan in plans.items()
        for out, sources in zip(chunks[key].frames(), plan.sources, strict=True)
    ]
    try:
        for job in jobs:
            job.result()
    except BaseException:
        for job in jobs:
            job.cancel()
        raise


def _read_frame(store: Store, key: str, out: Bytes, sources: list[_Source], item_bytes: int) -> None:
    _decode(store, sources[-1], out)
    if len(sources) > 1:
        scratch = np.empty_like(out)
        for source in sources[:-1]:
            _decode(store, source, scratch)
            add_in_place(out, scratch, item_bytes)
    expected, actual = sources[0].frame.digest, frame_digest(out)
    if expected != actual:
        pack = sources[0].pack
        raise Corrupt(
            f"chunk {key} frame {sources[0].frame.number}: expected digest {expected}, actual {actual}", key=pack
        )


def _decode(store: Store, source: _Source, out: Bytes) -> None:
    frame = source.frame
    encoded = store.read(source.pack, frame.offset, frame.length)
    actual = encoded_checksum(encoded)
    if actual != frame.checksum:
        raise Corrupt(
            f"{source.pack} at {frame.offset}+{frame.length}: expected checksum {frame.checksum}, actual {actual}",
            key=source.pack,
        )
    decode_frame(encoded, out, source.codec)
