"""One rank of a group: where it stands, and how all of them agree once a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.state.parts import PIPELINE
from training.errors import Invalid, Unavailable
from training.parallel.config import ParallelConfig
from training.parallel.own_time import OwnTime, told_of_waits
from training.parallel.pace import Pace

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Ranks:
    """The group as one of its processes sees it.

    Attributes:
        rank, size: of this process, and of the group.
        config: how the training is cut.
        mesh: all ranks: the pipeline first, then replicas and shards, and tensor parallelism last.
        exchange: with the other ranks, for checkpoints.
        device: of this rank.
        own_time: of its steps.
        pace: of all ranks; it stays empty where waits cannot be measured.
    """

    rank: int
    size: int
    config: ParallelConfig
    mesh: DeviceMesh
    exchange: Exchange
    device: torch.device
    own_time: OwnTime = field(default_factory=OwnTime)
    pace: Pace = field(default_factory=Pace)

    @property
    def data_rank(self) -> int:
        """Which samples this rank sees: its place among those that see different ones."""
        return self.seat % self.config.data_ranks

    @property
    def seat(self) -> int:
        """Its place among those that draw different random numbers: ranks that share layers draw the same."""
        return self.rank // self.config.tensor

    @property
    def place(self) -> int:
        """Its place in the pipeline."""
        return self.seat // self.config.data_ranks

    def reduce(self, losses: Tensor, wish: bool) -> tuple[Tensor, bool]:
        """The sums of the losses of steps over all their samples, and whether any rank has a wish.

        In a pipeline the ranks of the last stage know the loss, and the others have come with 0.
        The same on every rank, bit for bit. Nobody goes on before all have done it. Every rank tells its own time
        of the steps in a place of its own, so that the sum tells all of them to all.

        Args:
            losses: of shape (steps,), what this rank's samples add to each.
            wish: of this rank.
        """
        steps, own = len(losses), [0.0] * self.size
        own[self.rank] = self.own_time.seconds() / steps
        told = torch.tensor([float(wish), *own], dtype=torch.float64, device=losses.device)
        told = torch.cat([losses.double(), told])
        dist.all_reduce(told)
        _, wished, *own = told[steps - 1 :].tolist()
        if self.own_time.measured:
            self.pace.step(self.own_time.step_seconds() / steps, own)
        return (told[:steps] / self.config.tensor).to(losses.dtype), bool(wished)


@contextmanager
def joined(config: ParallelConfig, exchange: Exchange, device_type: str) -> Iterator[Ranks]:
    """Join the group that the environment names (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`).

    Raises:
        Invalid: there is no GPU for this rank.
        Unavailable: the other ranks did not come in time.
    """
    device = torch.device("cpu")
    if device_type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise Invalid(
                f"rank {exchange.rank} needs GPU {local} of this node, and torch sees {torch.cuda.device_count()}",
                hint="lower parallel.world, or see CUDA_VISIBLE_DEVICES and nvidia-smi",
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            timeout=timedelta(seconds=config.collective_timeout_seconds),
            device_id=device if device_type == "cuda" else None,
        )
    except (RuntimeError, ValueError) as error:
        raise Unavailable(f"rank {exchange.rank} could not join the others: {error}") from error
    try:
        ranks = standing(config, exchange, device)
        with told_of_waits(ranks.own_time) if device.type == "cpu" else nullcontext():
            yield ranks
    finally:
        dist.destroy_process_group()


def standing(config: ParallelConfig, exchange: Exchange, device: torch.device) -> Ranks:
    """Where this process stands in the group that it has joined."""
    from torch.distributed.device_mesh import init_device_mesh

    dims = {PIPELINE: config.pipeline} if config.pipeline > 1 else {}
    if config.data == "hsdp":
        dims |= {"replicate": config.replicas, "shard": config.data_ranks // config.replicas}
    else:
        dims["dp"] = config.data_ranks
    if config.tensor > 1:
        dims["tp"] = config.tensor
    mesh = init_device_mesh(device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    return Ranks(exchange.rank, exchange.size, config, mesh, exchange, device)
