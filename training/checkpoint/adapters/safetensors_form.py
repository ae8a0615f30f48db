"""A state as a safetensors file: tensors by dotted name, everything else as JSON in the file's metadata.

Any reader of safetensors finds the tensors. A tensor that the state holds under two names is written once; the
other name is in the metadata, pointing at the first, as `safetensors.torch.save_model` does it. Under `retoma`
the metadata has the structure, the scalars and a digest of each tensor: enough to give back the very state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from training.checkpoint.state.tree import flatten, unflatten
from training.errors import Corrupt, Invalid, RetomaError

FORM = 1
_KEY = "retoma"
_TAKEN = {"__metadata__", "format", _KEY}
_DTYPES = {
    getattr(torch, name)
    for name in """
    bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64
    float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
    """.split()
}


def write_safetensors(state: Mapping[str, Any], path: Path, facts: Mapping[str, Any]) -> int:
    """Write a state to a new file; `facts` is JSON that goes with it.

    Returns:
        How many tensors there are.

    Raises:
        Invalid: a tensor has a dtype that safetensors does not know; named.
        SafetensorError, OSError: the file could not be written.
    """
    flat = flatten(dict(state))
    names: dict[int, list[str]] = {}
    _collect(flat.tree, (), names)
    taken = set(_TAKEN)
    tensors, metadata, chosen = {}, {"format": "pt"}, []
    for index, tensor in enumerate(flat.tensors):
        first, *others = [_free(name, taken) for name in names[index]]
        if tensor.dtype not in _DTYPES:
            raise Invalid(
                f"{first}: safetensors has no {str(tensor.dtype).removeprefix('torch.')}", hint="--format torch"
            )
        tensors[first] = alone(tensor)
        metadata.update(dict.fromkeys(others, first))
        chosen.append(first)
    metadata[_KEY] = json.dumps(
        {
            "form": FORM,
            "tree": flat.tree,
            "tensors": chosen,
            "digests": [_digest(tensors[name]) for name in chosen],
            "values": flat.values,
            **facts,
        }
    )
    save_file(tensors, path, metadata)
    return len(tensors)


def read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state, and the facts that were written with it: empty for a file that is not ours.

    A file of others gives a dict of its tensors, under their names.

    Raises:
        Corrupt: it is cut or damaged, or a tensor of a file of ours is not what was written.
        Invalid: a later form.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata: dict[str, str] = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error
    if _KEY not in metadata:
        return tensors, {}
    try:
        facts: dict[str, Any] = json.loads(metadata[_KEY])
        form, names, digests = facts.pop("form"), facts.pop("tensors"), facts.pop("digests")
        if form != FORM:
            raise Invalid(f"{path} has form {form!r}; this version reads form {FORM}", hint="upgrade retoma")
        for name, expected in zip(names, digests, strict=True):
            if (actual := _digest(tensors[name])) != expected:
                raise Corrupt(f"{path}: tensor {name}: expected digest {expected}, actual {actual}")
        state = unflatten(facts.pop("tree"), [tensors[name] for name in names], facts.pop("values"))
    except RetomaError:
        raise
    except Exception as error:  # anything can come out of JSON that somebody else has touched
        raise Corrupt(f"{path}: its description of the state is damaged: {error!r}") from error
    if not isinstance(state, dict):
        raise Corrupt(f"{path} describes a {type(state).__name__}, not a state")
    return state, facts


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, contiguous and with memory that holds nothing else: files would get all of it."""
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _collect(node: dict[str, Any], path: tuple[str, ...], names: dict[int, list[str]]) -> None:
    """Every name of every tensor, in the order of the state."""
    ((kind, content),) = node.items()
    if kind in ("d", "c"):
        for key, inner in content:
            _collect(inner, (*path, str(key)), names)
    elif kind in ("l", "u"):
        for index, inner in enumerate(content):
            _collect(inner, (*path, str(index)), names)
    elif kind in ("t", "n", "g"):
        names.setdefault(content, []).append(".".join(path))


def _free(name: str, taken: set[str]) -> str:
    """The name, or one like it where two values would share it: {"a.b": ...} beside {"a": {"b": ...}}."""
    while name in taken:
        name = f"~{name}"
    taken.add(name)
    return name


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return xxhash.xxh3_128_hexdigest(data)
