"""A training loop of your own, sharded by FSDP2, that saves and resumes through torch's dcp.save and dcp.load.

    torchrun --nproc-per-node 2 docs/examples/fsdp2_loop.py runs/mine

Kill a rank or all of them, and start it again, with the same number of ranks or another one.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from training.checkpoint import Position
from training.checkpoint.adapters.dcp import RetomaReader, RetomaWriter
from training.checkpoint.ranks.hosted import host_exchange


class Training:
    """What is trained, with the two methods by which dcp saves and loads it."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.step = device, 0
        self.model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(device)
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train_step(self) -> None:
        """Each rank takes its samples of a batch that follows from the number of the step alone."""
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(self.step))
        own = batch[dist.get_rank() :: dist.get_world_size()].to(self.device)
        (self.model(own) - own).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Before the first step this makes the optimizer's state, by a step: call it then only to load into it."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was loaded."""
        model, optimizer = state["model"], state["optimizer"]
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)
        self.step = state["step"]


def train(folder: str, steps: int, every: int) -> Training:
    """Resume if there is anything to resume, and train until `steps` are done."""
    training = Training("cuda" if torch.cuda.is_available() else "cpu")
    position = lambda state: Position(step=state["training"]["step"])  # noqa: E731
    with host_exchange() as exchange, RetomaWriter(folder, group=exchange, position=position) as writer:
        if writer.checkpointer.has_checkpoint():
            dcp.load({"training": training}, storage_reader=RetomaReader(writer.checkpointer))
            print(f"rank {dist.get_rank()} resumes at step {training.step}", flush=True)  # noqa: T201
        while training.step < steps:
            training.train_step()
            if training.step % every == 0 or training.step == steps:
                dcp.save({"training": training}, storage_writer=writer)
                print(f"rank {dist.get_rank()} has saved step {training.step}", flush=True)  # noqa: T201
    return training


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="of the checkpoints, or a URL")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options.folder, options.steps, options.every)
    dist.destroy_process_group()
