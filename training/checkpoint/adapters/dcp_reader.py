"""The DCP storage reader: a verified checkpoint, handed out tensor by tensor, to each rank its part."""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from training.checkpoint.adapters.address import parse_checkpoint
from training.checkpoint.adapters.dcp_outline import Outline
from training.checkpoint.adapters.dcp_writer import MANY_RANKS
from training.checkpoint.chain import Chain, check_packs, plan_chunks, read_chain
from training.checkpoint.checkpointer import IncrementalCheckpointer
from training.checkpoint.history import read_lineage
from training.checkpoint.restore import WHOLE, RestoredState, View, first_intact, restore_checkpoint, restore_newest
from training.checkpoint.state.boxes import Box, Wanted
from training.checkpoint.store import Store, open_store
from training.checkpoint.token import Skipped, run_of
from training.errors import Corrupt, Invalid, RetomaError


class RetomaReader(StorageReader):
    """A DCP storage reader: the newest intact checkpoint, or a given one. All is verified before any of it is used.

    Of several ranks each reads the frames that overlap what it loads, and all load the same checkpoint. From a
    store, each looks for the newest one whose part of it is intact, and all take the oldest of these; a rank that
    has found a newer one reads again. From a checkpointer of a group, the ranks agree as in any restore of the
    engine. In both cases no tensor is changed on any rank before every rank has found an intact part; only that
    second reading can still fail on one rank when others have begun to copy. The load fails on all ranks then, too.

    Args:
        source: folder or URL of the run's store, an open `Store`, or a checkpointer. A checkpointer opens its
            attempt here, and does not restore a second time when it first saves.
        checkpoint: `000003/00000041`, or the `checkpoint_id` that a `dcp.save` was given. The `checkpoint_id`
            of `dcp.load` means the same.
        cast: let a tensor be loaded into one of another dtype. DCP does so without a word; here it is refused.

    Attributes:
        restored: what was loaded last: its manifest, its position, and what had to be skipped. With several ranks,
            this rank's part of it.
    """

    def __init__(
        self,
        source: str | Path | Store | IncrementalCheckpointer,
        checkpoint: str | None = None,
        *,
        cast: bool = False,
    ) -> None:
        self._checkpointer = source if isinstance(source, IncrementalCheckpointer) else None
        if isinstance(source, IncrementalCheckpointer):
            self._store = source.store
        else:
            self._store = open_store(source) if isinstance(source, str | Path) else source
        self._checkpoint = checkpoint
        self._cast = cast
        self._rank: int | None = None
        self._outline: Outline | None = None
        self._boxes: Mapping[str, Box] = {}
        self.restored: RestoredState | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A load begins."""
        if checkpoint_id is not None:
            self._checkpoint = os.fspath(checkpoint_id)

    def read_metadata(self, *_: Any) -> Metadata:
        """Read manifests, and tell what there is.

        Raises:
            CheckpointException: holds our error. DCP would turn another exception into an AssertionError.
        """
        try:
            self._outline = Outline.of(self._look())
        except RetomaError as error:
            raise CheckpointException("read", {0: _wrap_exception(error)}) from error
        return self._outline.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Learn which rank this is.

        Raises:
            Invalid: it is another one than in the checkpointer's group.
        """
        rank = kwargs.get("rank", 0)
        self._rank = rank if dist.is_initialized() and dist.get_world_size() > 1 else None
        group = self._agreeing.group if self._agreeing is not None else None
        if group is not None and group.rank != rank:
            raise Invalid(f"rank {rank} of this load is rank {group.rank} of the checkpointer's group")

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Read what this rank needs, and tell of which checkpoint, unless the engine will.

        Raises:
            Corrupt: it is not intact, and there is no older one that is.
        """
        self._boxes = self._boxes_of(plan)
        if self._agreeing is not None:
            return plan
        if self._checkpoint is not None:
            self.restored = self._read(_find(self._store, self._checkpoint))
        else:
            self.restored = restore_newest(self._store, self._run, view=self._view)
        return dataclasses.replace(plan, storage_data=_name(self._found))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks take the oldest checkpoint of those that they have found intact.

        Raises:
            Invalid: the checkpointer's group has other ranks.
        """
        if self._agreeing is not None:
            size = self._agreeing.group.size if self._agreeing.group is not None else 1
            if size != len(plans):
                raise Invalid(f"{len(plans)} ranks load from a checkpointer of {size}", hint=MANY_RANKS)
            return plans
        oldest = min(plan.storage_data for plan in plans)
        return [dataclasses.replace(plan, storage_data=oldest) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Hand out what was read and verified.

        Raises:
            Invalid: a tensor has another dtype than the one that it is loaded into; nothing was changed.
            Corrupt: see the class.
        """
        if self._agreeing is not None:
            self.restored = self._agreeing.restore(self._boxes.get)
        elif plan.storage_data != _name(self._found):
            self.restored = self._read(plan.storage_data)
        values = self._values()
        tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        pairs = [(item, self._piece(values, item), planner.resolve_tensor(item).detach()) for item in tensors]
        for item, source, target in pairs:
            self._check(item.storage_index.fqn, source, target)
        others = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        data = [_as_dcp_bytes(self._value(values, item)) for item in others]
        for item, source, target in pairs:
            if source.dtype == target.dtype == torch.bool:
                target.view(torch.uint8).copy_(source.view(torch.uint8))
            else:
                target.copy_(source)
            planner.commit_tensor(item, target)
        for item, value in zip(others, data, strict=True):
            planner.load_bytes(item, value)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name can be a label."""
        return isinstance(checkpoint_id, str | os.PathLike)

    @property
    def _agreeing(self) -> IncrementalCheckpointer | None:
        """The checkpointer that chooses the checkpoint; None: this reader does."""
        return self._checkpointer if self._checkpoint is None else None

    @property
    def _run(self) -> str:
        run = self._checkpointer.run if self._checkpointer is not None else run_of(self._store)
        if run is None:
            raise Invalid(f"{self._store.url} holds no run", hint="save a checkpoint first, or check the address")
        return run

    @property
    def _found(self) -> RestoredState:
        if self.restored is None:
            raise _nothing()
        return self.restored

    @property
    def _planned(self) -> Outline:
        if self._outline is None:
            raise Invalid("a load begins with read_metadata", hint="dcp.load(state, storage_reader=...)")
        return self._outline

    @property
    def _view(self) -> View:
        """Of one process everything, so that all of it is verified; of several ranks what each needs."""
        if self._rank is None:
            return WHOLE
        nothing = {
            key: Box((0,) * self._planned.tensors[name].dim(), (0,) * self._planned.tensors[name].dim())
            for name, key in self._planned.keys.items()
        }
        return View(Wanted(self._rank, {**nothing, **self._boxes}.get))

    def _look(self) -> Chain:
        """The newest checkpoint whose manifests are intact and whose packs are there, or the given one."""
        read = partial(_chain, self._store, self._run)
        if self._checkpoint is not None:
            return read(*_find(self._store, self._checkpoint), [])
        if self._checkpointer is not None and (head := self._checkpointer.wait()) is not None:
            return read(head.ref.token, head.ref.sequence, [])
        found, _ = first_intact(self._store, self._run, read)
        if found is None:
            raise _nothing()
        return found

    def _read(self, name: tuple[int, int]) -> RestoredState:
        return restore_checkpoint(self._store, *name, self._run, view=self._view)

    def _boxes_of(self, plan: LoadPlan) -> dict[str, Box]:
        """What the plan needs of each tensor, by the engine's key. Of what is not in the plan nothing is said."""
        boxes: dict[str, Box] = {}
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                key = self._planned.keys[item.storage_index.fqn]
                box = Box(tuple(item.storage_offsets), tuple(item.lengths))
                boxes[key] = boxes[key].hull(box) if key in boxes else box
        return boxes

    def _values(self) -> dict[str, Any]:
        return self._planned.values(dict(self._found))

    def _value(self, values: Mapping[str, Any], item: ReadItem) -> Any:
        name = item.storage_index.fqn
        if name not in values:
            raise Corrupt(
                f"{self._planned.name} is not intact, and {self._found.manifest.key} has no {name}",
                hint="load that one by its name: RetomaReader(..., checkpoint=...)",
            )
        return values[name]

    def _piece(self, values: Mapping[str, Any], item: ReadItem) -> torch.Tensor:
        """The part of a tensor that an item asks for; of the tensor there is all, or this rank's box."""
        name = item.storage_index.fqn
        value, whole = self._value(values, item), self._planned.tensors[name]
        origin = (0,) * whole.dim()
        if isinstance(value, torch.Tensor) and value.shape != whole.shape:
            box = self._boxes[self._planned.keys[name]]
            origin = box.offsets if tuple(value.shape) == box.sizes else (-1,) * whole.dim()
        if not isinstance(value, torch.Tensor) or -1 in origin:
            raise Corrupt(
                f"{self._planned.name} is not intact, and {name} is another in {self._found.manifest.key}",
                hint="load that one by its name: RetomaReader(..., checkpoint=...)",
            )
        offsets = [at - start for at, start in zip(item.storage_offsets, origin, strict=True)]
        return narrow_tensor_by_index(value, offsets, item.lengths)

    def _check(self, key: str, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.shape != target.shape:
            raise Invalid(f"{key}: saved as {tuple(source.shape)}, to be loaded into {tuple(target.shape)}")
        if source.dtype != target.dtype and not self._cast:
            raise Invalid(
                f"{key}: saved as {source.dtype}, to be loaded into {target.dtype}",
                hint="load into a tensor of the saved dtype, or RetomaReader(..., cast=True)",
            )


def _chain(store: Store, run: str, token: int, sequence: int, skipped: list[Skipped]) -> Chain:
    chain = read_chain(store, token, sequence, run, notes=skipped)
    plan_chunks(chain)
    check_packs(store, chain)
    return chain


def _name(restored: RestoredState) -> tuple[int, int]:
    return restored.checkpoint.ref.token, restored.checkpoint.ref.sequence


def _nothing() -> Invalid:
    return Invalid("the store holds no checkpoint to load", hint="save one first, or check the address")


def _as_dcp_bytes(value: Any) -> io.BytesIO:
    """DCP's planners take pickles only: one is made in memory, of a value that was read as typed JSON."""
    data = io.BytesIO()
    torch.save(value, data)
    data.seek(0)
    return data


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
