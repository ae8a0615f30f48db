"""Batches by count: which samples come next follows from a number, not from the state of an iterator."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from training.checkpoint.manifest import Position
from training.guard import die_with_parent
from training.randomness import epoch_order, preserved_randomness, seed_sample

Key = tuple[int, int]  # (epoch, index)

# Forked workers start in 40 ms; a fork server imports torch for each of them, five seconds an epoch. The loop
# lets the background save finish before it forks.
_START_METHOD = "fork" if sys.platform == "linux" else None


class SeededDataset(Dataset[Any]):
    """Looks up (epoch, index) with the randomness of that sample, in whichever process it is asked."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: Key) -> Any:
        """The item, as if it were the only one ever drawn."""
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """A micro-batch of items; the loader prefers this. The generators are put back once, not for each item."""
        with preserved_randomness():
            return [self._draw(epoch, index) for epoch, index in keys]

    def _draw(self, epoch: int, index: int) -> Any:
        seed_sample(self.seed, epoch, index)
        return self.dataset[index]


class EpochBatches(Sampler[list[Key]]):
    """Micro-batches of one epoch from a sample offset on, sliced by rank.

    A micro-batch of the group is `batch_size` consecutive samples of the epoch's order; rank r of n takes every
    n-th of them. So the order and the positions of a run do not depend on its world size. The last one of an epoch
    may be short; a rank for which nothing is left then is given a sample that does not count, see `share`.
    """

    def __init__(
        self,
        seed: int,
        epoch: int,
        samples: int,
        batch_size: int,
        offset: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.epoch = epoch
        self._order = epoch_order(seed, epoch, samples)
        self._step = batch_size
        self._offset, self._rank, self._world_size = offset, rank, world_size

    def __iter__(self) -> Iterator[list[Key]]:
        for at in range(self._offset, len(self._order), self._step):
            batch = self._order[at : at + self._step]
            chosen = batch[self._rank :: self._world_size] if len(batch) > self._rank else batch[:1]
            yield [(self.epoch, int(index)) for index in chosen]

    def __len__(self) -> int:
        return len(range(self._offset, len(self._order), self._step))


def share(count: int, rank: int, world_size: int) -> int:
    """How many of `count` samples of a micro-batch are this rank's."""
    return len(range(rank, count, world_size))


class Schedule:
    """How an epoch of `samples` falls into optimizer steps; all arithmetic on positions lives here."""

    def __init__(self, samples: int, batch_size: int, accumulate_batches: int) -> None:
        self.samples = samples
        self.window_samples = batch_size * accumulate_batches
        self.steps_per_epoch = -(-samples // self.window_samples)

    def offset(self, position: Position) -> int:
        """Samples of the position's epoch that are done."""
        return position.sample - position.epoch * self.samples

    def window_at(self, position: Position) -> int:
        """Samples of the next optimizer step; the last one of an epoch may be short."""
        return min(self.window_samples, self.samples - self.offset(position))

    def after(self, position: Position) -> Position:
        """The position after the next optimizer step."""
        sample = position.sample + self.window_at(position)
        return Position(epoch=sample // self.samples, step=position.step + 1, sample=sample)

    def skip(self, position: Position, steps: int) -> Position:
        """The position so many steps on, as if they had been taken; at most the last step of the epoch.

        One step is left, so that each epoch ends with a step, an evaluation and a checkpoint.
        """
        for _ in range(steps):
            following = self.after(position)
            if following.epoch != position.epoch:
                break
            position = following
        return position


def load_batches(
    dataset: Dataset[Any],
    *,
    seed: int,
    epoch: int,
    offset: int,
    batch_size: int,
    workers: int,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Any]:
    """Collated micro-batches of the rest of an epoch.

    The loader has a generator of its own, so that creating its iterator draws nothing from the training's.
    """
    samples = len(cast("Any", dataset))
    return iter(
        DataLoader(
            SeededDataset(dataset, seed),
            batch_sampler=EpochBatches(seed, epoch, samples, batch_size, offset, rank, world_size),
            num_workers=workers,
            collate_fn=collate,
            pin_memory=pin_memory,
            generator=torch.Generator().manual_seed(0),
            worker_init_fn=partial(_start_worker, os.getpid()) if workers else None,
            multiprocessing_context=_START_METHOD if workers else None,
        )
    )


def to_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a collated batch."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)


def rows(batch: Any, chosen: slice | torch.Tensor) -> Any:
    """Some samples of a collated batch: rows of its tensors."""
    return map_tensors(lambda tensor: tensor[chosen] if tensor.dim() else tensor, batch)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """The batch with each of its tensors changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(change, value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(change, value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(change, value) for value in batch)
    return batch


def _start_worker(parent: int, _: int) -> None:
    die_with_parent(parent)  # torch's own watch takes up to five seconds
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to a whole group: the loop still needs its batches
