"""A state is a tree of dicts, lists and leaves. Taken apart into structure, tensors and scalars, and rebuilt.

No pickle: every node is one of a closed set of types, and anything else is refused by name when it is saved.
Nodes: `{"d": [[key, node], ...]}` dict, `{"l": [...]}` list, `{"u": [...]}` tuple, `{"t": i}` tensor i,
`{"c": [[key, node], ...]}` Counter, `{"n": i}` numpy array held as tensor i, `{"g": i}` numpy scalar held as
tensor i, `{"k": constant}` null, bool or str, `{"v": i}` scalar i. Constants are a part of the structure, since
they hardly ever change: a manifest does not repeat the names of a thousand parameters.
Scalars: JSON int, finite float; `{"float": hex}` for inf and NaN, `{"bytes": base64}`.
"""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from training.checkpoint.state.dtypes import check_tensor
from training.errors import Invalid

_DICTS = (dict, OrderedDict, defaultdict)
_ARRAYS = (np.ndarray, np.memmap)  # other subclasses mean more than their bytes: a masked array has a mask
_MAX_DEPTH = 64  # a state that contains itself is found here
_MAX_INT_BITS = 4096


@dataclass
class Flat:
    """A state in pieces.

    Attributes:
        tree: JSON structure with references into the two lists.
        keys: a unique path for each tensor, stable from save to save.
        tensors: the distinct tensors; tied ones appear once.
        addresses: of their first elements; 0 for one that is empty.
        values: the scalars as typed JSON.
    """

    tree: Any = None
    keys: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
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
    if kind == "c":  # MultiStepLR keeps its milestones in one
        return Counter({key: unflatten(node, tensors, values) for key, node in content})
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
    if kind == "k":
        return content
    if kind == "v":
        return _load_value(values[content])
    raise Invalid(f"unknown node {kind!r} in the tree of a state", hint="upgrade retoma")


def _node(value: Any, path: str, flat: Flat, depth: int = 0) -> dict[str, Any]:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return {"t": _tensor(value, path, flat)}
    if kind in _ARRAYS or isinstance(value, np.generic):
        tensor = _from_numpy(np.asarray(value), path)
        return {"n" if kind in _ARRAYS else "g": _tensor(tensor, path, flat)}
    if value is None or kind in (bool, str):
        return {"k": value}
    if depth > _MAX_DEPTH:
        raise Invalid(f"{path.removeprefix('/')[:100]}...: nested deeper than {_MAX_DEPTH} levels")
    if kind in _DICTS or kind is Counter:
        pairs = [[_dict_key(k, path), _node(v, f"{path}/{_escape(k)}", flat, depth + 1)] for k, v in value.items()]
        return {"c" if kind is Counter else "d": pairs}
    if kind in (list, tuple, torch.Size):
        nodes = [_node(v, f"{path}/~i{i}", flat, depth + 1) for i, v in enumerate(value)]
        return {"l" if kind is list else "u": nodes}
    flat.values.append(_dump_value(value, path))
    return {"v": len(flat.values) - 1}


def _tensor(tensor: torch.Tensor, path: str, flat: Flat) -> int:
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
    flat.addresses.append(address)
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
