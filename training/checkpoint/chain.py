"""The chain of a checkpoint, and where each of its frames lies. Reads manifests, no pack.

A checkpoint with a rebased manifest ends the chain there: the rebased form is a base of the same state.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from training.checkpoint.coding.codec import chunk_digest, state_digest
from training.checkpoint.history import read_committed, read_parent
from training.checkpoint.manifest import (
    CAST,
    FRAME_BYTES,
    Chunk,
    Committed,
    Frame,
    Layout,
    Manifest,
    decode_rebased,
    layout_digest,
    rebased_key,
)
from training.checkpoint.store import Store
from training.checkpoint.token import Skipped
from training.errors import Corrupt

_MAX_CHAIN = 10_000
_REBASED_KEY = re.compile(r"rebased/([0-9]{6,})/([0-9]{8,})\.json", re.ASCII)


class Source(NamedTuple):
    """Where one frame's bytes lie, and how they are applied."""

    pack: str
    frame: Frame
    codec: str
    delta: bool


@dataclass
class ChunkPlan:
    """All that is needed to read one chunk: for each frame its sources, newest first, ending in a full one.

    Attributes:
        newest: the newest entry of the chunk; its frames may be a part of all.
        sources: of each frame. A frame without bytes (`CAST`) is computed from chunk `newest.source`.
    """

    newest: Chunk
    sources: list[list[Source]]
    open_frames: set[int] = field(default_factory=set)
    base: Chunk | None = None  # the entry that a cast chunk takes its source from
    bound: float | None = None  # the loosest of the bounds that its frames carry

    @property
    def item_bytes(self) -> int:
        """Bytes of an item."""
        return self.newest.item_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes of the chunk."""
        return self.newest.size_bytes

    @property
    def cast_from(self) -> str | None:
        """The chunk that this one is computed from, or None."""
        return self.base.source if self.base is not None and self.base.codec == CAST else None

    def frame_digests(self) -> list[str]:
        """Digest of each decoded frame, as the newest manifest that wrote it says."""
        return [sources[0].frame.digest for sources in self.sources]

    def frame_bytes(self, number: int) -> int:
        """Decoded bytes of a frame."""
        return min(FRAME_BYTES, self.size_bytes - number * FRAME_BYTES)


@dataclass
class Chain:
    """A checkpoint and what it is built from.

    Attributes:
        head: the checkpoint.
        contents: the manifests to read, newest first; the last one is a base, perhaps a rebased one.
        links: the checkpoints that they stand for.
    """

    head: Committed
    contents: list[Manifest] = field(default_factory=list)
    links: list[Committed] = field(default_factory=list)

    @property
    def layout(self) -> Layout:
        """The structure of the head's state. Raises `Corrupt` if it is not in the chain."""
        head = self.head.manifest
        layout = next((m.layout for m in self.contents if m.layout is not None), None)
        if layout is None or layout_digest(layout) != head.layout_digest:
            raise Corrupt(f"{head.key}: the structure of the state is not in its chain", key=head.key)
        return layout

    @property
    def size_bytes(self) -> int:
        """Bytes of all packs of the chain."""
        return sum(pack.size_bytes for manifest in self.contents for pack in manifest.packs)

    @property
    def is_rebased(self) -> bool:
        """Whether it ends in a rebased manifest."""
        return bool(self.contents) and self.contents[-1].rebases is not None


def rebased_checkpoints(store: Store, token: int | None = None) -> set[tuple[int, int]]:
    """(token, sequence) of every checkpoint that has a rebased manifest, of one token or of all."""
    prefix = "rebased/" if token is None else f"rebased/{token:06d}/"
    matches = (_REBASED_KEY.fullmatch(key) for key, _ in store.list(prefix))
    return {(int(match[1]), int(match[2])) for match in matches if match}


def read_rebased(store: Store, original: Committed) -> Manifest:
    """The rebased manifest of a checkpoint. Raises `Corrupt` if it is missing or damaged."""
    return decode_rebased(store.get(rebased_key(original.ref.token, original.ref.sequence)), original)


