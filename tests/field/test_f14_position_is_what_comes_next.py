"""F14: a checkpoint says what to do next, so no batch is trained twice and none is missed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from training.checkpoint.manifest import Position
from training.data import EpochBatches, Schedule, load_batches

EPOCHS, BATCHES, BATCH_SIZE = 3, 4, 5
SAMPLES = BATCHES * BATCH_SIZE - 2  # the last batch is short


class Indices(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


def batches_from(position: Position, stop: int, schedule: Schedule, cut_after: int | None = None) -> Any:
    """Batches as (epoch, indices), and where they stop."""
    seen: list[Any] = []
    while position.epoch < stop and cut_after != len(seen):
        batches = load_batches(
            Indices(),
            seed=3,
            epoch=position.epoch,
            offset=schedule.offset(position),
            batch_size=BATCH_SIZE,
            workers=0,
        )
        epoch = position.epoch
        while position.epoch == epoch and cut_after != len(seen):
            seen.append((epoch, next(batches).tolist()))
            position = schedule.after(position)
    return seen, position


def test_a_cut_after_any_of_12_batches_repeats_none_and_misses_none() -> None:
    schedule = Schedule(SAMPLES, BATCH_SIZE, accumulate_batches=1)
    straight, end = batches_from(Position(), EPOCHS, schedule)
    assert end == Position(epoch=EPOCHS, step=12, sample=EPOCHS * SAMPLES)
    for epoch in range(EPOCHS):
        indices = sorted(i for e, batch in straight if e == epoch for i in batch)
        assert indices == list(range(SAMPLES))
    for cut in range(1, EPOCHS * BATCHES + 1):
        first, position = batches_from(Position(), EPOCHS, schedule, cut_after=cut)
        rest, _ = batches_from(position, EPOCHS, schedule)
        assert first + rest == straight, f"cut after batch {cut}"


def test_neighbouring_ranges_share_no_batch_and_miss_none() -> None:
    schedule = Schedule(SAMPLES, BATCH_SIZE, accumulate_batches=1)
    straight, _ = batches_from(Position(), EPOCHS, schedule)
    pieces, position = [], Position()
    for stop in (1, 2, 3):
        piece, position = batches_from(position, stop, schedule)
        assert position.epoch == stop
        pieces += piece
    assert pieces == straight


def test_two_epochs_have_different_orders() -> None:
    first, second = (list(EpochBatches(3, epoch, SAMPLES, BATCH_SIZE)) for epoch in (0, 1))
    assert [i for batch in first for _, i in batch] != [i for batch in second for _, i in batch]


def test_ranks_share_an_epoch_without_overlap() -> None:
    whole = [i for batch in EpochBatches(3, 0, SAMPLES, BATCH_SIZE) for _, i in batch]
    ranks = [EpochBatches(3, 0, SAMPLES, BATCH_SIZE, rank=rank, world_size=2) for rank in (0, 1)]
    assert sorted(i for rank in ranks for batch in rank for _, i in batch) == sorted(whole)
