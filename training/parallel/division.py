"""Who holds what of a model that is cut into the stages of a pipeline, by its names in the whole model.

Two names may be one tensor, tied: an embedding in the first stage and the head in the last. In a checkpoint it is
one tensor, as it is for a process that holds the whole model, and the ranks that have its first name save it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from training.checkpoint.state.parts import escape
from training.checkpoint.state.pooled import Pooled
from training.errors import Invalid

if TYPE_CHECKING:
    from training.job import Job
    from training.parallel.config import ParallelConfig


class Standing(Protocol):
    """Where a rank stands; see `training.parallel.ranks.Ranks`."""

    @property
    def config(self) -> ParallelConfig:
        """How the training is cut."""

    @property
    def size(self) -> int:
        """Of the group."""

    @property
    def place(self) -> int:
        """In the pipeline."""


class Division:
    """One rank's view of it. A place is one in the pipeline; a name is one in the state of the whole model.

    Args:
        whole: every name and its tensor, in the order of the whole model's state; tied names have the same object.
        stages: the same for each stage.
        pipeline: how many places there are; stage s stands at place s modulo so many.
        place: of this rank.
        ranks: place -> the ranks that stand there, in order.

    Attributes:
        ranks: see above.
        tied: first name -> the places that hold the tensor, if they are several. The first of them saves it.
        doubled: first names of tensors that two stages at the same place hold.

    Raises:
        Invalid: a stage has what the model has not, or no stage has what the model has; named.
    """

    def __init__(
        self,
        whole: Mapping[str, Any],
        stages: Sequence[Mapping[str, Any]],
        pipeline: int,
        place: int,
        ranks: Sequence[tuple[int, ...]],
    ) -> None:
        _check(whole, stages)
        self._place, self.ranks = place, ranks
        self._names = tuple(whole)
        seen: dict[object, str] = {}
        self._first = {name: seen.setdefault(_identity(name, value), name) for name, value in whole.items()}
        holding: dict[str, set[int]] = {}  # first name -> the stages that hold the tensor
        for number, stage in enumerate(stages):
            for name in stage:
                holding.setdefault(self._first[name], set()).add(number)
        self._owner = {
            name: min((n for n in found if name in stages[n]), default=min(found)) % pipeline
            for name, found in holding.items()
        }
        places = {name: {number % pipeline for number in found} for name, found in holding.items()}
        self.tied = {
            name: (self._owner[name], *sorted(found - {self._owner[name]}))
            for name, found in places.items()
            if len(found) > 1
        }
        self.doubled = [name for name, found in holding.items() if len(found) > len(places[name])]
        self._here = {name for number, stage in enumerate(stages) if number % pipeline == place for name in stage}
        self._local: dict[str, str] = {}  # first name -> the name here
        for name in whole:
            if name in self._here:
                self._local.setdefault(self._first[name], name)
        self._segments = {escape(name): name for name in whole}

    def saves(self, name: str) -> bool:
        """Whether a tensor is saved here, of all places that hold it."""
        return self._owner[self._first[name]] == self._place

    def local(self, name: str) -> str | None:
        """The name that a tensor has on this rank; None: it does not hold it."""
        return self._local.get(self._first[name])

    def pool(self, captured: Mapping[str, Any]) -> dict[str, Any]:
        """The state of this rank's stages as its part of that of the whole model.

        Everything is in the order of the model, the optimizer's state, too: it is read by name.
        """
        held = {self._first[name]: value for name, value in captured["model"].items()}
        mine = [name for name in self._names if self._first[name] in held and self.saves(name)]
        optimizer = captured["optimizer"]
        values = {self._first[name]: value for name, value in optimizer["state"].items() if self.saves(name)}
        groups = [
            {**group, "params": Pooled([self._first[name] for name in group["params"]], self._names)}
            for group in optimizer["groups"]
        ]
        return {
            **captured,
            "model": Pooled({name: held[self._first[name]] for name in mine}, self._names),
            "optimizer": {**optimizer, "state": Pooled(values, self._names), "groups": groups},
        }

    def part(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What is this rank's of the state of the whole model, under the names that it has here.

        Names that the model has not are left in it, to be refused.
        """
        optimizer = state["optimizer"]
        names = self._renamed(optimizer["state"])
        groups = [{**group, "params": [*self._renamed(group["params"]).values()]} for group in optimizer["groups"]]
        model = {k: v for k, v in state["model"].items() if k in self._here or k not in self._first}
        values = {new: optimizer["state"][name] for name, new in names.items()}
        return {**state, "model": model, "optimizer": {**optimizer, "state": values, "groups": groups}}

    def key(self, key: str) -> str | None:
        """The key of a tensor of the whole state, as this rank has it; None: it does not hold it."""
        name = self._segments.get(segment_of(key) or "")
        if name is None:
            return key
        local, parts = self.local(name), key.split("/")
        if local is None:
            return None
        parts[1 if parts[0] == "model" else 2] = escape(local)
        return "/".join(parts)

    def holders(self, key: str) -> tuple[int, ...]:
        """The ranks that hold a tensor as it is saved, by its key."""
        name = self._segments.get(segment_of(key) or "")
        if name is None:
            return tuple(rank for ranks in self.ranks for rank in ranks)
        return self.ranks[self._owner[self._first[name]]]

    def _renamed(self, names: Iterable[str]) -> dict[str, str]:
        """The names of what this rank holds, and what they are here."""
        known = {name: self.local(name) if name in self._first else name for name in names}
        return {name: local for name, local in known.items() if local is not None}


