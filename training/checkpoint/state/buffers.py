"""The copy of a state into host buffers: the only moment at which training waits for a save.

Tensors of at least `SMALL_BYTES` are a chunk each. Smaller ones share slabs by item size and role, so that four
hundred step counters cost one chunk. Buffers are reused from save to save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from training.checkpoint.coding.chunks import ChunkData
from training.checkpoint.manifest import Layout, Tensor, layout_digest
from training.checkpoint.state.boxes import whole_key
from training.checkpoint.state.copying import COPY_THREADS, Copying, Copyings, Part
from training.checkpoint.state.dtypes import dtype_name
from training.checkpoint.state.overlap import SMALL_BYTES, Promised
from training.checkpoint.state.share import ALONE, Share
from training.checkpoint.state.snapshot import Snapshot, view_of
from training.checkpoint.state.tree import Flat, flatten
from training.errors import Invalid

_MANY = 4  # tensors of one name, to have a slab of their own


@dataclass
class SnapshotBuffers:
    """One reusable set of host buffers, laid out for one structure of state, or for a rank's share of it."""

    share: Share = ALONE
    _signature: Any = None
    _pinned: bool = False
    _template: Snapshot | None = None
    _views: list[torch.Tensor | None] = field(default_factory=list)

    def take(
        self, state: Mapping[str, Any], promised: Mapping[int, Promised], copiers: ThreadPoolExecutor
    ) -> tuple[Snapshot, Copyings]:
        """Copy `state`. When this returns, the caller may change every tensor that is not promised.

        Args:
            state: what to copy.
            promised: tensors, by address, that may be copied later.
            copiers: threads to copy the rest with, beside this one.

        Returns:
            The snapshot, whole when the copying is finished.

        Raises:
            Invalid: a leaf cannot be saved; named.
        """
        flat = self.lay_out(state)
        assert self._template is not None  # noqa: S101 - laid out just above
        now, later = [], []
        for view, tensor, address, key in zip(self._views, flat.tensors, flat.addresses, flat.keys, strict=True):
            if view is None:  # another rank's
                continue
            promise = promised.get(address)
            if promise is None or not _alike(promise.tensor, tensor):
                now.append(Part(key, view, tensor))
            else:
                later.append(Part(key, view, tensor, promise, promise.tensor._version))
        rest = Copyings(later)
        Copying(now).share(copiers)
        chunks = dict(self._template.chunks)
        return Snapshot(
            self._template.layout, self._template.layout_digest, flat.values, chunks, flat.own_values
        ), rest

    def lay_out(self, state: Mapping[str, Any]) -> Flat:
        """Make buffers for the structure of a state, unless they are there. Returns the state in pieces."""
        if not isinstance(state, Mapping):
            raise Invalid(f"a state must be a mapping of names, not {type(state).__name__}")
        flat = flatten(dict(state), self.share.rank)
        if flat.is_pooled and self.share.holders_of is None:
            raise Invalid(
                "a state with a Pooled in it, and nobody knows which ranks hold the same of it",
                hint="IncrementalCheckpointer(..., group=..., holders_of=...)",
            )
        signature = (flat.tree, flat.keys, [(t.dtype, tuple(t.shape), t.is_cuda) for t in flat.tensors])
        if self._template is None or signature != self._signature:
            self._lay_out(flat)
            self._signature = signature
        return flat

    def touch(self) -> None:
        """Write to all of the memory, so that the first copy into it has no page faults."""
        for chunk in self._template.chunks.values() if self._template is not None else ():
            chunk.data.fill(0)

    def twin(self) -> SnapshotBuffers:
        """Another set for the same structure whose memory is there already: its first copy has no page faults."""
        other = SnapshotBuffers(self.share, self._signature, self._pinned)
        if self._template is not None:
            old = self._template.chunks
            buffers = {
                key: torch.zeros(chunk.data.size, dtype=torch.uint8, pin_memory=self._pinned)
                for key, chunk in old.items()
            }
            items = {key: chunk.item_bytes for key, chunk in old.items()}
            other._hold(self._template.layout, self._template.layout_digest, items, buffers)
        return other

    def _lay_out(self, flat: Flat) -> None:
        sizes: dict[str, int] = {}
        items: dict[str, int] = {}
        entries = []
        owners = [self._owner(flat, place) for place in range(len(flat.keys))]
        roles = _roles(flat, owners)
        for place, (key, tensor) in enumerate(zip(flat.keys, flat.tensors, strict=True)):
            item_bytes = tensor.element_size()
            size_bytes = tensor.numel() * item_bytes
            slab = f"~slab/{owners[place]}{item_bytes}{roles.get(place, '')}"
            chunk = key if size_bytes >= SMALL_BYTES else slab
            entries.append(
                Tensor(
                    key=key,
                    dtype=dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                    offsets=flat.offsets[place],
                    chunk=chunk,
                    start=sizes.get(chunk, 0),
                )
            )
            sizes[chunk] = sizes.get(chunk, 0) + size_bytes
            items[chunk] = item_bytes
        layout = Layout(tree=flat.tree, tensors=tuple(entries))
        self._pinned = any(t.is_cuda for t in flat.tensors)
        mine = self.share.common_chunks(entries, sizes) | {entries[place].chunk for place in flat.own}
        buffers = {
            chunk: torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
            for chunk, size in sizes.items()
            if chunk in mine
        }
        self._hold(layout, layout_digest(layout), items, buffers)

    def _owner(self, flat: Flat, place: int) -> str:
        """Whose slab a small tensor goes to: a rank's own, that of the ranks that hold it, or that of all."""
        if place in flat.own:
            return f"r{self.share.rank:04d}/"
        holders = self.share.holders(flat.keys[place])
        return f"p{holders[0]:04d}/" if len(holders) < self.share.size else ""

    def _hold(
        self, layout: Layout, digest: str, items: Mapping[str, int], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._views = [
            view_of(buffers[entry.chunk], entry) if entry.chunk in buffers else None for entry in layout.tensors
        ]
        dtypes = {entry.chunk: entry.dtype for entry in layout.tensors if entry.chunk == entry.key}
        chunks = {k: ChunkData(items[k], buffer.numpy(), dtypes.get(k, "")) for k, buffer in buffers.items()}
        self._template = Snapshot(layout, digest, [], chunks)


class BufferPair:
    """Two sets of buffers that take turns: one backs the last committed state, the other is free for the next.

    Not more: the memory of all saves together is twice the state.
    """

    def __init__(self, share: Share = ALONE) -> None:
        self._share = share
        self._copiers = ThreadPoolExecutor(COPY_THREADS, "retoma-copy")
        self._spare: SnapshotBuffers | None = None
        self._held: SnapshotBuffers | None = None
        self._touched: Future[None] | None = None

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Have the memory for a state of this structure made in the background, before it is first needed."""
        if self._spare is None and self._held is None:
            self._spare = SnapshotBuffers(self._share)
            self._spare.lay_out(state)
            self._touched = self._copiers.submit(self._spare.touch)

    def take(
        self, state: Mapping[str, Any], promised: Mapping[int, Promised]
    ) -> tuple[Snapshot, Copyings, SnapshotBuffers]:
        """Copy a state into the free set. See `SnapshotBuffers.take`."""
        if self._touched is not None:
            self._touched.result()
            self._touched = None
        buffers, self._spare = self._spare or SnapshotBuffers(self._share), None
        try:
            return *buffers.take(state, promised, self._copiers), buffers
        except BaseException:
            self._spare = buffers
            raise

    def give_back(self, buffers: SnapshotBuffers) -> None:
        """After a failed save: the set is free again."""
        self._spare = buffers

    def hold(self, buffers: SnapshotBuffers) -> None:
        """After a commit: the set backs the reference from now on, and the one before is free."""
        self._spare, self._held = self._held or buffers.twin(), buffers

    def close(self) -> None:
        """End the threads."""
        self._copiers.shutdown()


def _roles(flat: Flat, owners: Sequence[str]) -> dict[int, str]:
    """`/exp_avg` and the like for the places of small tensors that have their last name in common with others.

    Weights, first and second moments are best coded in different ways, so that they do not share a slab.
    """
    tensors = enumerate(zip(flat.keys, flat.tensors, strict=True))
    small = {place: key for place, (key, tensor) in tensors if tensor.nbytes < SMALL_BYTES and "/" in key}
    names = {place: (owners[place], whole_key(key).rpartition("/")[2]) for place, key in small.items()}
    counts = Counter(names.values())
    return {place: f"/{name[1]}" for place, name in names.items() if counts[name] >= _MANY and "." not in name[1]}


def _alike(promised: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a leaf at the same address is the promised tensor, not more of that memory or another view of it."""
    return (
        promised.shape == tensor.shape and promised.stride() == tensor.stride() and promised.dtype == tensor.dtype
    )
