"""What a job says of its model for those who cut it, checked against the model."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

from torch import nn

from training.errors import Invalid
from training.parallel.config import ParallelConfig

if TYPE_CHECKING:
    from training.job import Job


def sharing_plan(model: nn.Module, job: Job[Any], config: ParallelConfig) -> dict[str, Any]:
    """Module name, or pattern -> how the ranks of a tensor group share it.

    Raises:
        Invalid: there is no plan, or an entry of it stands for no module. torch would only warn, and share nothing.
    """
    name, off = ("sequence", "false") if config.sequence else ("tensor", "1")
    plan = job.sequence_plan(model, config.tensor) if config.sequence else job.tensor_plan(model)
    if not plan:
        raise Invalid(
            f"parallel.{name} needs a plan, and {type(job).__name__} gives none",
            hint=f"write {name}_plan() in the job, or set parallel.{name}={off}",
        )
    modules = [path for path, _ in model.named_modules()]
    for entry in plan:
        if not any(_stands_for(entry, path) for path in modules):
            raise Invalid(
                f"{name}_plan() of {type(job).__name__} has {entry!r}, and the model has no such module",
                hint=f"its modules: {', '.join(modules[1:8])}, ...",
            )
    return plan


def recomputed_blocks(model: nn.Module, job: Job[Any]) -> list[nn.Module]:
    """The parts that are computed again in the backward pass. Raises `Invalid`: the job names none."""
    blocks = job.blocks(model)
    if not blocks:
        raise Invalid(
            f"parallel.activation_checkpointing needs blocks, and {type(job).__name__} names none",
            hint="write blocks() in the job, or set parallel.activation_checkpointing=false",
        )
    return blocks


def _stands_for(entry: str, path: str) -> bool:
    tokens, names = entry.split("."), path.split(".")
    return len(tokens) == len(names) and all(map(fnmatch, names, tokens))
