"""The main oracle: a run cut anywhere and resumed in a new process ends bit-identical to the straight run."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.cuts import gpt_config, mnist_config, train_until, write_corpus, write_digits
from training.config import JobConfig

STEPS = {"mnist": 9, "gpt": 6}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("data")
    return {"mnist": write_digits(folder / "mnist"), "gpt": write_corpus(folder / "gpt")}


@pytest.fixture(scope="module")
def straight(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Final state digests of runs that nobody cut, with a save at every step."""
    folder = tmp_path_factory.mktemp("straight")
    digests = {}
    for name, config in (("mnist", mnist_config()), ("gpt", gpt_config())):
        digest = train_until(config, folder / name, data[name])
        assert digest is not None
        digests[name] = digest
    return digests


def small(name: str, loader_workers: int = 0, every_steps: int = 1) -> JobConfig:
    build = {"mnist": mnist_config, "gpt": gpt_config}[name]
    checkpoint = {"every_steps": every_steps, "deltas_per_base": 3, "overlap_copy": name == "mnist"}
    return build(loader_workers=loader_workers, checkpoint=checkpoint)


@pytest.mark.parametrize("loader_workers", [0, 2])
@pytest.mark.parametrize("name", ["mnist", "gpt"])
def test_cut_after_every_committed_step_ends_like_the_straight_run(
    name: str, loader_workers: int, data: dict[str, Path], straight: dict[str, str], tmp_path: Path
) -> None:
    config = small(name, loader_workers)
    for step in range(1, STEPS[name] + 1):
        store = tmp_path / str(step)
        assert train_until(config, store, data[name], die_saved_at=step) is None
        assert train_until(config, store, data[name]) == straight[name], f"cut after step {step}"


@pytest.mark.parametrize("name", ["mnist", "gpt"])
def test_cut_between_saves_repeats_the_lost_steps_bit_for_bit(
    name: str, data: dict[str, Path], straight: dict[str, str], tmp_path: Path
) -> None:
    config = small(name, every_steps=2)
    for step in range(1, STEPS[name] + 1):
        store = tmp_path / str(step)
        assert train_until(config, store, data[name], die_at_step=step) is None
        assert train_until(config, store, data[name]) == straight[name], f"cut at step {step}"


@pytest.mark.parametrize("name", ["mnist", "gpt"])
def test_two_cuts_in_a_row_end_like_the_straight_run(
    name: str, data: dict[str, Path], straight: dict[str, str], tmp_path: Path
) -> None:
    seed = 20261129
    rng = random.Random(seed)
    for trial in range(4):
        first = rng.randint(1, STEPS[name] - 1)
        second = rng.randint(first, STEPS[name])
        store, config = tmp_path / str(trial), small(name, loader_workers=2 * (trial % 2), every_steps=2)
        told = f"seed {seed}, cuts at {first} and {second}"
        assert train_until(config, store, data[name], die_at_step=first) is None, told
        assert train_until(config, store, data[name], die_at_step=second) is None, told
        assert train_until(config, store, data[name]) == straight[name], told


def test_the_number_of_loader_workers_changes_nothing(
    data: dict[str, Path], straight: dict[str, str], tmp_path: Path
) -> None:
    assert train_until(small("mnist", loader_workers=2), tmp_path / "r", data["mnist"]) == straight["mnist"]


def test_another_seed_gives_another_state(data: dict[str, Path], straight: dict[str, str], tmp_path: Path) -> None:
    """The oracle itself can fail."""
    assert train_until(mnist_config(seed=1), tmp_path / "r", data["mnist"]) not in (None, straight["mnist"])
