"""A checkpoint as torch.distributed.checkpoint sees it, known from its manifests before any tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from training.checkpoint.chain import Chain
from training.checkpoint.state.boxes import whole_key
from training.checkpoint.state.dtypes import dtype_of
from training.checkpoint.state.tree import unflatten
from training.errors import Invalid


@dataclass(frozen=True)
class _Closed:
    """A value that DCP shall not look into: whatever it is, it has one name."""

    value: Any


@dataclass(frozen=True)
class Outline:
    """Names, shapes and dtypes.

    Attributes:
        name: of the checkpoint, for messages.
        tree: its structure.
        tensors: by DCP's name, without bytes. A sharded one is whole, so that a plan made of them fits any
            checkpoint of the same tensors, however it was sharded.
        keys: of the engine, of each of them.
        paths: DCP's mappings; None where the state was saved without flattening it.
        others: DCP's names of what is no tensor.
    """

    name: str
    tree: Any
    tensors: Mapping[str, torch.Tensor]
    keys: Mapping[str, str]
    paths: Mapping[str, Any] | None
    others: tuple[str, ...]

    @classmethod
    def of(cls, chain: Chain) -> Outline:
        """Of the head of a chain.

        Raises:
            Invalid: two of its values have one name in DCP.
        """
        manifest, layout = chain.head.manifest, chain.layout
        blanks = [torch.empty(e.shape, dtype=dtype_of(e.dtype), device="meta") for e in layout.tensors]
        keys = {id(blank): entry.key for blank, entry in zip(blanks, layout.tensors, strict=True)}

        def join(shape: list[int], places: list[int]) -> torch.Tensor:
            whole = torch.empty(shape, dtype=blanks[places[0]].dtype, device="meta")
            blanks.append(whole)  # kept, so that no other tensor gets its id
            keys[id(whole)] = whole_key(layout.tensors[places[0]].key)
            return whole

        state = unflatten(_without_bytes(layout.tree), blanks, manifest.values, join)
        flattened = manifest.meta.get("dcp", {}).get("flattened", True)
        values, paths = _flatten(state) if flattened else (state, None)
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        return cls(
            name=manifest.key,
            tree=layout.tree,
            tensors=tensors,
            keys={name: keys[id(value)] for name, value in tensors.items()},
            paths=paths,
            others=tuple(name for name in values if name not in tensors),
        )

    def metadata(self) -> Metadata:
        """What DCP makes its plans of."""
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for name, tensor in self.tensors.items():
            whole = ChunkStorageMetadata(offsets=torch.Size([0] * tensor.dim()), sizes=tensor.size())
            found[name] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), [whole])
        found |= {name: BytesStorageMetadata() for name in self.others}
        return Metadata(found, planner_data=self.paths)

    def values(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state that was read, by DCP's names: of this checkpoint, or of an older one."""
        if self.paths is None:
            return state
        return {name: _opened(value) for name, value in _flatten(_closed(self.tree, state))[0].items()}


def _without_bytes(node: Any) -> Any:
    """The tree without what is no tensor for DCP and yet has bytes, or is each rank's own."""
    ((kind, content),) = node.items()
    if kind in ("n", "g", "r"):
        return {"k": None}
    if kind in ("d", "c"):
        return {kind: [[key, _without_bytes(child)] for key, child in content]}
    return {kind: [_without_bytes(child) for child in content]} if kind in ("l", "u") else node


def _closed(node: Any, value: Any) -> Any:
    """A state in which what each rank has its own of is closed, as it was when it was saved."""
    ((kind, content),) = node.items()
    if kind == "r":
        return _Closed(value)
    if kind in ("d", "c") and isinstance(value, dict):
        nodes = dict(content)
        return {key: _closed(nodes[key], item) if key in nodes else item for key, item in value.items()}
    if kind == "l" and isinstance(value, list) and len(value) == len(content):
        return [_closed(child, item) for child, item in zip(content, value, strict=True)]
    return value


def _opened(value: Any) -> Any:
    if isinstance(value, _Closed):
        return value.value
    return [_opened(item) for item in value] if isinstance(value, list) else value


def _flatten(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        values, paths = flatten_state_dict(state)
    except ValueError as error:  # {"a.b": ...} beside {"a": {"b": ...}}, 1 beside "1"
        raise Invalid(f"DCP has one name for two values of this state: {error}") from error
    return values, paths
