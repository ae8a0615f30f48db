"""A state at one moment, as chunks of bytes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from training.checkpoint.coding.chunks import ChunkData
from training.checkpoint.manifest import FRAME_BYTES, Layout, Tensor
from training.checkpoint.state.boxes import EVERYTHING, PART_MARK, Box, Wanted, whole_key
from training.checkpoint.state.dtypes import dtype_of
from training.checkpoint.state.rank_tree import of_rank, without
from training.checkpoint.state.tree import unflatten
from training.errors import Corrupt


@dataclass
class Snapshot:
    """A state at one moment, in memory that nothing else writes to."""

    layout: Layout
    layout_digest: str
    values: list[Any]
    chunks: dict[str, ChunkData]  # that this rank saves
    own_values: list[int] = field(default_factory=list)  # places of the scalars that only this rank has

    @property
    def size_bytes(self) -> int:
        """Bytes of the state, or of a rank's share of it; scalars not counted."""
        return sum(chunk.data.size for chunk in self.chunks.values())


def rebuild(
    layout: Layout,
    values: list[Any],
    chunks: Mapping[str, ChunkData],
    copiers: Executor | None = None,
    wanted: Wanted = EVERYTHING,
) -> Any:
    """The state as it was given to `save`, or a rank's part of it: of a sharded tensor a plain one of its box.

    A dict lacks the entries all of whose tensors other ranks hold.

    Args:
        layout: its structure.
        values: its scalars.
        chunks: its bytes, as far as they are wanted.
        copiers: copy every tensor with these; without them large tensors are the chunks themselves.
        wanted: what this rank needs.

    Raises:
        Corrupt: a tensor reaches beyond its chunk.
    """
    for entry in layout.tensors:
        if entry.chunk not in chunks and wanted.needs(entry):
            raise Corrupt(f"tensor {entry.key} lies in chunk {entry.chunk}, which is missing")

    def tensor(entry: Tensor) -> torch.Tensor:
        if not wanted.needs(entry):
            return torch.empty(0 if entry.shape else (), dtype=dtype_of(entry.dtype))
        buffer = torch.from_numpy(chunks[entry.chunk].data)
        if PART_MARK in entry.key:  # copied when it is joined
            return view_of(buffer, entry)
        whole, box = Box(entry.offsets, entry.shape), wanted.box(entry.key, entry.shape)
        if box != whole:
            return view_of(buffer, entry)[box.within(whole)].clone(memory_format=torch.contiguous_format)
        return view_of(buffer, entry, copy=copiers is not None or entry.chunk != entry.key)

    tensors = list((copiers.map if copiers is not None else map)(tensor, layout.tensors))

    def join(shape: list[int], places: list[int]) -> torch.Tensor:
        return _join([(layout.tensors[place], tensors[place]) for place in places], shape, wanted)

    tree = layout.tree
    if wanted.rank is not None:
        others = {place for place, entry in enumerate(layout.tensors) if wanted.leaves_out(entry)}
        tree = of_rank(tree, wanted.rank)
        tree = without(tree, others) if others else tree
    return unflatten(tree, tensors, values, join)


def chosen_frames(layout: Layout, wanted: Wanted) -> dict[str, set[int]]:
    """The frames of each chunk that hold what is wanted."""
    chosen: dict[str, set[int]] = {}
    for entry in layout.tensors:
        items = wanted.items(entry)
        if wanted.needs(entry):
            item_bytes = dtype_of(entry.dtype).itemsize
            first = (entry.start + items.start * item_bytes) // FRAME_BYTES
            last = (entry.start + items.stop * item_bytes - 1) // FRAME_BYTES
            chosen.setdefault(entry.chunk, set()).update(range(first, last + 1) if items else ())
    return chosen


def _join(parts: list[tuple[Tensor, torch.Tensor]], shape: list[int], wanted: Wanted) -> torch.Tensor:
    """The wanted box of a tensor, from the parts that were saved."""
    first = parts[0][0]
    box = wanted.box(first.key, shape)
    out = torch.empty(box.sizes, dtype=dtype_of(first.dtype))
    found = 0
    for entry, data in parts:
        saved = Box(entry.offsets, entry.shape)
        common = saved.overlap(box)
        if common is not None:
            target, source = out[common.within(box)], data[common.within(saved)]
            if out.dtype is torch.bool:  # a copy of bools turns every true one into 1
                target, source = target.view(torch.uint8), source.view(torch.uint8)
            target.copy_(source)
            found += source.numel()
    if found != out.numel():
        raise Corrupt(f"the parts of {whole_key(first.key)} hold {found} of {out.numel()} elements")
    return out


def view_of(buffer: torch.Tensor, entry: Tensor, *, copy: bool = False) -> torch.Tensor:
    """The slice of a chunk's bytes that is one tensor, contiguous. Copied as bytes, whatever they mean."""
    dtype = dtype_of(entry.dtype)
    size_bytes = int(np.prod(entry.shape, dtype=np.int64)) * dtype.itemsize
    piece = buffer[entry.start : entry.start + size_bytes]
    if piece.numel() != size_bytes:
        raise Corrupt(f"tensor {entry.key} needs {size_bytes} bytes, chunk {entry.chunk} has {piece.numel()}")
    if not size_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    return (piece.clone() if copy else piece).view(dtype).view(entry.shape)
