"""A state at one moment, as chunks of bytes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from training.checkpoint.coding.chunks import ChunkData
from training.checkpoint.manifest import Layout, Tensor
from training.checkpoint.state.dtypes import dtype_of
from training.checkpoint.state.tree import unflatten
from training.errors import Corrupt


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
        return view_of(buffer, entry, copy=copiers is not None or entry.chunk != entry.key)

    tensors = list((copiers.map if copiers is not None else map)(tensor, layout.tensors))
    return unflatten(layout.tree, tensors, values)


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
