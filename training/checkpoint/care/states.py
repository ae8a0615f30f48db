"""Every state of a store, verified going up its chains once: each delta is applied to what lies below it.

Restoring each checkpoint from its base would read a chain of n checkpoints n times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from training.checkpoint.care.survey import Fault, Survey
from training.checkpoint.chain import Source
from training.checkpoint.coding.cast import round_to_bf16
from training.checkpoint.coding.chunks import Bytes
from training.checkpoint.coding.codec import apply_frame, chunk_digest, frame_digest, release_gil, state_digest
from training.checkpoint.collected import Name
from training.checkpoint.manifest import CAST, FRAME_BYTES, Chunk, Committed, Frame, Layout, Manifest, layout_digest
from training.checkpoint.reader import PackReader
from training.errors import Corrupt

_PIECES_BYTES = 64 * 1024 * 1024


class NodeKey(NamedTuple):
    """A checkpoint in its original or in its rebased form."""

    name: Name
    rebased: bool


@dataclass
class Node:
    """One form of a checkpoint, and where the state before it is to be had, the best place first."""

    key: NodeKey
    manifest: Manifest
    below: list[Node] = field(default_factory=list)
    live: frozenset[str] = frozenset()  # chunks that its structure names
    chunks: dict[str, Chunk] = field(default_factory=dict)
    packs: list[str] = field(default_factory=list)


class _Whole(NamedTuple):
    """What a chunk is at a node, counting what it has from below."""

    item_bytes: int
    size_bytes: int
    digests: tuple[str, ...]  # of its frames


class _Table(NamedTuple):
    chunks: dict[str, _Whole]
    layout: Layout | None


Faults = dict[NodeKey, Fault]


def nodes_of(survey: Survey, names: Iterable[Name]) -> list[Node]:
    """All forms of the checkpoints, and of what they are built on, that lists admit to be whole. Oldest first."""
    needed = {link for name in names for link in survey.needs(name)}
    nodes: dict[NodeKey, Node] = {}
    for name in sorted(needed):
        found, form = survey.committed(name), survey.form(name)
        if isinstance(form, Manifest):
            _add(nodes, Node(NodeKey(name, True), form))
        if isinstance(found, Committed) and survey.original_fault(name) is None:
            node = Node(NodeKey(name, False), found.manifest)
            parent = survey.parent(name)
            if found.manifest.kind != "base" and parent is not None:
                node.below = [nodes[key] for form in (True, False) if (key := NodeKey(parent, form)) in nodes]
                if not node.below:  # it has a form of its own; what is below that one was not asked for
                    continue
            _add(nodes, node)
    return list(nodes.values())


def _add(nodes: dict[NodeKey, Node], node: Node) -> None:
    node.chunks = {chunk.key: chunk for chunk in node.manifest.chunks}
    node.packs = node.manifest.pack_keys()
    layout = node.manifest.layout
    if layout is not None:
        node.live = frozenset(entry.chunk for entry in layout.tensors)
    elif node.below:
        node.live = node.below[0].live
    nodes[node.key] = node


def check_digests(nodes: list[Node]) -> Faults:
    """Whether the manifests make up the states that they promise. Reads nothing."""
    faults: Faults = {}
    tables: dict[NodeKey, _Table] = {}
    left = _children(nodes)
    for node in nodes:
        below = next((tables[other.key] for other in node.below if other.key in tables), _Table({}, None))
        manifest = node.manifest
        table = _Table(dict(below.chunks), manifest.layout or below.layout)
        reason = _update(table.chunks, manifest) or _check_state(table, manifest)
        if reason is not None:
            faults[node.key] = Fault(manifest.key, f"{manifest.key}: {reason}")
        if left[node.key]:
            tables[node.key] = table
        for other in node.below:
            left[other.key] -= 1
            if not left[other.key]:
                tables.pop(other.key, None)
    return faults


def _update(chunks: dict[str, _Whole], manifest: Manifest) -> str | None:
    """Apply what changed. Returns what is wrong with it."""
    reason = None
    for chunk in manifest.chunks:
        count = -(-chunk.size_bytes // FRAME_BYTES)
        old = chunks.get(chunk.key)
        fits = old is not None and (old.item_bytes, old.size_bytes) == (chunk.item_bytes, chunk.size_bytes)
        digests = list(old.digests) if old is not None and fits else [""] * count
        for frame in chunk.frames:
            if frame.number >= count or (chunk.mode == "delta" and not digests[frame.number]):
                reason = f"chunk {chunk.key} frame {frame.number} has nothing to start from"
            else:
                digests[frame.number] = frame.digest
        if "" in digests or chunk_digest(digests) != chunk.digest:
            reason = reason or f"the frames of chunk {chunk.key} do not belong together"
        chunks[chunk.key] = _Whole(chunk.item_bytes, chunk.size_bytes, tuple(digests))
    return reason


def _check_state(table: _Table, manifest: Manifest) -> str | None:
    if table.layout is None or layout_digest(table.layout) != manifest.layout_digest:
        return "the structure of the state is not in its chain"
    live = {entry.chunk for entry in table.layout.tensors}
    if live - table.chunks.keys() or len(live) != manifest.chunk_count:
        return f"chunks are missing from its chain: {sorted(live - table.chunks.keys())[:3]}"
    whole = {key: (c.item_bytes, c.size_bytes, chunk_digest(list(c.digests))) for key, c in table.chunks.items()}
    actual = state_digest(manifest.layout_digest, manifest.values, {key: whole[key] for key in live})
    return (
        None if actual == manifest.state_digest else f"expected state digest {manifest.state_digest}, is {actual}"
    )


def check_data(survey: Survey, nodes: list[Node], threads: int = 1) -> tuple[Faults, int]:
    """Read, decode and verify every frame.

    Memory: a few frames for each thread, and of packs 64 MiB or 256 KiB for each checkpoint, whichever is more.

    Returns:
        What is damaged, and how many bytes were read.
    """
    if threads > 1:
        release_gil()
    units = list(_units(nodes))
    sources = [source for unit in units for node, number in unit.steps() for source in unit.sources(node, number)]
    piece_bytes = max(256 * 1024, _PIECES_BYTES // max(1, len(nodes)))
    faults: Faults = {}
    with PackReader(survey.store, sources, piece_bytes) as reader, ThreadPoolExecutor(threads) as executor:
        for found in executor.map(lambda unit: unit.check(reader), units):
            for key, fault in found.items():
                faults.setdefault(key, fault)
    return faults, sum(source.frame.length for source in set(sources))


def _children(nodes: list[Node]) -> Counter[NodeKey]:
    return Counter(other.key for node in nodes for other in node.below)


@dataclass
class _Unit:
    """One frame of a chunk at all nodes, or two where copies are computed from them."""

    chunk: str
    numbers: tuple[int, ...]
    copies: tuple[str, ...]
    nodes: list[Node]

    def steps(self) -> Iterator[tuple[Node, int]]:
        """In the order in which frames are taken."""
        for node in self.nodes:
            for number in self.numbers:
                yield node, number

    def sources(self, node: Node, number: int) -> list[Source]:
        """What a node has of a frame of the chunk."""
        chunk = node.chunks.get(self.chunk)
        if chunk is None or chunk.codec == CAST:
            return []
        return [
            Source(node.packs[frame.pack], frame, chunk.codec, chunk.mode == "delta")
            for frame in chunk.frames
            if frame.number == number
        ]

    def check(self, reader: PackReader) -> Faults:
        """Apply what each node has to what is below it."""
        faults: Faults = {}
        values: dict[NodeKey, dict[int, Bytes]] = {}  # a frame that is damaged is absent
        left = _children(self.nodes)
        for node in self.nodes:
            mine: dict[int, Bytes] = {}
            for number in self.numbers:
                below = next((v for o in node.below if (v := values.get(o.key, {}).get(number)) is not None), None)
                fault = self._apply(reader, node, number, below, mine)
                if fault is not None:
                    faults.setdefault(node.key, fault)
            fault = self._check_copies(node, mine)
            if fault is not None:
                faults.setdefault(node.key, fault)
            if left[node.key]:
                values[node.key] = mine
            for other in node.below:
                left[other.key] -= 1
                if not left[other.key]:
                    values.pop(other.key, None)
        return faults

    def _apply(
        self, reader: PackReader, node: Node, number: int, below: Bytes | None, mine: dict[int, Bytes]
    ) -> Fault | None:
        """Put this node's frame into `mine`, if it is whole."""
        chunk, sources = node.chunks.get(self.chunk), self.sources(node, number)
        if not sources:
            if chunk is None or chunk.codec != CAST:
                if below is not None:
                    mine[number] = below
                elif node.below and self._is_expected(node, number):
                    return Fault(node.manifest.key, f"chunk {self.chunk} frame {number} is damaged further down")
            return None
        assert chunk is not None  # noqa: S101 - it has sources
        size_bytes = min(FRAME_BYTES, chunk.size_bytes - number * FRAME_BYTES)
        source = sources[0]
        try:
            encoded = reader.take(source)  # also if nothing can be made of it
            if source.delta and (below is None or below.size != size_bytes):
                return Fault(source.pack, f"chunk {self.chunk} frame {number} is damaged further down")
            out = below.copy() if source.delta and below is not None else np.empty(size_bytes, np.uint8)
            apply_frame(source.codec, source.delta, encoded, out, chunk.item_bytes)
        except Corrupt as error:
            return Fault(source.pack, error.message)
        fault = self._compare(source.frame, out, self.chunk, source.pack)
        if fault is None:
            mine[number] = out
        return fault

    def _is_expected(self, node: Node, number: int) -> bool:
        """Whether the chunk has such a frame here, by the newest entry below."""
        here: Node | None = node if self.chunk in node.live else None
        while here is not None:
            chunk = here.chunks.get(self.chunk)
            if chunk is not None:
                return chunk.codec != CAST and number * FRAME_BYTES < chunk.size_bytes
            here = here.below[0] if here.below else None
        return False

    def _check_copies(self, node: Node, mine: dict[int, Bytes]) -> Fault | None:
        for copy in self.copies:
            chunk = node.chunks.get(copy)
            if chunk is None or chunk.codec != CAST or chunk.source != self.chunk:
                continue
            frames = [frame for frame in chunk.frames if frame.number == self.numbers[0] // 2]
            wanted = [number for number in self.numbers if number * FRAME_BYTES < 2 * chunk.size_bytes]
            if not frames:
                continue
            if any(number not in mine for number in wanted):
                return Fault(node.manifest.key, f"chunk {copy}: what it is a copy of is damaged")
            whole = np.concatenate([round_to_bf16(mine[number]) for number in wanted])
            fault = self._compare(frames[0], whole, copy, node.manifest.key)
            if fault is not None:
                return fault
        return None

    def _compare(self, frame: Frame, data: Bytes, chunk: str, place: str) -> Fault | None:
        actual = frame_digest(data)
        if actual == frame.digest:
            return None
        return Fault(place, f"chunk {chunk} frame {frame.number}: expected digest {frame.digest}, actual {actual}")


def _units(nodes: list[Node]) -> Iterator[_Unit]:
    counts: dict[str, int] = {}
    copies: dict[str, set[str]] = {}
    for node in nodes:
        for chunk in node.manifest.chunks:
            if chunk.codec != CAST:
                counts[chunk.key] = max(counts.get(chunk.key, 0), -(-chunk.size_bytes // FRAME_BYTES))
            elif chunk.source is not None:
                copies.setdefault(chunk.source, set()).add(chunk.key)
    for key, count in counts.items():
        step = 2 if key in copies else 1
        for start in range(0, count, step):
            numbers = tuple(range(start, min(start + step, count)))
            yield _Unit(key, numbers, tuple(sorted(copies.get(key, ()))), nodes)
