"""A checkpoint of others becomes the first base of a run, or the next one of a run that is there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from training.checkpoint.adapters.dcp_folder import read_dcp_folder
from training.checkpoint.adapters.plain_load import load_plain
from training.checkpoint.adapters.safetensors_form import read_safetensors
from training.checkpoint.checkpointer import IncrementalCheckpointer
from training.checkpoint.history import head_ref, read_committed
from training.checkpoint.manifest import Manifest, Position
from training.checkpoint.store import Store
from training.errors import Corrupt, Invalid

SourceFormat = Literal["torch", "dcp", "safetensors"]
_ZIP, _PICKLE, _TAR_NAME = b"PK\x03\x04", b"\x80", b"././@"
_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header


class Foreign(NamedTuple):
    """A state read from somebody else's file, and what the file knew about it."""

    state: dict[str, Any]
    source_format: SourceFormat
    facts: dict[str, Any]


@dataclass(frozen=True)
class Imported:
    """The checkpoint that an import made. `position` is what comes next."""

    source: str
    source_format: SourceFormat
    run: str
    checkpoint: str
    position: dict[str, int]
    state_digest: str
    state_bytes: int
    written_bytes: int


def import_checkpoint(
    store: Store, source: Path, *, run: str | None = None, position: Position | None = None
) -> Imported:
    """Save what a file holds as a base checkpoint, committed and durable when this returns.

    It is an attempt like any other: it fences a training of this run that is under way.

    Args:
        store: the run's store, new or not.
        source: a file of `torch.save`, a folder of torch.distributed.checkpoint, or a safetensors file.
        run: name of the run; default: the one that the store holds.
        position: what comes next when the run is resumed; default: as a file of ours says, else the start.

    Raises:
        Invalid: the file cannot be read without running code in it, or holds what cannot be saved; by name.
        Corrupt: the file is damaged.
        Fenced, Unavailable: see `IncrementalCheckpointer`.
    """
    foreign = read_foreign(source)
    head = _head(store)
    if position is None and "position" in foreign.facts:
        position = _position(foreign.facts["position"], source)
    checkpointer = IncrementalCheckpointer(
        store,
        run=run,
        job=head.job if head else foreign.facts.get("job"),
        data=head.data if head else foreign.facts.get("data"),
        who={"imports": source.name},
    )
    with checkpointer:
        checkpointer.check(foreign.state)  # before anything is claimed
        checkpointer.restore()
        meta = {"imported": {"name": source.name, "format": foreign.source_format, **_origin(foreign.facts)}}
        checkpointer.save(foreign.state, position=position, base=True, meta=meta)
        committed = checkpointer.wait()
    assert committed is not None  # noqa: S101 - the save did not fail
    manifest = committed.manifest
    return Imported(
        source=str(source),
        source_format=foreign.source_format,
        run=manifest.run,
        checkpoint=str(committed.ref),
        position=manifest.position.model_dump(),
        state_digest=manifest.state_digest,
        state_bytes=manifest.costs.state_bytes,
        written_bytes=manifest.costs.written_bytes,
    )


def read_foreign(source: Path) -> Foreign:
    """Read a file or a folder of others, told apart by its content. Nothing in it is run.

    Raises:
        Invalid: there is none, its kind is unknown, or it needs code to be read.
        Corrupt: it is damaged.
    """
    if not source.exists():
        raise Invalid(f"{source} does not exist", hint="name a file, or a folder of torch.distributed.checkpoint")
    if source.is_dir():
        return Foreign(read_dcp_folder(source), "dcp", {})
    with source.open("rb") as file:
        start = file.read(_LENGTH_BYTES + 1)
        size_bytes = os.fstat(file.fileno()).st_size
    if start.startswith((_ZIP, _PICKLE)):
        value = load_plain(str(source), str(source), mmap=start.startswith(_ZIP))
        return Foreign(_state(value, source), "torch", {})
    header_bytes = int.from_bytes(start[:_LENGTH_BYTES], "little")
    if start[_LENGTH_BYTES:] == b"{" and header_bytes <= size_bytes:
        state, facts = read_safetensors(source)
        return Foreign(state, "safetensors", facts)
    raise Invalid(
        f"{source} is neither a file of torch.save nor safetensors ({size_bytes} bytes, starts with {start[:4]!r})",
        hint="convert it with the tool that wrote it",
    )


def _state(value: Any, source: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Invalid(
            f"{source} holds a {type(value).__name__}; a state is a dict of names",
            hint='save {"model": ...} instead of the bare value',
        )
    return dict(value)


def _head(store: Store) -> Manifest | None:
    ref = head_ref(store)
    return read_committed(store, ref.token, ref.sequence).manifest if ref else None


def _position(found: Any, source: Path) -> Position:
    try:
        return Position.model_validate(found)
    except ValueError as error:
        raise Corrupt(f"{source} gives {found!r} as its position") from error


def _origin(facts: dict[str, Any]) -> dict[str, Any]:
    """Where a file of ours came from."""
    return {key: facts[key] for key in ("run", "checkpoint", "state_digest") if key in facts}
