"""One rank of a group: where it stands, and how all of them agree once a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.state.parts import PIPELINE
from training.errors import Unavailable
from training.parallel.config import ParallelConfig

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
    """

    rank: int
    size: int
    config: ParallelConfig
    mesh: DeviceMesh
    exchange: Exchange
    device: torch.device

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

    def reduce(self, loss: Tensor, wish: bool) -> tuple[Tensor, bool]:
        """The sum of the losses over all samples of the step, and whether any rank has a wish.

        In a pipeline the ranks of the last stage know the loss, and the others have come with 0.
        The same on every rank, bit for bit. Once a step: nobody goes on before all have done it.
        """
        told = torch.stack([loss.double(), torch.tensor(float(wish), dtype=torch.float64, device=loss.device)])
        dist.all_reduce(told)
        return (told[0] / self.config.tensor).to(loss.dtype), bool(told[1].item())


@contextmanager
def joined(config: ParallelConfig, exchange: Exchange, device_type: str) -> Iterator[Ranks]:
    """Join the group that the environment names (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`).

    Raises:
        Unavailable: the other ranks did not come in time.
    """
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
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
        yield standing(config, exchange, device)
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
