"""Post-local SGD and DiLoCo written down once more: all replicas in one process, and no collective."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.checkpoint.manifest import Position
from training.config import JobConfig
from training.data import Schedule, load_batches, share
from training.job import load_job
from training.randomness import seed_everything


class Replicas:
    """The replicas of a job without dropout, as `config.parallel` says that they train."""

    def __init__(self, config: JobConfig, data: Path) -> None:
        self.config, self.size = config, config.parallel.world
        seed_everything(config.seed)
        self.job = load_job(config.job, config.params, data)
        first = self.job.model()
        self.models = [copy.deepcopy(first) for _ in range(self.size)]
        self.optimizers = [self.job.optimizer(model) for model in self.models]
        self.dataset = self.job.train_data()
        samples = len(self.dataset)  # type: ignore[arg-type]
        self.schedule = Schedule(samples, config.batch_size, config.accumulate_batches)
        steps = self.schedule.steps_per_epoch * config.epochs
        self.schedulers: Any = [self.job.scheduler(optimizer, steps) for optimizer in self.optimizers]
        self.anchors = [p.detach().clone() for p in first.parameters()]
        self.momenta = [torch.zeros_like(anchor) for anchor in self.anchors]

    def train(self) -> dict[str, np.ndarray[Any, Any]]:
        """The weights at the end, which all replicas share."""
        position, alone = Position(), 0
        parallel = self.config.parallel
        for epoch in range(self.config.epochs):
            batches = [self._batches(epoch, rank) for rank in range(self.size)]
            while position.epoch == epoch:
                window = self.schedule.window_at(position)
                summed = position.step < parallel.local_after_steps
                position = self.schedule.after(position)
                for rank in range(self.size):
                    self._backward(rank, batches[rank], window, summed)
                if summed:
                    self._sum_gradients()
                for model, optimizer, scheduler in zip(self.models, self.optimizers, self.schedulers, strict=True):
                    if self.config.clip_grad_norm is not None:
                        nn.utils.clip_grad_norm_(model.parameters(), self.config.clip_grad_norm)
                    optimizer.step()
                    scheduler.step()
                alone += not summed
                if summed:
                    self.anchors = [p.detach().clone() for p in self.models[0].parameters()]
                elif alone == parallel.local_steps or position.epoch > epoch:
                    self._synchronise()
                    alone = 0
        return {name: value.detach().numpy() for name, value in self.models[0].state_dict().items()}

    def _batches(self, epoch: int, rank: int) -> Iterable[Tensor]:
        return load_batches(
            self.dataset,
            seed=self.config.seed,
            epoch=epoch,
            offset=0,
            batch_size=self.config.batch_size,
            workers=0,
            rank=rank,
            world_size=self.size,
        )

    def _backward(self, rank: int, batches: Any, window: int, summed: bool) -> None:
        """The mean over this replica's samples, or, of summed gradients, its part of the mean over all."""
        self.models[rank].zero_grad()
        counts, left = [], window
        while left:
            counts.append(min(left, self.config.batch_size))
            left -= counts[-1]
        own = [share(count, rank, self.size) for count in counts]
        total = window if summed else max(sum(own), 1)
        for count in own:
            (self.job.loss(self.models[rank], next(batches)) * (count / total)).backward()  # type: ignore[no-untyped-call]

    def _sum_gradients(self) -> None:
        for same in zip(*(model.parameters() for model in self.models), strict=True):
            total = sum(p.grad for p in same if p.grad is not None)
            for parameter in same:
                parameter.grad = total.clone()

    @torch.no_grad()
    def _synchronise(self) -> None:
        update: Callable[[Tensor, int], Tensor] = self._outer_step
        if self.config.parallel.outer == "average":
            update = lambda mean, place: mean  # noqa: E731
        for place, same in enumerate(zip(*(model.parameters() for model in self.models), strict=True)):
            value = update(torch.stack([p.detach() for p in same]).mean(0), place)
            for parameter in same:
                parameter.copy_(value)

    def _outer_step(self, mean: Tensor, place: int) -> Tensor:
        """DiLoCo's: Nesterov momentum as torch's SGD has it."""
        lr, decay = self.config.parallel.outer_lr, self.config.parallel.outer_momentum
        change = self.anchors[place] - mean
        self.momenta[place] = decay * self.momenta[place] + change
        self.anchors[place] = self.anchors[place] - lr * (change + decay * self.momenta[place])
        return self.anchors[place]
