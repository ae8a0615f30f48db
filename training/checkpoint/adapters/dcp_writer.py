"""The DCP storage writer: one `dcp.save`, by one rank or by many, becomes one committed checkpoint."""

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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from training.checkpoint.checkpointer import IncrementalCheckpointer
from training.checkpoint.manifest import Committed, Position
from training.checkpoint.store import Store
from training.errors import Invalid, Unavailable

ONE_BY_ONE = "wait for each async_save before the next"
OVERLAP_SECONDS = 1.0  # that the thread of a save may take to end when another one begins
MANY_RANKS = "give every rank a RetomaWriter(..., group=exchange); exchange = host_exchange(process_group)"


class _Save(threading.local):
    """One `dcp.save` from its set-up to its end. It runs in one thread; with async_save, not in the caller's."""

    ticket: int = 0
    next_label: str | None = None
    label: str | None = None
    items: tuple[tuple[str, Any], ...] = ()


class RetomaWriter(StorageWriter):
    """A DCP storage writer for one attempt at a run. Keep it: a second writer fences the first.

    Several ranks save together when each has a writer with its own `group=`: all commit one checkpoint, or none
    does, and a rank that cannot take part fails the save on all of them. What a rank saves is what its planner
    holds, before DCP throws out what several ranks have alike: its parts of sharded tensors, and of the rest its
    share, as `IncrementalCheckpointer` does it. So of what has another value on each rank, numbers and tensors are
    rank 0's (but for those under `split`, which is a promise that they are alike), and what is part of the
    structure (names, shapes, dtypes, texts, bools, None) is refused by name. Wrap a value in `PerRank` to keep that
    of each rank.

    With `dcp.async_save`, wait for one save before the next one is started; a save that was overtaken is refused,
    and several ranks refuse one that begins beside another. A stager of your own that reuses its memory
    (`async_stager=`) must not be asked for a copy before the save of the last one is done: DCP gives this writer no
    say in that.

    Args:
        target: folder or URL of the run's store, an open `Store`, or a checkpointer that is used beside DCP.
        position: what comes next, told by the state that is saved; default: nothing is counted.
        options: see `IncrementalCheckpointer`; `group` and `split` for several ranks.
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
        self._saving: threading.Thread | None = None

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
        """Refuse a save whose ranks are not those of the group.

        Raises:
            Invalid: there are other ranks than the writer knows of; or, in a group, another save is being written.
        """
        group = self.checkpointer.group
        rank, together = kwargs.get("rank", 0), kwargs.get("use_collectives", True)
        if group is None:
            alone = together or not dist.is_initialized() or dist.get_world_size() == 1
            if not is_coordinator or rank or not alone:
                raise Invalid("a RetomaWriter saves the state of one rank; there are several", hint=MANY_RANKS)
        elif rank != group.rank or not (together or group.size == 1):
            raise Invalid(
                f"rank {group.rank} of {group.size} was to save as rank {rank}"
                + ("" if together else " without the others"),
                hint="save with the process group that host_exchange() was given, without no_dist=True and "
                "use_collectives=False",
            )
        else:
            self._begin()
        self._save.ticket = next(self._tickets)
        self._save.label, self._save.next_label = self._save.next_label, None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing is added: a plan may come from DCP's cache, and what is kept in it would be of another save."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Refuse other ranks than those of the group: their values under one key would become one."""
        size = self.checkpointer.group.size if self.checkpointer.group is not None else 1
        if len(plans) != size:
            raise Invalid(f"a RetomaWriter of {size} ranks was to save those of {len(plans)}", hint=MANY_RANKS)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Gather what is to be saved, and in a group save it: `finish` is not called on every rank.

        Raises:
            See `finish`. In a group all ranks raise, each its own error or that of the rank that failed.
        """
        if self.checkpointer.group is not None:
            try:
                self._commit(lambda: _state_of(planner), flattened=getattr(planner, "flatten_state_dict", False))
            finally:
                self._saving = None
            results = [WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items]
        else:
            self._save.items = tuple((item.index.fqn, _resolve(item, planner)) for item in plan.items)
            results = [
                WriteResult(item.index, value.nbytes if isinstance(value, torch.Tensor) else 0, None)
                for item, (_, value) in zip(plan.items, self._save.items, strict=True)
            ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:  # noqa: ARG002 - DCP's names
        """Save and wait until the checkpoint is committed. In a group it is.

        Raises:
            Invalid: a value cannot be saved, by name; or a later save has overtaken this one.
            Fenced, Unavailable: see `IncrementalCheckpointer`. The head is as it was.
        """
        if self.checkpointer.group is None:
            items, self._save.items = dict(self._save.items), ()
            paths = metadata.planner_data
            state = items if paths is None else unflatten_state_dict(items, paths)
            self._commit(lambda: state, flattened=paths is not None)

    def _begin(self) -> None:
        """In a group, two saves at once would mix their collectives, and each rank might save another one first."""
        before, now = self._saving, threading.current_thread()
        if before not in (None, now, threading.main_thread()):  # the main thread has come back from its save
            assert before is not None  # noqa: S101 - for the type
            before.join(OVERLAP_SECONDS)
            if before.is_alive():
                raise Invalid("another save is in flight", hint=ONE_BY_ONE)
        self._saving = now

    def _commit(self, state_of: Callable[[], dict[str, Any]], *, flattened: bool) -> None:
        ticket, label = self._save.ticket, self._save.label
        meta = {"dcp": {"flattened": flattened, "checkpoint_id": label}}
        with self._committing:
            try:
                if ticket < self._newest:
                    raise Invalid("a later save was committed first", hint=ONE_BY_ONE)
                state = state_of()
                position = self._position(state) if self._position is not None else None
            except BaseException as error:
                self.checkpointer.withdraw(error)
                raise
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


def _state_of(planner: SavePlanner) -> dict[str, Any]:
    """The state as this rank holds it, from its planner: the plan leaves out what other ranks save, too."""
    if not isinstance(planner, DefaultSavePlanner):
        raise Invalid(
            f"a {type(planner).__name__} does not tell the state of its rank",
            hint="derive it from DefaultSavePlanner",
        )
    for name in ("resolve_data", "transform_object", "lookup_object"):
        if getattr(type(planner), name) is not getattr(DefaultSavePlanner, name):
            raise Invalid(
                f"{type(planner).__name__}.{name} would not be asked: several ranks save what is in the state",
                hint="transform the tensors before dcp.save",
            )
    state: dict[str, Any] = planner.state_dict
    return unflatten_state_dict(state, planner.mappings) if planner.flatten_state_dict else state
