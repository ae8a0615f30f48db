"""A checkpoint as one file that others can read. The file appears whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors import SafetensorError

from training.checkpoint.adapters.plain_load import load_plain
from training.checkpoint.adapters.safetensors_form import alone, write_safetensors
from training.checkpoint.manifest import manifest_key
from training.checkpoint.restore import RestoredState, restore_checkpoint, restore_newest
from training.checkpoint.store import Store
from training.checkpoint.token import Skipped, run_of
from training.errors import Invalid, Unavailable

FileFormat = Literal["safetensors", "torch"]


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        checkpoint: `000003/00000041`.
        position: what comes next: epoch, step, sample.
        converted: values that a torch file holds as tensors although they were numpy arrays or scalars.
        skipped: newer checkpoints that are not intact, where none was asked for by name.
    """

    path: str
    file_format: FileFormat
    run: str
    checkpoint: str
    state_digest: str
    position: dict[str, int]
    tensors: int
    size_bytes: int
    converted: tuple[str, ...]
    skipped: tuple[Skipped, ...]


def export_checkpoint(
    store: Store,
    target: Path,
    *,
    checkpoint: tuple[int, int] | None = None,
    file_format: FileFormat = "safetensors",
    force: bool = False,
) -> Exported:
    """Restore a checkpoint, verified, and write it to a file. Claims nothing: a training goes on undisturbed.

    Args:
        store: the run's store.
        target: file to write.
        checkpoint: token and sequence; default: the newest intact one.
        file_format: `safetensors`, with structure and scalars in its metadata, or `torch`: plain dicts and tensors
            that `torch.load(..., weights_only=True)` reads.
        force: replace a file that is there.

    Raises:
        Invalid: the file is there, its folder is not, or the state has no form in this format.
        Corrupt: the checkpoint is damaged.
        Unavailable: the file could not be written; nothing is under its name, or still what was.
    """
    if file_format not in get_args(FileFormat):
        raise Invalid(f"no format {file_format!r}", hint=f"one of {', '.join(get_args(FileFormat))}")
    _check_target(target, force)
    restored = _restore(store, checkpoint)
    converted: list[str] = []
    with _new_file(target, force, restored) as path:
        if file_format == "safetensors":
            tensors = write_safetensors(restored, path, _facts(restored))
        else:
            tensors = _write_torch(restored, path, converted)
        size_bytes = path.stat().st_size
    manifest = restored.manifest
    return Exported(
        path=str(target),
        file_format=file_format,
        run=manifest.run,
        checkpoint=str(restored.checkpoint.ref),
        state_digest=manifest.state_digest,
        position=manifest.position.model_dump(),
        tensors=tensors,
        size_bytes=size_bytes,
        converted=tuple(converted),
        skipped=restored.skipped,
    )


def _restore(store: Store, checkpoint: tuple[int, int] | None) -> RestoredState:
    run = run_of(store)
    if run is None:
        raise Invalid(f"{store.url} holds no run", hint="retoma runs lists them")
    if checkpoint is not None:
        if not store.exists(key := manifest_key(*checkpoint)):
            raise Invalid(f"run {run} has no {key}", hint="retoma show lists its checkpoints", run=run, key=key)
        return restore_checkpoint(store, *checkpoint, run)
    restored = restore_newest(store, run)
    if restored is None:
        raise Invalid(f"run {run} has no checkpoint yet", hint=f"retoma show {run}", run=run)
    return restored


def _facts(restored: RestoredState) -> dict[str, Any]:
    manifest = restored.manifest
    return {
        "run": manifest.run,
        "checkpoint": restored.checkpoint.ref.model_dump(),
        "position": manifest.position.model_dump(),
        "state_digest": manifest.state_digest,
        "job": manifest.job,
        "data": manifest.data,
    }


def _write_torch(state: RestoredState, path: Path, converted: list[str]) -> int:
    plain = _plain(dict(state), "", converted, {})
    with path.open("xb") as file:
        torch.save(plain, file)
    load_plain(str(path), str(path), mmap=True)  # what nobody could load safely must not get the name
    return _count(plain)


def _plain(value: Any, path: str, converted: list[str], copies: dict[int, torch.Tensor]) -> Any:
    """What `torch.load` reads without knowing a class. Tied tensors stay tied."""
    if isinstance(value, dict):
        items = {key: _plain(item, f"{path}/{key}", converted, copies) for key, item in value.items()}
        return Counter(items) if isinstance(value, Counter) else items
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, f"{path}/{index}", converted, copies) for index, item in enumerate(value))
    if isinstance(value, torch.Tensor):
        return copies.setdefault(id(value), alone(value))
    if isinstance(value, np.ndarray | np.generic):
        converted.append(path.removeprefix("/"))
        return torch.from_numpy(np.array(value))
    if value == b"" and isinstance(value, bytes):
        raise Invalid(
            f"{path.removeprefix('/')}: torch.load with weights_only knows no empty bytes",
            hint="--format safetensors",
        )
    return value


def _count(value: Any) -> int:
    if isinstance(value, dict):
        return sum(_count(item) for item in value.values())
    return (
        sum(_count(item) for item in value) if isinstance(value, list | tuple) else isinstance(value, torch.Tensor)
    )


def _check_target(target: Path, force: bool) -> None:
    if target.is_dir():
        raise Invalid(f"{target} is a folder", hint="name a file")
    if not target.parent.is_dir():
        raise Invalid(f"{target.parent} is no folder", hint=f"mkdir -p {target.parent}")
    if target.exists() and not force:
        raise Invalid(f"{target} is there already", hint="choose another name, or replace it with --force")


@contextlib.contextmanager
def _new_file(target: Path, force: bool, restored: RestoredState) -> Iterator[Path]:
    """A path to write to, beside the target; when that went well, it is made durable and takes the name."""
    try:
        with tempfile.TemporaryDirectory(prefix=".retoma-export-", dir=target.parent) as folder:
            path = Path(folder, target.name)
            yield path
            _sync(path, os.O_RDONLY)
            (os.replace if force else os.link)(path, target)
            _sync(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    except FileExistsError as error:
        raise Invalid(f"{target} appeared in the meantime", hint="choose another name, or --force") from error
    except (OSError, SafetensorError, RuntimeError) as error:
        raise _explain(error, target, restored) from error


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: Exception, target: Path, restored: RestoredState) -> Invalid | Unavailable:
    number = error.errno if isinstance(error, OSError) else None
    if number in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP}:
        return Invalid(f"cannot write {target}: {error}", hint="the folder must be writable, with hard links")
    needed, free = restored.manifest.costs.state_bytes, shutil.disk_usage(target.parent).free
    return Unavailable(
        f"writing {target} failed: {error}; about {needed} bytes needed, {free} bytes free",
        hint="free space, or write somewhere else; nothing was left behind",
    )
