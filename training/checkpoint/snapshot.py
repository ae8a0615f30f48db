"""The copy of a state into host buffers: the only moment at which training waits for a save.

Tensors of at least `SMALL_BYTES` are a chunk each. Smaller ones share a slab for each item size, so that four
hundred step counters cost one chunk. Buffers are reused from save to save.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from training.checkpoint.chunks import ChunkData
from training.checkpoint.dtypes import dtype_name, dtype_of
from training.checkpoint.manifest import Layout, Tensor, layout_digest
from training.checkpoint.tree import Flat, flatten, unflatten
from training.errors import Corrupt, Invalid

SMALL_BYTES = 16 * 1024
_AS_BYTES = {torch.bool}


@dataclass
class Snapshot:
    """A state at one moment, in memory that nothing else writes to."""

    layout: Layout
    layout_digest: str
    values: list[Any]
    chunks: dict[str, ChunkData]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole state, scalars not counted."""
        return sum(chunk.data.size for chunk in self.chunks.values())


@dataclass
class SnapshotBuffers:
    """One reusable set of host buffers, laid out for one structure of state."""

    _signature: Any = None
    _pinned: bool = False
    _template: Snapshot | None = None
    _views: list[torch.Tensor] = field(default_factory=list)

    def take(self, state: Mapping[str, Any]) -> Snapshot:
        """Copy `state`. When this returns, the caller may change every tensor.

        Raises:
            Invalid: a leaf cannot be saved; named.
        """
        if not isinstance(state, Mapping):
            raise Invalid(f"a state must be a mapping of names, not {type(state).__name__}")
        flat = flatten(dict(state))
        signature = (flat.tree, flat.keys, [(t.dtype, tuple(t.shape), t.is_cuda) for t in flat.tensors])
        if self._template is None or signature != self._signature:
            self._lay_out(flat)
            self._signature = signature
        assert self._template is not None  # noqa: S101 - laid out just above
        _copy(self._views, flat.tensors)
        return Snapshot(
            self._template.layout, self._template.layout_digest, flat.values, dict(self._template.chunks)
        )

    def twin(self) -> SnapshotBuffers:
        """Another set for the same structure whose memory is there already: its first copy has no page faults."""
        other = SnapshotBuffers(_signature=self._signature, _pinned=self._pinned)
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
        for key, tensor in zip(flat.keys, flat.tensors, strict=True):
            item_bytes = tensor.element_size()
            size_bytes = tensor.numel() * item_bytes
            chunk = key if size_bytes >= SMALL_BYTES else f"~slab/{item_bytes}"
            entries.append(
                Tensor(
                    key=key,
                    dtype=dtype_name(tensor.dtype),
                    shape=tuple(tensor.shape),
                    offsets=(0,) * tensor.dim(),
                    chunk=chunk,
                    start=sizes.get(chunk, 0),
                )
            )
            sizes[chunk] = sizes.get(chunk, 0) + size_bytes
            items[chunk] = item_bytes
        layout = Layout(tree=flat.tree, tensors=tuple(entries))
        self._pinned = any(t.is_cuda for t in flat.tensors)
        buffers = {k: torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned) for k, size in sizes.items()}
        self._hold(layout, layout_digest(layout), items, buffers)

    def _hold(
        self, layout: Layout, digest: str, items: Mapping[str, int], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        self._views = [_view(buffers[entry.chunk], entry) for entry in layout.tensors]
        dtypes = {entry.chunk: entry.dtype for entry in layout.tensors if entry.chunk == entry.key}
        chunks = {k: ChunkData(items[k], buffer.numpy(), dtypes.get(k, "")) for k, buffer in buffers.items()}
        self._template = Snapshot(layout, digest, [], chunks)


class BufferPair:
    """Two sets of buffers that take turns: one backs the last committed state, the other is free for the next.

    Not more: the memory of all saves together is twice the state.
    """

    def __init__(self) -> None:
        self._spare: SnapshotBuffers | None = None
        self._held: SnapshotBuffers | None = None

    def take(self, state: Mapping[str, Any]) -> tuple[Snapshot, SnapshotBuffers]:
        """Copy a state into the free set. See `SnapshotBuffers.take`."""
        buffers, self._spare = self._spare or SnapshotBuffers(), None
        try:
            return buffers.take(state), buffers
        except BaseException:
            self._spare = buffers
            raise

    def give_back(self, buffers: SnapshotBuffers) -> None:
        """After a failed save: the set is free again."""
        self._spare = buffers

    def hold(self, buffers: SnapshotBuffers) -> None:
        """After a commit: the set backs the reference from now on, and the one before is free."""
        self._spare, self._held = self._held or buffers.twin(), buffers


def rebuild(
    layout: Layout, values: list[Any], chunks: Mapping[str, ChunkData], copiers: Executor | None = None
) -> Any:
    """The state as it was given to `save`.

    Args:
        layout: its structure.
        values: its scalars.
        chunks: its bytes.
        copiers: copy every tensor with these; without them large tensors are the chunks themselves.

    Raises:
        Corrupt: a tensor reaches beyond its chunk.
    """
    for entry in layout.tensors:
        if entry.chunk not in chunks:
            raise Corrupt(f"tensor {entry.key} lies in chunk {entry.chunk}, which is missing")

    def tensor(entry: Tensor) -> torch.Tensor:
        buffer = torch.from_numpy(chunks[entry.chunk].data)
        return _view(buffer, entry, copy=copiers is not None or entry.chunk != entry.key)

    tensors = list((copiers.map if copiers is not None else map)(tensor, layout.tensors))
    return unflatten(layout.tree, tensors, values)


def _view(buffer: torch.Tensor, entry: Tensor, *, copy: bool = False) -> torch.Tensor:
    """The slice of a chunk's bytes that is one tensor, contiguous. Copied as bytes, whatever they mean."""
    dtype = dtype_of(entry.dtype)
    size_bytes = int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
    piece = buffer[entry.start : entry.start + size_bytes]
    if piece.numel() != size_bytes:
        raise Corrupt(f"tensor {entry.key} needs {size_bytes} bytes, chunk {entry.chunk} has {piece.numel()}")
    if not size_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    return (piece.clone() if copy else piece).view(dtype).view(entry.shape)


def _copy(views: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    on_gpu = any(tensor.is_cuda for tensor in tensors)
    pairs = [
        # as bytes, since a copy of bools turns every true one into 1
        (view.view(torch.uint8), tensor.view(torch.uint8)) if tensor.dtype in _AS_BYTES else (view, tensor)
        for view, tensor in zip(views, tensors, strict=True)
    ]
    if pairs:
        targets, sources = (list(side) for side in zip(*pairs, strict=True))
        with torch.no_grad():  # one call for all: a thousand small copies are mostly Python otherwise
            torch._foreach_copy_(targets, sources, non_blocking=on_gpu)  # resolves conj and neg views
    if on_gpu:
        torch.cuda.synchronize()  # until here the optimizer could still overtake the copy
