"""The DCP storage writer: one `dcp.save` becomes one committed checkpoint."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from training.checkpoint.checkpointer import IncrementalCheckpointer
from training.checkpoint.manifest import Committed, Position
from training.checkpoint.store import Store
from training.errors import Invalid, Unavailable

MANY_RANKS = "use one rank, or save through IncrementalCheckpointer; several ranks are not supported yet"


class _Save(threading.local):
    """One `dcp.save` from its set-up to its end. It runs in one thread; with async_save, not in the caller's."""

    ticket: int = 0
    next_label: str | None = None
    label: str | None = None
    items: tuple[tuple[str, Any], ...] = ()


class RetomaWriter(StorageWriter):
    """A DCP storage writer for one attempt at a run. Keep it: a second writer fences the first.

    With `dcp.async_save`, wait for one save before the next one is started; a save that was overtaken is refused.
    A stager of your own that reuses its memory (`async_stager=`) must not be asked for a copy before the save of
    the last one is done: DCP gives this writer no say in that.

    Args:
        target: folder or URL of the run's store, an open `Store`, or a checkpointer that is used beside DCP.
        position: what comes next, told by the state that is saved; default: nothing is counted.
        options: see `IncrementalCheckpointer`.
    """

    def __init__(
        self,
        target: str | Path | Store | IncrementalCheckpointer,
        *,
        position: Callable[[dict[str, Any]], Position] | None = None,
        **options: Any,
    ) -> None:
        self._owned = not isinstance(target, IncrementalCheckpointer)
        if isinstance(target, IncrementalCheckpointer):
            if options:
                raise Invalid(f"{', '.join(options)}: already decided by the checkpointer that is given")
            self.checkpointer = target
        else:
            self.checkpointer = IncrementalCheckpointer(target, **options)
        self._position = position
        self._save = _Save()
        self._tickets = itertools.count(1)
        self._newest = 0
        self._committing = threading.Lock()

    @property
    def head(self) -> Committed | None:
        """The newest checkpoint that was committed."""
        return self.checkpointer.head

    def close(self) -> None:
        """End the threads of the checkpointer, unless it is the caller's."""
        if self._owned:
            self.checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._owned:
            self.checkpointer.__exit__(kind, error, trace)

    def __reduce__(self) -> NoReturn:
        raise Invalid(
            "a RetomaWriter cannot move to another process: it holds the token of this one",
            hint="async_save(..., async_checkpointer_type=AsyncCheckpointerType.THREAD)",
        )

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A save begins. `checkpoint_id` is kept as a label, by which a reader finds the checkpoint."""
        self._save.next_label = None if checkpoint_id is None else os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Refuse a save that other ranks would have a part in.

        Raises:
            Invalid: there are several ranks.
        """
        alone = kwargs.get("use_collectives", True) or not dist.is_initialized() or dist.get_world_size() == 1
        if not is_coordinator or kwargs.get("rank", 0) or not alone:
            raise Invalid("a RetomaWriter saves the state of one rank; there are several", hint=MANY_RANKS)
        self._save.ticket = next(self._tickets)
        self._save.label, self._save.next_label = self._save.next_label, None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing is added: a plan may come from DCP's cache, and what is kept in it would be of another save."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Refuse several ranks, whose values under one key would become one."""
        if len(plans) != 1:
            raise Invalid(f"a RetomaWriter saves the state of one rank, not of {len(plans)}", hint=MANY_RANKS)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Gather what is to be saved. Nothing is copied or written before `finish`, which alone commits."""
        self._save.items = tuple((item.index.fqn, _resolve(item, planner)) for item in plan.items)
        results = [
            WriteResult(item.index, value.nbytes if isinstance(value, torch.Tensor) else 0, None)
            for item, (_, value) in zip(plan.items, self._save.items, strict=True)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - DCP's names
        """Save and wait until the checkpoint is committed.

        Raises:
            Invalid: a value cannot be saved, by name; or a later save has overtaken this one.
            Fenced, Unavailable: see `IncrementalCheckpointer`. The head is as it was.
        """
        ticket, label, items = self._save.ticket, self._save.label, self._save.items
        self._save.items = ()
        paths = metadata.planner_data
        state = dict(items) if paths is None else unflatten_state_dict(dict(items), paths)
        meta = {"dcp": {"flattened": paths is not None, "checkpoint_id": label}}
        position = self._position(state) if self._position is not None else None
        with self._committing:
            if ticket < self._newest:
                raise Invalid("a later save was committed first", hint="wait for each async_save before the next")
            before = self.checkpointer.wait()
            self.checkpointer.save(state, position=position, meta=meta)
            after = self.checkpointer.wait()
            if after is None or after is before:
                raise Unavailable("the save was not committed", run=self.checkpointer.run)
            self._newest = ticket

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any name can be a label."""
        return isinstance(checkpoint_id, str | os.PathLike)


def _resolve(item: WriteItem, planner: SavePlanner) -> Any:
    """The value itself. `resolve_data` would pickle what is no tensor."""
    key = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        look_up = getattr(planner, "lookup_object", None)
        if look_up is None:
            raise Invalid(
                f"{key}: a {type(planner).__name__} only gives away pickles",
                hint="derive it from DefaultSavePlanner",
            )
        return look_up(item.index)
    if item.tensor_data is not None and item.tensor_data.chunk.sizes != item.tensor_data.size:
        raise Invalid(f"{key}: a part of a tensor that is sharded over several ranks", hint=MANY_RANKS)
    return planner.resolve_data(item)
