"""Real sharded tensors: FSDP2, hybrid sharding, tensor parallelism and both, saved and restored onto each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.gang import gang
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Position
from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.restore import restore_newest
from training.checkpoint.store import LocalStore
from training.state import TrainingState

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("ranks")]  # each is two or three groups of processes
SIZES = {"ddp": 2, "fsdp": 2, "fsdp3": 3, "fsdp4": 4, "hsdp": 4, "tp": 2, "tp-fsdp": 4}


class Net(nn.Module):
    """Sizes that no world size divides, a tied weight, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(70, 96)
        self.down = nn.Linear(96, 70)
        self.out = nn.Linear(70, 70, bias=False)
        self.register_buffer("mask", torch.ones(70))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.down(self.up(x).relu())) * self.mask
        return found


def build(strategy: str) -> TrainingState:
    """A model on this rank's part of the mesh; the same weights whatever the strategy."""
    torch.manual_seed(0)
    model = Net()
    if strategy.startswith("fsdp"):
        for part in (model.up, model.down, model.out):
            fully_shard(part, mesh=init_device_mesh("cpu", (SIZES[strategy],)))
        fully_shard(model)
    elif strategy == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for part in (model.up, model.down, model.out):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif strategy.startswith("tp"):
        shape = (2,) if strategy == "tp" else (2, 2)
        names = ("tp",) if strategy == "tp" else ("dp", "tp")
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if strategy == "tp-fsdp":
            fully_shard(model, mesh=mesh["dp"])
    return TrainingState(model, torch.optim.AdamW(model.parameters(), lr=0.01))


def step(state: TrainingState, number: int) -> None:
    """One step on the same batch for all ranks, so that every strategy computes the same."""
    batch = torch.randn(6, 70, generator=torch.Generator().manual_seed(number))
    state.model(batch).square().mean().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()


Arrays = dict[str, np.ndarray[Any, Any]]


def whole(state: TrainingState) -> Arrays:
    """Every tensor of the state, gathered; as arrays, since tensors cross processes by shared memory."""
    captured = state.capture()
    found = dict(captured["model"])
    for name, values in captured["optimizer"]["state"].items():
        found |= {f"{name}.{key}": value for key, value in values.items()}
    tensors = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}
    return {k: v.detach().clone().numpy() for k, v in tensors.items()}


def checkpointer(exchange: Exchange, folder: str) -> IncrementalCheckpointer:
    return IncrementalCheckpointer(folder, run="r", group=exchange, split=("model", "optimizer/state"))


def train(exchange: Exchange, folder: str, strategy: str, first: int, steps: int) -> dict[str, Any]:
    """Resume, take some steps with a save after each, and return the whole state."""
    state = build(strategy)
    with checkpointer(exchange, folder) as saver:
        restored = saver.restore(state.box)
        assert (restored is None) == (first == 0)
        if restored is not None:
            assert restored.position.step == first
            state.apply(restored)
        before = whole(state)
        for number in range(first, first + steps):
            step(state, number)
            saver.save(state.capture(), position=Position(step=number + 1))
        after = whole(state)
    return {"before": before, "after": after}


def same(one: Arrays, other: Arrays) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert np.array_equal(value, other[key]), key


@pytest.mark.parametrize("strategy", SIZES)
def test_a_strategy_resumes_to_the_bit_and_its_chain_goes_on(strategy: str, tmp_path: Path) -> None:
    size = SIZES[strategy]
    straight = gang(size, train, str(tmp_path / "straight"), strategy, 0, 4)
    gang(size, train, str(tmp_path / "cut"), strategy, 0, 2)
    resumed = gang(size, train, str(tmp_path / "cut"), strategy, 2, 2)
    same(straight[0]["after"], resumed[0]["after"])
    kinds = [c.manifest.kind for c in read_lineage(LocalStore(tmp_path / "cut")).chain]
    assert kinds == ["base", "delta", "delta", "delta"]


MOVES = ["fsdp4 fsdp", "fsdp fsdp3", "tp-fsdp fsdp", "fsdp3 tp-fsdp", "hsdp tp", "ddp fsdp4", "fsdp4 ddp"]


@pytest.mark.parametrize("move", MOVES)
def test_a_state_moves_to_another_strategy_to_the_bit(move: str, tmp_path: Path) -> None:
    before, after = move.split()
    saved = gang(SIZES[before], train, str(tmp_path), before, 0, 3)
    moved = gang(SIZES[after], train, str(tmp_path), after, 3, 1)
    for rank in moved:
        same(saved[0]["after"], rank["before"])
    plain: Any = restore_newest(LocalStore(tmp_path), "r")
    for name, value in plain["model"].items():
        assert np.array_equal(value.numpy(), moved[0]["after"][name])
