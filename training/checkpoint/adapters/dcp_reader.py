"""The DCP storage reader: a verified checkpoint, handed out tensor by tensor."""

from __future__ import annotations

import io
import os
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from training.checkpoint.adapters.address import parse_checkpoint
from training.checkpoint.adapters.dcp_writer import MANY_RANKS
from training.checkpoint.checkpointer import IncrementalCheckpointer
from training.checkpoint.history import read_lineage
from training.checkpoint.restore import RestoredState, restore_checkpoint, restore_newest
from training.checkpoint.store import Store, open_store
from training.checkpoint.token import run_of
from training.errors import Corrupt, Invalid, RetomaError


class RetomaReader(StorageReader):
    """A DCP storage reader: the newest intact checkpoint, or a given one. All of it is verified before any is used.

    Args:
        source: folder or URL of the run's store, an open `Store`, or a checkpointer. A checkpointer opens its
            attempt here, and does not restore a second time when it first saves.
        checkpoint: `000003/00000041`, or the `checkpoint_id` that a `dcp.save` was given. The `checkpoint_id`
            of `dcp.load` means the same.
        cast: let a tensor be loaded into one of another dtype. DCP does so without a word; here it is refused.

    Attributes:
        restored: what was loaded last: its manifest, its position, and what had to be skipped.
    """

    def __init__(
        self,
        source: str | Path | Store | IncrementalCheckpointer,
        checkpoint: str | None = None,
        *,
        cast: bool = False,
    ) -> None:
        self._source = open_store(source) if isinstance(source, str | Path) else source
        self._checkpoint = checkpoint
        self._cast = cast
        self._values: dict[str, Any] = {}
        self.restored: RestoredState | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load begins."""
        self._values = {}
        if checkpoint_id is not None:
            self._checkpoint = os.fspath(checkpoint_id)

    def read_metadata(self, *_: Any) -> Metadata:
        """Restore, and tell what there is.

        Raises:
            CheckpointException: holds our error. DCP would turn another exception into an AssertionError.
        """
        try:
            restored = self._restore()
            flattened = restored.manifest.meta.get("dcp", {}).get("flattened", True)
            values, paths = _flatten(dict(restored)) if flattened else (dict(restored), None)
        except RetomaError as error:
            raise CheckpointException("read", {0: (error, traceback.extract_tb(error.__traceback__))}) from error
        self.restored, self._values = restored, values
        return Metadata({key: _describe(value) for key, value in values.items()}, planner_data=paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Refuse a load by several ranks: they could choose different checkpoints."""
        if not is_coordinator or kwargs.get("rank", 0):
            raise Invalid("a RetomaReader loads the state of one rank; there are several", hint=MANY_RANKS)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Refuse several ranks."""
        if len(plans) != 1:
            raise Invalid(f"a RetomaReader loads the state of one rank, not of {len(plans)}", hint=MANY_RANKS)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Hand out what `read_metadata` has read and verified.

        Raises:
            Invalid: a tensor has another dtype than the one that it is loaded into; nothing was changed.
        """
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        pairs = [(item, self._piece(item), planner.resolve_tensor(item).detach()) for item in tensors]
        for item, source, target in pairs:
            self._check(item.storage_index.fqn, source, target)
        for item, source, target in pairs:
            if source.dtype == target.dtype == torch.bool:
                target.view(torch.uint8).copy_(source.view(torch.uint8))
            else:
                target.copy_(source)
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _as_dcp_bytes(self._values[item.storage_index.fqn]))
        self._values = {}
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name can be a label."""
        return isinstance(checkpoint_id, str | os.PathLike)

    def _restore(self) -> RestoredState:
        source = self._source
        if self._checkpoint is None:
            if isinstance(source, IncrementalCheckpointer):
                found = source.restore()
            else:
                found = restore_newest(source, _run(source))
            if found is None:
                raise Invalid("the store holds no checkpoint to load", hint="save one first, or check the address")
            return found
        store = source.store if isinstance(source, IncrementalCheckpointer) else source
        token, sequence = _find(store, self._checkpoint)
        return restore_checkpoint(store, token, sequence, _run(store))

    def _piece(self, item: ReadItem) -> torch.Tensor:
        value = self._values[item.storage_index.fqn]
        return narrow_tensor_by_index(value, item.storage_offsets, item.lengths)

    def _check(self, key: str, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.shape != target.shape:
            raise Invalid(f"{key}: saved as {tuple(source.shape)}, to be loaded into {tuple(target.shape)}")
        if source.dtype != target.dtype and not self._cast:
            raise Invalid(
                f"{key}: saved as {source.dtype}, to be loaded into {target.dtype}",
                hint="load into a tensor of the saved dtype, or RetomaReader(..., cast=True)",
            )


def _flatten(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        values, paths = flatten_state_dict(state)
    except ValueError as error:  # {"a.b": ...} beside {"a": {"b": ...}}, 1 beside "1"
        raise Invalid(f"DCP has one name for two values of this state: {error}") from error
    return values, paths


def _describe(value: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if not isinstance(value, torch.Tensor):
        return BytesStorageMetadata()
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * value.dim()), sizes=value.size())
    return TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), [whole])


def _as_dcp_bytes(value: Any) -> io.BytesIO:
    """DCP's planners take pickles only: one is made in memory, of a value that was read as typed JSON."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


def _run(store: Store) -> str:
    run = run_of(store)
    if run is None:
        raise Invalid(f"{store.url} holds no run", hint="save a checkpoint first, or check the address")
    return run


def _find(store: Store, name: str) -> tuple[int, int]:
    """A checkpoint by its label, the newest one of that name, or by its address."""
    for committed in reversed(read_lineage(store).chain):
        if committed.manifest.meta.get("dcp", {}).get("checkpoint_id") == name:
            return committed.ref.token, committed.ref.sequence
    try:
        return parse_checkpoint(name)
    except Invalid:
        raise Corrupt(
            f"no checkpoint {name!r} in {store.url}", hint="retoma show RUN lists them; labels are checkpoint_ids"
        ) from None
