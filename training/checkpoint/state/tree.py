"""A state is a tree of dicts, lists and leaves. Taken apart into structure, tensors and scalars, and rebuilt.

No pickle: every node is one of a closed set of types, and anything else is refused by name when it is saved.
Nodes: `{"d": [[key, node], ...]}` dict, `{"l": [...]}` list, `{"u": [...]}` tuple, `{"t": i}` tensor i,
`{"c": [[key, node], ...]}` Counter, `{"n": i}` numpy array held as tensor i, `{"g": i}` numpy scalar held as
tensor i, `{"k": constant}` null, bool or str, `{"v": i}` scalar i, `{"s": [shape, [i, ...]]}` a tensor in parts,
`{"r": [node, ...]}` a value of which each rank has its own. Constants are a part of the structure, since they
hardly ever change: a manifest does not repeat the names of a thousand parameters. Only between ranks, never in a
store: `{"p": [[place, ...], node]}` a dict or list of which a rank has the entries at these places of the whole.
Scalars: JSON int, finite float; `{"float": hex}` for inf and NaN, `{"bytes": base64}`.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from training.checkpoint.state.boxes import RANK_MARK, part_key
from training.checkpoint.state.dtypes import check_tensor
from training.checkpoint.state.parts import escape, is_sharded, part_of
from training.checkpoint.state.pooled import Pooled
from training.errors import Invalid

_DICTS = (dict, OrderedDict, defaultdict)
_ARRAYS = (np.ndarray, np.memmap)  # other subclasses mean more than their bytes: a masked array has a mask
_MAX_DEPTH = 64  # a state that contains itself is found here
_MAX_INT_BITS = 4096


@dataclass(frozen=True)
class PerRank:
    """In a state that a group saves: a value of which each rank has its own, such as its random generators.

    It comes back as the plain value of the rank that restores, or None where that rank is new; without a group, as
    the list of all.
    """

    value: Any


_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"l": list, "u": tuple, "r": list}


@dataclass
class Flat:
    """A state in pieces, as one rank holds it.

    Attributes:
        rank: of its group; None where there is none.
        tree: JSON structure with references into the two lists.
        keys: a unique path for each tensor, stable from save to save.
        tensors: the distinct tensors; tied ones appear once. Of a sharded tensor the parts that this rank holds.
        offsets: where each one begins in the whole tensor.
        addresses: of their first elements; 0 for one that is empty.
        values: the scalars as typed JSON.
        own: places in `tensors` of what only this rank has: parts, and what is per rank.
        own_values: the same in `values`, and those that not all ranks have.
        is_pooled: whether there is something that not all ranks have.
    """

    rank: int | None = None
    tree: Any = None
    keys: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    offsets: list[tuple[int, ...]] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    own: set[int] = field(default_factory=set)
    own_values: list[int] = field(default_factory=list)
    is_pooled: bool = False
    _within_own: bool = False
    _within_pool: bool = False
    _seen: dict[tuple[Any, ...], int] = field(default_factory=dict)


def flatten(state: Any, rank: int | None = None) -> Flat:
    """Take a state apart without copying a tensor.

    Args:
        state: nested dicts, lists and tuples.
        rank: of the process in its group; None if it has none.

    Raises:
        Invalid: names the first leaf that is no tensor, array or plain scalar, or a tensor that has no bytes of
            its own (sparse, quantized, meta, nested).
    """
    flat = Flat(rank)
    flat.tree = _node(state, "", flat)
    return flat


def _no_parts(shape: Any, places: list[int]) -> Any:  # noqa: ARG001 - as `unflatten` calls it
    raise Invalid("a tensor in parts, where every tensor should be whole")


def unflatten(
    tree: Any,
    tensors: Sequence[torch.Tensor],
    values: list[Any],
    join: Callable[[Any, list[int]], Any] = _no_parts,
) -> Any:
    """Rebuild what `flatten` took apart. Tied tensors come back as one object.

    Args:
        tree: the structure.
        tensors, values: what its leaves refer to.
        join: makes one tensor of a shape and the places of its parts.
    """
    ((kind, content),) = tree.items()

    def inner(node: Any) -> Any:
        return unflatten(node, tensors, values, join)

    if kind == "d":
        return {key: inner(node) for key, node in content}
    if kind == "c":  # MultiStepLR keeps its milestones in one
        return Counter({key: inner(node) for key, node in content})
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](inner(node) for node in content)
    return _leaf(kind, content, tensors, values, join)


def _leaf(
    kind: str,
    content: Any,
    tensors: Sequence[torch.Tensor],
    values: list[Any],
    join: Callable[[Any, list[int]], Any],
) -> Any:
    if kind == "t":
        return tensors[content]
    if kind == "s":
        return join(*content)
    if kind == "n":
        return tensors[content].numpy()
    if kind == "g":
        return tensors[content].numpy()[()]
    if kind == "k":
        return content
    if kind == "v":
        return _load_value(values[content])
    raise Invalid(f"unknown node {kind!r} in the tree of a state", hint="upgrade retoma")


def _node(value: Any, path: str, flat: Flat, depth: int = 0) -> dict[str, Any]:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if is_sharded(value) and value.numel():
            return {"s": [list(value.shape), _part(value, path, flat)]}
        return {"t": _tensor(value, path, flat)}
    if kind is PerRank:
        return {"r": [_own_node(value, path, flat, depth)]}
    if kind is Pooled:
        return _pooled_node(value, path, flat, depth)
    if kind in _ARRAYS or isinstance(value, np.generic):
        tensor = _from_numpy(np.asarray(value), path)
        return {"n" if kind in _ARRAYS else "g": _tensor(tensor, path, flat)}
    if value is None or kind in (bool, str):
        return {"k": value}
    if depth > _MAX_DEPTH:
        raise Invalid(f"{path.removeprefix('/')[:100]}...: nested deeper than {_MAX_DEPTH} levels")
    if kind in _DICTS or kind is Counter:
        pairs = [[_dict_key(k, path), _node(v, f"{path}/{escape(k)}", flat, depth + 1)] for k, v in value.items()]
        return {"c" if kind is Counter else "d": pairs}
    if kind in (list, tuple, torch.Size):
        nodes = [_node(v, f"{path}/~i{i}", flat, depth + 1) for i, v in enumerate(value)]
        return {"l" if kind is list else "u": nodes}
    if flat._within_own or flat._within_pool:
        flat.own_values.append(len(flat.values))
    flat.values.append(_dump_value(value, path))
    return {"v": len(flat.values) - 1}


def _own_node(value: PerRank, path: str, flat: Flat, depth: int) -> dict[str, Any]:
    _check_outermost(path, flat)
    flat._within_own = True
    try:
        return _node(value.value, f"{path}{RANK_MARK}{flat.rank or 0}", flat, depth + 1)
    finally:
        flat._within_own = False


def _pooled_node(value: Pooled, path: str, flat: Flat, depth: int) -> dict[str, Any]:
    _check_outermost(path, flat)
    places = {name: place for place, name in enumerate(value.order)}
    if unknown := [name for name in value.value if name not in places]:
        raise Invalid(f"{path.removeprefix('/')}: {unknown[0]!r} is not among the {len(places)} names of the whole")
    names = sorted(value.value, key=places.__getitem__)
    held = {name: value.value[name] for name in names} if isinstance(value.value, dict) else names
    if flat.rank is None:
        return _node(held, path, flat, depth)
    flat.is_pooled = flat._within_pool = True
    try:
        return {"p": [[places[name] for name in names], _node(held, path, flat, depth)]}
    finally:
        flat._within_pool = False


def _check_outermost(path: str, flat: Flat) -> None:
    if flat._within_own or flat._within_pool:
        raise Invalid(f"{path.removeprefix('/')}: PerRank and Pooled cannot be within one another")


def _part(tensor: torch.Tensor, path: str, flat: Flat) -> list[int]:
    """The place of the part of a sharded tensor that this rank saves, if it saves one."""
    key = path.removeprefix("/")
    part = part_of(tensor, key)
    if flat.rank is None and (part is None or part.local.shape != tensor.shape):
        raise Invalid(
            f"{key}: a {type(tensor).__name__}, sharded over several ranks, cannot be saved by one alone",
            hint="save it with IncrementalCheckpointer(..., group=...) on all ranks",
        )
    if part is None or not part.is_ours:
        return []
    return [_tensor(part.local, path + part_key(part.offsets, part.local.shape), flat, part.offsets)]


def _tensor(tensor: torch.Tensor, path: str, flat: Flat, offsets: tuple[int, ...] | None = None) -> int:
    if is_lazy(tensor):
        raise Invalid(
            f"{path.removeprefix('/')}: an uninitialized parameter cannot be saved",
            hint="run one forward pass first, so that lazy modules know their shapes",
        )
    address = check_tensor(tensor, path.removeprefix("/"))
    if tensor.requires_grad or type(tensor) is not torch.Tensor:
        tensor = tensor.detach()
    identity: tuple[Any, ...] = (path,)
    if address:
        bits = (tensor.is_conj(), tensor.is_neg())
        identity = (address, tensor.device, *bits, tensor.dtype, tensor.shape, tensor.stride())
    if identity in flat._seen:
        return flat._seen[identity]
    flat._seen[identity] = len(flat.tensors)
    flat.keys.append(path.removeprefix("/"))
    flat.tensors.append(tensor)
    flat.offsets.append(offsets or (0,) * tensor.dim())
    flat.addresses.append(address)
    if flat._within_own or offsets is not None:
        flat.own.add(flat._seen[identity])
    return len(flat.tensors) - 1


def _from_numpy(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    try:
        native = array.astype(array.dtype.newbyteorder("="), copy=True)
        return torch.from_numpy(native.reshape(array.shape))
    except TypeError as error:
        raise Invalid(f"{path.removeprefix('/')}: a numpy array of {array.dtype} cannot be saved") from error


def _dict_key(key: Any, path: str) -> str | int:
    if type(key) not in (str, int):
        raise Invalid(
            f"{path.removeprefix('/') or 'the state'}: dict key {key!r} of type {type(key).__name__} "
            "cannot be saved; keys are str or int"
        )
    return key  # type: ignore[no-any-return]


def _dump_value(value: Any, path: str) -> Any:
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if kind is float or (kind is int and value.bit_length() <= _MAX_INT_BITS):
        return value
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    raise Invalid(
        f"{path.removeprefix('/') or 'the state'}: a {kind.__module__}.{kind.__qualname__} cannot be saved",
        hint="keep tensors, numpy arrays, None, bool, int, float, str, bytes, list, tuple and dict in the state",
    )


def _load_value(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if kind == "bytes":
        return base64.b64decode(content)
    raise Invalid(f"unknown scalar {kind!r} in a state", hint="upgrade retoma")
