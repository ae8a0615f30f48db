from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.cuts import mnist_config, write_digits
from tests.support.stores import RunBuilder
from training.cadence import Cadence, Failures, best_interval_seconds
from training.checkpoint.history import read_lineage
from training.checkpoint.store import LocalStore, MemoryStore
from training.config import CheckpointConfig, parse_config
from training.errors import Invalid
from training.failures import observe_failures
from training.session import train_range


class Saves:
    busy = False


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_interval_is_the_optimum_of_the_lost_time() -> None:
    save, failure, restore = 0.5, 3600.0, 20.0

    def lost_share(work: float) -> float:
        """Young's model: time for saving, and half an interval and a restore for each failure."""
        return save / work + (work / 2 + save + restore) / (failure + restore)

    best = best_interval_seconds(save, failure, restore) - save
    assert lost_share(best) < min(lost_share(best * 0.8), lost_share(best * 1.25))
    assert best == pytest.approx(math.sqrt(2 * failure * save), rel=0.02)  # Young's first order


def test_more_failures_and_cheaper_saves_mean_shorter_intervals() -> None:
    rare, often = Failures(0, 3600.0), Failures(20, 3600.0)
    assert often.mean_seconds_between < rare.mean_seconds_between / 10
    assert best_interval_seconds(1, often.mean_seconds_between, 5) < best_interval_seconds(
        1, rare.mean_seconds_between, 5
    )
    assert best_interval_seconds(0.01, 3600, 5) < best_interval_seconds(1, 3600, 5)


def test_a_save_that_comes_due_between_synchronisations_is_due_at_the_next() -> None:
    cadence = Cadence(CheckpointConfig(every_steps=5), Saves())
    assert [step for step in range(1, 21) if cadence.due(step, possible=step % 4 == 0)] == [8, 12, 16, 20]


def test_steps_and_seconds_are_obeyed() -> None:
    clock = Clock()
    cadence = Cadence(CheckpointConfig(every_steps=5, every_seconds=30), Saves(), clock=clock)
    assert [step for step in range(1, 16) if cadence.due(step)] == [5, 10, 15]
    clock.now = 31.0
    assert cadence.due(16)
    cadence.saved(0.001)
    assert not cadence.due(17)
    off = Cadence(CheckpointConfig(every_steps=0), Saves(), clock=clock)
    assert not any(off.due(step) for step in range(1, 100))


def test_auto_counts_what_a_save_takes_from_the_steps_beside_it() -> None:
    clock, saves = Clock(), Saves()
    cadence = Cadence(CheckpointConfig(every_steps="auto"), saves, Failures(3, 7200.0), 10.0, clock)
    assert cadence.save_seconds() is None
    assert cadence.interval_seconds() == 10.0
    for _ in range(20):  # steps of 0.1 s alone
        clock.now += 0.1
        cadence.step()
    cadence.saved(0.02)
    saves.busy = True
    for _ in range(10):  # of 0.15 s beside a save
        clock.now += 0.15
        cadence.step()
    assert cadence.save_seconds() == pytest.approx(0.02 + 10 * 0.05, rel=0.01)
    interval = cadence.interval_seconds()
    assert interval == pytest.approx(best_interval_seconds(0.52, (7200 + 21600) / 4, 10.0), rel=0.01)
    told = cadence.explain()
    assert told["failures"] == 3
    assert told["auto_seconds"] == pytest.approx(interval, rel=0.01)
    assert not cadence.due(1)
    clock.now += interval
    assert cadence.due(1)


def test_auto_is_never_shorter_than_it_takes_to_find_a_dead_process() -> None:
    clock = Clock()
    cadence = Cadence(CheckpointConfig(every_steps="auto"), Saves(), Failures(1000, 1.0), 0.0, clock)
    cadence.saved(1e-6)
    assert cadence.interval_seconds() == 10.0


def test_failures_are_told_by_the_store() -> None:
    store = MemoryStore()
    builder = RunBuilder(store)
    for attempt, tries in ((1, 1), (1, 2), (2, 1)):
        builder.attempt(0, 2, **{"attempt": attempt, "try": tries})
    builder.attempt(2, 4, **{"attempt": 1, "try": 1})  # the next range: the one before came to its end
    assert observe_failures(store, 4).count == 2
    assert observe_failures(store, 1).count == 0


def test_a_training_with_auto_saves_at_the_ends_of_epochs_and_says_how_it_chose(tmp_path: Path) -> None:
    digits = write_digits(tmp_path / "digits")
    config = mnist_config(epochs=2, checkpoint={"every_steps": "auto", "restore_seconds": 5})
    train_range(config, str(tmp_path / "store"), "r", data_folder=digits)
    chain = read_lineage(LocalStore(tmp_path / "store")).chain
    assert [c.manifest.position.step for c in chain] == [3, 6]
    assert chain[-1].manifest.decision.interval["auto_seconds"] >= 10
    assert chain[-1].manifest.costs.attempt_seconds > 0


@pytest.mark.parametrize("value", ["sometimes", -1, 1.5])
def test_an_interval_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(Invalid, match="every_steps"):
        parse_config({"job": "a:B", "checkpoint": {"every_steps": value}})
