"""A folder that torch.distributed.checkpoint's own writer made, read without running anything in it."""

from __future__ import annotations

import io
import math
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

from training.checkpoint.adapters.plain_load import load_plain, load_restricted
from training.errors import Corrupt, Invalid, RetomaError

METADATA_NAME = ".metadata"
_MAX_LIST_ITEMS = 1_000_000


class _Record:
    """Stands in for a class of DCP's metadata: holds its fields, and can do nothing."""

    def __init__(self, *_: Any) -> None:
        self.fields: dict[str, Any] = {}

    def __new__(cls, *_: Any) -> _Record:
        record = super().__new__(cls)
        record.fields = {}
        return record

    def __setstate__(self, state: Any) -> None:
        self.fields = dict(state) if isinstance(state, dict) else {"state": state}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Record) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> tuple[Any, Any]:
        """Of the one kind that serves as a key, `MetadataIndex`."""
        return self.fields.get("fqn"), self.fields.get("offset")


class _Metadata(_Record): ...


class _TensorEntry(_Record): ...


class _BytesEntry(_Record): ...


def _text(*parts: Any) -> str:
    return "/".join(map(str, parts))


def _member(owner: Any, name: Any) -> _Record:
    """Stands in for `getattr`, by which the first releases of Python 3.11 pickle the member of an enumeration."""
    if owner is not _Record or not isinstance(name, str):
        raise Invalid(
            f"a {METADATA_NAME} can only be read by running builtins.getattr on {owner!r}; it was not run",
            hint="where you trust the file: load it there, and save it again",
        )
    return _Record()


_METADATA = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.3
_ADMITTED: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Metadata,
    (_METADATA, "TensorStorageMetadata"): _TensorEntry,
    (_METADATA, "BytesStorageMetadata"): _BytesEntry,
    (_METADATA, "ChunkStorageMetadata"): _Record,
    (_METADATA, "MetadataIndex"): _Record,
    (_METADATA, "StorageMeta"): _Record,
    (_METADATA, "TensorProperties"): _Record,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Record,
    (_OLD, "TensorProperties"): _Record,
    (_OLD, "MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"): _Record,
    ("torch.serialization", "_get_layout"): _text,
    ("builtins", "getattr"): _member,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("pathlib", name): _text for name in ("Path", "PosixPath", "WindowsPath", "PurePosixPath")},
    ("pathlib._local", "PosixPath"): _text,
    ("pathlib._local", "WindowsPath"): _text,
}


def read_dcp_folder(folder: Path) -> dict[str, Any]:
    """The state that `dcp.save(state, checkpoint_id=folder)` was given, whole, by however many ranks.

    Raises:
        Invalid: no such folder, one that needs code to be read, or one with transformed streams.
        Corrupt: something is missing, cut, or does not cover its tensor.
    """
    path = folder / METADATA_NAME
    if not path.is_file():
        raise Invalid(
            f"{folder} holds no {METADATA_NAME}: it is no finished checkpoint of torch.distributed.checkpoint",
            hint="give the folder that was the checkpoint_id; one saved without collectives has no .metadata",
        )
    with path.open("rb") as file:
        metadata = load_restricted(file, str(path), _ADMITTED)
    try:
        return _read(folder, metadata)
    except RetomaError:
        raise
    except Exception as error:  # its parts need not fit together
        raise Corrupt(f"{path} is not what torch.distributed.checkpoint writes: {error!r}") from error


def _read(folder: Path, metadata: Any) -> dict[str, Any]:
    if not isinstance(metadata, _Metadata):
        raise TypeError(f"a {type(metadata).__name__}")
    places: dict[_Record, _Record] = metadata.fields["storage_data"]
    values: dict[str, Any] = {}
    for key, entry in metadata.fields["state_dict_metadata"].items():
        if isinstance(entry, _TensorEntry):
            values[key] = _tensor(folder, key, entry, places)
        elif isinstance(entry, _BytesEntry):
            values[key] = _item(folder, key, places[_index(key, None)])
        else:
            raise TypeError(f"{key} is described by a {type(entry).__name__}")
    paths = metadata.fields.get("planner_data")
    if paths is None:
        return values
    for key in values:
        if not all(_is_step(step) for step in paths[key]):
            raise ValueError(f"{key} has the path {paths[key]!r}")
    return unflatten_state_dict(values, paths)