def segment_of(key: str) -> str | None:
    """The name, as it is spelt in a key, of the entry of the model that a tensor of a captured state belongs to."""
    parts = key.split("/")
    if parts[0] == "model" and len(parts) > 1:
        return parts[1]
    return parts[2] if parts[:2] == ["optimizer", "state"] and len(parts) > 3 else None


def _identity(name: str, value: Any) -> object:
    return id(value) if isinstance(value, Tensor) else name


def _check(whole: Mapping[str, Any], stages: Sequence[Mapping[str, Any]]) -> None:
    found: set[object] = set()
    for number, stage in enumerate(stages):
        for name, value in stage.items():
            if name not in whole:
                raise Invalid(
                    f"stages(): stage {number} has {name!r}, and the model has not",
                    hint="a stage keeps the names of the model, for example with a ModuleDict from number to block",
                )
            if _identity(name, value) != _identity(name, whole[name]):
                raise Invalid(
                    f"stages(): {name!r} of stage {number} is not the model's own",
                    hint="make stages of the modules of the model that is given, not of copies",
                )
            found.add(_identity(name, value))
    if missing := [name for name, value in whole.items() if _identity(name, value) not in found]:
        raise Invalid(f"stages(): no stage has {missing[0]!r}")


def divide(model: nn.Module, job: Job[Any], ranks: Standing) -> tuple[list[nn.Module], Division]:
    """The stages that the job makes of the model, and who holds what of it.

    Raises:
        Invalid: the job makes none, or they do not make up the model.
    """
    from training.job import Job

    config, kind = ranks.config, type(job)
    stages, name = job.stages(model, config.stages), kind.__name__
    for method in ("inputs", "loss_of"):
        if getattr(kind, method) is getattr(Job, method):
            raise Invalid(
                f"parallel.pipeline needs {method}(), and {name} has none",
                hint=f"write {method}() in the job, or set parallel.pipeline=1",
            )
    if len(stages) != config.stages:
        raise Invalid(
            f"parallel.pipeline needs {config.stages} stages, and {name} gives {len(stages) or 'none'}",
            hint="write stages() in the job, or set parallel.pipeline=1",
        )
    at_one_place = ranks.size // config.pipeline
    division = Division(
        _tensors(model),
        [_tensors(stage) for stage in stages],
        config.pipeline,
        ranks.place,
        [tuple(range(first, first + at_one_place)) for first in range(0, ranks.size, at_one_place)],
    )
    if division.doubled and (config.data_ranks > 1 or config.data == "fsdp"):
        raise Invalid(
            f"two stages of the same rank hold {division.doubled[0]!r}, which {config.data} cannot share",
            hint="put what uses it into one stage, or take another parallel.pipeline or stages_per_rank",
        )
    return stages, division


def _tensors(module: nn.Module) -> dict[str, Any]:
    return dict(module.state_dict(keep_vars=True))
