"""Whether a job's model can be cut as its configuration says: told by one process, before anything is scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from training.parallel.config import ParallelConfig
from training.parallel.division import divide
from training.parallel.plans import recomputed_blocks, sharing_plan

if TYPE_CHECKING:
    from training.job import Job


@dataclass(frozen=True)
class _FirstRank:
    """Where the first rank stands; see `training.parallel.ranks.Ranks`."""

    config: ParallelConfig
    place: int = 0

    @property
    def size(self) -> int:
        return self.config.world


def check_cut(model: nn.Module, job: Job[Any], config: ParallelConfig) -> None:
    """Return if the job gives what the strategy needs.

    Args:
        model: the whole of it.
        job: whose it is.
        config: how it is to be cut.

    Raises:
        Invalid: names what is missing, or does not fit the model.
    """
    if config.tensor > 1:
        sharing_plan(model, job, config)
    if config.activation_checkpointing:
        recomputed_blocks(model, job)
    if config.pipeline > 1:
        divide(model, job, _FirstRank(config))
