"""F15: a resumed epoch does not replay the randomness of epoch 0."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from tests.support.cuts import mnist_config, train_until, write_digits
from training.randomness import (
    apply_randomness,
    capture_randomness,
    epoch_order,
    preserved_randomness,
    seed_everything,
    seed_sample,
)


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))]


def test_one_process_for_each_epoch_equals_one_process_for_all(tmp_path: Path) -> None:
    data = write_digits(tmp_path / "mnist")
    config = mnist_config(loader_workers=2)
    straight = train_until(config, tmp_path / "straight", data)
    for stop in (1, 2, 3):
        digest = train_until(config, tmp_path / "pieces", data, stop=stop)
    assert digest == straight is not None


def test_every_generator_goes_on_where_it_was() -> None:
    seed_everything(5)
    draw()  # leaves a spare normal number in numpy's generator
    state = capture_randomness()
    expected = draw() + draw()
    seed_everything(6)
    apply_randomness(state)
    assert draw() + draw() == expected


def test_a_sample_draws_the_same_wherever_and_whenever_it_is_asked_for() -> None:
    drawn = []
    for before in (1, 2):
        seed_everything(before)
        seed_sample(0, 3, 7)
        drawn.append(draw())
    assert drawn[0] == drawn[1]
    for other in ((1, 3, 7), (0, 4, 7), (0, 3, 8)):
        seed_sample(*other)
        assert draw() != drawn[0]


def test_a_sample_leaves_no_trace_in_the_generators_of_the_training() -> None:
    seed_everything(1)
    expected = draw()
    seed_everything(1)
    with preserved_randomness():
        seed_sample(0, 0, 0)
        draw()
    assert draw() == expected


def test_the_order_of_an_epoch_is_a_stable_permutation() -> None:
    """Written down: a checkpoint of today must resume in the same order with the libraries of tomorrow."""
    assert epoch_order(0, 0, 8).tolist() == EXPECTED
    assert sorted(epoch_order(1, 2, 1000).tolist()) == list(range(1000))


EXPECTED = [2, 5, 0, 1, 4, 6, 3, 7]