def read_chain(
    store: Store,
    token: int,
    sequence: int,
    run: str | None = None,
    *,
    use_rebased: bool = True,
    avoid: Collection[tuple[int, int]] = (),
    notes: list[Skipped] | None = None,
) -> Chain:
    """Head, parent, ... down to the nearest base, each held against the digest that its child recorded.

    Args:
        store: the run's store.
        token, sequence: the checkpoint.
        run: name of the run, if it is known.
        use_rebased: take rebased manifests where there are any. A damaged one is passed by, with a note.
        avoid: checkpoints whose rebased manifests are passed by.
        notes: receives what was passed by.

    Raises:
        Corrupt: a manifest is missing or damaged.
    """
    chain = Chain(read_committed(store, token, sequence, run))
    here = chain.head
    short = rebased_checkpoints(store) if use_rebased and here.manifest.kind != "base" else set()
    while True:
        content = here.manifest
        if (here.ref.token, here.ref.sequence) in short and (here.ref.token, here.ref.sequence) not in avoid:
            try:
                content = read_rebased(store, here)
            except Corrupt as error:
                if notes is not None:
                    notes.append(Skipped(key=error.key or "", reason=error.message))
        chain.contents.append(content)
        chain.links.append(here)
        if content.kind == "base":
            return chain
        if len(chain.links) > _MAX_CHAIN:
            raise Corrupt(f"the chain of {chain.head.manifest.key} has no base within {_MAX_CHAIN} checkpoints")
        here = read_parent(store, here)


def plan_chunks(chain: Chain) -> dict[str, ChunkPlan]:
    """The sources of every frame of every live chunk, gathered from the head towards the base.

    Raises:
        Corrupt: the manifests do not make up the state that the head promises. No pack was read.
    """
    live = {entry.chunk for entry in chain.layout.tensors}
    plans: dict[str, ChunkPlan] = {}
    for manifest in chain.contents:
        keys = manifest.pack_keys()
        for chunk in manifest.chunks:
            if chunk.key not in plans and chunk.key in live:
                count = -(-chunk.size_bytes // FRAME_BYTES)
                plans[chunk.key] = ChunkPlan(chunk, [[] for _ in range(count)], set(range(count)))
            plan = plans.get(chunk.key)
            if plan is not None and (plan.item_bytes, plan.size_bytes) == (chunk.item_bytes, chunk.size_bytes):
                _gather(plan, chunk, keys)
    _check_plans(chain.head.manifest, plans, live)
    return plans


def _gather(plan: ChunkPlan, chunk: Chunk, keys: list[str]) -> None:
    """Add the entries of an older manifest to frames that have no full one yet."""
    used = False
    for frame in chunk.frames:
        if frame.number in plan.open_frames:
            used = True
            key = keys[frame.pack] if chunk.codec != CAST else ""
            plan.sources[frame.number].append(Source(key, frame, chunk.codec, chunk.mode == "delta"))
            if chunk.mode == "full":
                plan.base = chunk
                plan.open_frames.discard(frame.number)
    if used and chunk.bound is not None:
        plan.bound = max(plan.bound or 0.0, chunk.bound)


def _check_plans(head: Manifest, plans: dict[str, ChunkPlan], live: set[str]) -> None:
    """The whole set, before a byte is read: nothing absent, nothing without a start, all digests as committed."""
    missing = sorted(live - plans.keys())
    if missing or len(plans) != head.chunk_count:
        raise Corrupt(f"{head.key}: chunks are missing from its chain: {missing[:3]}", key=head.key)
    for key, plan in plans.items():
        if plan.open_frames:
            raise Corrupt(f"{head.key}: chunk {key} has no full frame to start from", key=head.key)
        if chunk_digest(plan.frame_digests()) != plan.newest.digest:
            raise Corrupt(f"{head.key}: the frames of chunk {key} do not belong together", key=head.key)
        source = plans.get(plan.cast_from) if plan.cast_from else None
        if plan.cast_from and (source is None or source.cast_from or source.size_bytes != 2 * plan.size_bytes):
            raise Corrupt(f"{head.key}: chunk {key} is cast from {plan.cast_from}, which is no such chunk")
    actual = state_digest(
        head.layout_digest,
        head.values,
        {k: (p.item_bytes, p.size_bytes, p.newest.digest) for k, p in plans.items()},
    )
    if actual != head.state_digest:
        raise Corrupt(f"{head.key}: expected state digest {head.state_digest}, actual {actual}", key=head.key)


def check_packs(store: Store, chain: Chain) -> None:
    """Every pack of the chain is there with exactly the size that was committed.

    Raises:
        Corrupt: names the pack, the committed and the actual size.
    """
    sizes: dict[str, int] = {}
    for folder in sorted({key.rpartition("/")[0] for m in chain.contents for key in m.pack_keys()}):
        sizes.update(store.list(f"{folder}/"))
    for manifest in chain.contents:
        for key, pack in zip(manifest.pack_keys(), manifest.packs, strict=True):
            if sizes.get(key) != pack.size_bytes:
                found = f"{sizes[key]} bytes" if key in sizes else "missing"
                raise Corrupt(f"{key}: expected {pack.size_bytes} bytes, actual {found}", key=key)
