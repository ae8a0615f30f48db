"""F16: half-accumulated gradients are never saved, and the last short window of an epoch is defined."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cuts import mnist_config, train_until, write_digits
from training.checkpoint.manifest import Position
from training.data import Schedule
from training.errors import Invalid
from training.session import train_range
from training.trainer import Trainer

BATCHES, ACCUMULATE, BATCH_SIZE = 10, 4, 6


def test_ten_batches_accumulated_by_four_are_steps_of_four_four_and_two() -> None:
    schedule = Schedule(BATCHES * BATCH_SIZE, BATCH_SIZE, ACCUMULATE)
    position, windows = Position(), []
    while position.epoch == 0:
        windows.append(schedule.window_at(position) // BATCH_SIZE)
        position = schedule.after(position)
    assert windows == [4, 4, 2]
    assert position == Position(epoch=1, step=3, sample=60)


def test_a_cut_in_the_middle_of_a_window_repeats_the_whole_window(tmp_path: Path) -> None:
    """Die with micro-batch 1..10 of an epoch in hand: the state that comes back is always one of a whole step."""
    data, config = write_digits(tmp_path / "mnist"), mnist_config(epochs=1)
    straight = train_until(config, tmp_path / "straight", data)
    for batch in range(1, BATCHES + 1):
        store = tmp_path / str(batch)
        assert train_until(config, store, data, die_at_batch=batch) is None
        assert train_until(config, store, data) == straight, f"cut at micro-batch {batch}"


def test_accumulated_steps_are_steps_on_the_mean_over_all_samples(tmp_path: Path) -> None:
    """One window of 4 micro-batches gives the gradient of one batch of their size, the short one too."""
    data = write_digits(tmp_path / "mnist")
    params = {"channels": 2, "hidden": 8, "dropout": 0.0}
    gradients = []
    for batch_size, accumulate in ((60, 1), (25, 3)):  # 60 = 25 + 25 + 10
        config = mnist_config(batch_size=batch_size, accumulate_batches=accumulate, params=params, epochs=1)
        trainer = Trainer(config, data)
        trainer.model.eval()  # batch normalisation would see other batches
        trainer.optimizer_step(trainer.batches(Position()), 60)
        gradients.append([p.grad.clone() for p in trainer.model.parameters() if p.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"accumulate_batches": 5}, "accumulate_batches was 4, is 5"),
        ({"batch_size": 12}, "batch_size was 6, is 12"),
        ({"seed": 1}, "seed was 0, is 1"),
        ({"precision": "bf16"}, "precision was 'fp32', is 'bf16'"),
    ],
)
def test_resuming_with_another_arithmetic_is_refused_by_name(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    data, store = write_digits(tmp_path / "mnist"), tmp_path / "run"
    train_range(mnist_config(), str(store), "r", data_folder=data, stop=1)
    with pytest.raises(Invalid, match=named):
        train_range(mnist_config(**change), str(store), "r", data_folder=data)
    train_range(mnist_config(), str(store), "r", data_folder=data)  # nothing is lost by the refusal
