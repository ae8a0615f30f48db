"""Tensors that are sharded over several ranks: which part of the whole a rank holds, and whether it saves it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
import xxhash

from training.checkpoint.state.boxes import NOTHING, Box, BoxOf
from training.checkpoint.state.pooled import Pooled
from training.errors import Invalid

PIPELINE = "pp"  # name of the dimension of a mesh whose ranks hold different layers


class Part(NamedTuple):
    """A box of a whole tensor.

    Attributes:
        offsets: where it begins in the whole.
        local: its elements.
        is_ours: whether this rank saves it, of those that hold the same box.
    """

    offsets: tuple[int, ...]
    local: torch.Tensor
    is_ours: bool


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a `DTensor` or the like: a tensor that tells which part of it this rank holds."""
    return hasattr(tensor, "__create_chunk_list__")


def part_of(tensor: torch.Tensor, key: str) -> Part | None:
    """The part of a sharded tensor that this rank holds; None if it has too few rows for all ranks.

    Raises:
        Invalid: its local tensor is not the one box that it tells of, or it waits for a reduction.
    """
    sharded = cast("Any", tensor)
    if any(placement.is_partial() for placement in getattr(sharded, "placements", ())):
        raise Invalid(
            f"{key}: a {type(tensor).__name__} that waits for a reduction cannot be saved",
            hint="redistribute it to Shard or Replicate first",
        )
    local = sharded.to_local().detach()
    boxes = [(tuple(box.offsets), tuple(box.sizes)) for box in sharded.__create_chunk_list__()]
    boxes = [box for box in boxes if 0 not in box[1]]
    if not boxes and not local.numel():
        return None
    if len(boxes) != 1 or boxes[0][1] != tuple(local.shape):
        raise Invalid(f"{key}: a {type(tensor).__name__} with {len(boxes)} parts on one rank cannot be saved")
    replica, replicas = _replica(sharded)
    ours = replica == xxhash.xxh3_64_intdigest(key.encode()) % replicas  # one of them, as all of them agree
    return Part(boxes[0][0], local, ours)


def box_like(state: Any) -> BoxOf:
    """What a rank needs that has this live state: of a sharded tensor its box, nothing of what it does not hold."""
    boxes, others = boxes_of(state), _not_held(state)

    def box(key: str) -> Box | None:
        segments = key.split("/")
        if others and any("/".join(segments[:count]) in others for count in range(1, len(segments) + 1)):
            return NOTHING
        return boxes.get(key)

    return box


def boxes_of(state: Any, path: str = "") -> Mapping[str, Box]:
    """The boxes of the sharded tensors in a live state, by key: what this rank needs of them.

    A rank without a row of a tensor has an empty box.
    """
    if isinstance(state, Pooled):
        return boxes_of(state.value, path)
    if isinstance(state, torch.Tensor):
        return {path.removeprefix("/"): _box_of(state)} if is_sharded(state) and state.numel() else {}
    if isinstance(state, Mapping):
        children = [(f"{path}/{escape(key)}", value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        children = [(f"{path}/~i{place}", value) for place, value in enumerate(state)]
    else:
        return {}
    return {key: box for child, value in children for key, box in boxes_of(value, child).items()}


def _not_held(state: Any, path: str = "") -> set[str]:
    """Keys of the entries that other ranks have of what is pooled."""
    if isinstance(state, Pooled) and isinstance(state.value, dict):
        return {f"{path}/{escape(name)}".removeprefix("/") for name in state.order if name not in state.value}
    if isinstance(state, Mapping):
        return {key for name, value in state.items() for key in _not_held(value, f"{path}/{escape(name)}")}
    return set()


def escape(key: str | int) -> str:
    """A path segment: `/` and `~` escaped as in JSON pointers; the int 1 differs from the string "1"."""
    return f"~i{key}" if isinstance(key, int) else key.replace("~", "~0").replace("/", "~1")


def _box_of(tensor: torch.Tensor) -> Box:
    part = part_of(tensor, "")
    return (
        Box(part.offsets, tuple(part.local.shape))
        if part is not None
        else Box((0,) * tensor.dim(), (0,) * tensor.dim())
    )


def _replica(sharded: Any) -> tuple[int, int]:
    """Which of those that hold the same part this rank is, and how many they are, as far as its mesh tells.

    They differ in the dimensions over which it is replicated, and in those of the root mesh that its own mesh
    leaves out: a tensor that only FSDP shards, in a mesh that tensor parallelism has a dimension of, too. Stages of
    a pipeline (`pp`) hold different tensors.
    """
    mesh = sharded.device_mesh
    same = [
        (mesh.get_coordinate()[dim], mesh.size(dim))
        for dim, placement in enumerate(sharded.placements)
        if placement.is_replicate()
    ]
    root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
    if root is not mesh and root.mesh_dim_names and mesh.mesh_dim_names:
        for dim, name in enumerate(root.mesh_dim_names):
            if name not in mesh.mesh_dim_names and name != PIPELINE:
                same.append((root.get_coordinate()[dim], root.size(dim)))
    number = 0
    for coordinate, size in same:
        number = number * size + coordinate
    return number, math.prod(size for _, size in same)