def _tensor(folder: Path, key: str, entry: _Record, places: dict[_Record, _Record]) -> torch.Tensor:
    dtype = entry.fields["properties"].fields["state"][0]
    shape = tuple(int(n) for n in entry.fields["size"])
    boxes = [_box(chunk) for chunk in entry.fields["chunks"]]
    _check_cover(key, shape, boxes)
    pieces = [_item(folder, key, places[_index(key, offsets)]) for offsets, _ in boxes]
    for piece, (offsets, sizes) in zip(pieces, boxes, strict=True):
        if not isinstance(piece, torch.Tensor) or (piece.dtype, tuple(piece.shape)) != (dtype, sizes):
            raise Corrupt(f"{key} at {offsets}: expected {dtype} {sizes}, actual {_named(piece)}")
    if len(boxes) == 1:
        return pieces[0]  # type: ignore[no-any-return]
    whole = torch.empty(shape, dtype=dtype)
    for piece, (offsets, sizes) in zip(pieces, boxes, strict=True):
        region = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
        whole[region].copy_(piece)
    return whole


def _box(chunk: _Record) -> tuple[tuple[int, ...], tuple[int, ...]]:
    offsets, sizes = chunk.fields["offsets"], chunk.fields["sizes"]
    return tuple(int(n) for n in offsets), tuple(int(n) for n in sizes)


def _check_cover(key: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    """Every element is in exactly one box: all boxes lie inside, none overlap, and together they are as large."""
    for offsets, sizes in boxes:
        inside = len(offsets) == len(sizes) == len(shape) and all(
            at >= 0 and size >= 0 and at + size <= limit
            for at, size, limit in zip(offsets, sizes, shape, strict=True)
        )
        if not inside:
            raise Corrupt(f"{key}: a part at {offsets} of {sizes} does not lie in a tensor of {shape}")
    for (at, size), (other_at, other_size) in combinations(boxes, 2):
        dims = range(len(shape))
        if all(at[d] < other_at[d] + other_size[d] and other_at[d] < at[d] + size[d] for d in dims):
            raise Corrupt(f"{key}: the parts at {at} and {other_at} overlap")
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape) or not boxes:
        raise Corrupt(f"{key}: {len(boxes)} parts do not make up a tensor of {shape}")


def _item(folder: Path, key: str, place: _Record) -> Any:
    """One object, out of the file that holds it."""
    name, offset, length = (place.fields[field] for field in ("relative_path", "offset", "length"))
    if place.fields.get("transform_descriptors"):
        raise Invalid(
            f"{key} was transformed by {place.fields['transform_descriptors']} when it was saved",
            hint="save it without extensions",
        )
    if not isinstance(name, str) or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise Invalid(f"{key} points out of its folder, to {name!r}; it was not read")
    path = folder / name
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(length)
    except FileNotFoundError as error:
        raise Corrupt(f"{path} is missing; {key} lies in it") from error
    if len(data) != length:
        raise Corrupt(f"{path}: expected {length} bytes at {offset} for {key}, actual {len(data)}")
    return load_plain(io.BytesIO(data), f"{key} in {path}")


def _index(key: str, offset: tuple[int, ...] | None) -> _Record:
    record = _Record()
    record.fields = {"fqn": key, "offset": offset}
    return record


def _is_step(step: Any) -> bool:
    return isinstance(step, str) or (type(step) is int and 0 <= step < _MAX_LIST_ITEMS)


def _named(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
