"""A state is a tree of dicts, lists and leaves. Taken apart into structure, tensors and scalars, and rebuilt.

No pickle: every node is one of a closed set of types, and anything else is refused by name when it is saved.
Nodes: `{"d": [[key, node], ...]}` dict, `{"l": [...]}` list, `{"u": [...]}` tuple, `{"t": i}` tensor i,
`{"n": i}` numpy array held as tensor i, `{"g": i}` numpy scalar held as tensor i, `{"v": i}` scalar i.
Scalars: JSON null, bool, int, finite float, str; `{"float": hex}` for inf and NaN, `{"bytes": base64}`.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from training.checkpoint.dtypes import check_tensor
from training.errors import Invalid

_DICTS = (dict, OrderedDict, defaultdict)


@dataclass
class Flat:
    """A state in pieces.

    Attributes:
        tree: JSON structure with references into the two lists.
        keys: a unique path for each tensor, stable from save to save.
        tensors: the distinct tensors; tied ones appear once.
        values: the scalars as typed JSON.
    """

    tree: Any = None
    keys: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    _seen: dict[tuple[Any, ...], int] = field(default_factory=dict)


def flatten(state: Any) -> Flat:
    """Take a state apart without copying a tensor.

    Raises:
        Invalid: names the first leaf that is no tensor, array or plain scalar, or a tensor that has no bytes of
            its own (sparse, quantized, meta, nested).
    """
    flat = Flat()
    flat.tree = _node(state, "", flat)
    return flat


def unflatten(tree: Any, tensors: list[torch.Tensor], values: list[Any]) -> Any:
    """Rebuild what `flatten` took apart. Tied tensors come back as one object."""
    ((kind, content),) = tree.items()
    if kind == "d":
        return {key: unflatten(node, tensors, values) for key, node in content}
    if kind == "l":
        return [unflatten(node, tensors, values) for node in content]
    if kind == "u":
        return tuple(unflatten(node, tensors, values) for node in content)
    if kind == "t":
        return tensors[content]
    if kind == "n":
        return tensors[content].numpy()
    if kind == "g":
        return tensors[content].numpy()[()]
    if kind == "v":
        return _load_value(values[content])
    raise Invalid(f"unknown node {kind!r} in the tree of a state", hint="upgrade retoma")


def _node(value: Any, path: str, flat: Flat) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {"t": _tensor(value.detach(), path, flat)}
    if isinstance(value, np.ndarray | np.generic):
        kind = "n" if isinstance(value, np.ndarray) else "g"
        return {kind: _tensor(_from_numpy(np.asarray(value), path), path, flat)}
    if type(value) in _DICTS:
        pairs = [[_dict_key(k, path), _node(v, f"{path}/{_escape(k)}", flat)] for k, v in value.items()]
        return {"d": pairs}
    if type(value) is list:
        return {"l": [_node(v, f"{path}/~i{i}", flat) for i, v in enumerate(value)]}
    if type(value) in (tuple, torch.Size):
        return {"u": [_node(v, f"{path}/~i{i}", flat) for i, v in enumerate(value)]}
    flat.values.append(_dump_value(value, path))
    return {"v": len(flat.values) - 1}


def _tensor(tensor: torch.Tensor, path: str, flat: Flat) -> int:
    check_tensor(tensor, path.removeprefix("/"))
    identity: tuple[Any, ...] = (path,)
    if tensor.numel():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.device)
        bits = (tensor.is_conj(), tensor.is_neg())
        identity = (*place, *bits, tensor.dtype, tuple(tensor.shape), tensor.stride())
    if identity in flat._seen:
        return flat._seen[identity]
    flat._seen[identity] = len(flat.tensors)
    flat.keys.append(path.removeprefix("/"))
    flat.tensors.append(tensor)
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


def _escape(key: str | int) -> str:
    """A path segment: `/` and `~` escaped as in JSON pointers; the int 1 differs from the string "1"."""
    return f"~i{key}" if isinstance(key, int) else key.replace("~", "~0").replace("/", "~1")


def _dump_value(value: Any, path: str) -> Any:
    kind = type(value)
    if kind is float and not math.isfinite(value):
        return {"float": struct.pack(">d", value).hex()}
    if value is None or kind in (bool, int, float, str):
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
