"""Thousands of histories of a run, each drawn from a seed; see `tests.support.histories` for what must hold.

A failing one is replayed with SIMULATION_SEED=<seed> pytest tests/simulation/test_histories.py -k replay
"""

from __future__ import annotations

import os

import pytest

from tests.support.histories import World
from tests.support.turns import without_threads


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)


def play(seed: int) -> None:
    try:
        World(seed).run()
    except Exception as error:
        raise AssertionError(f"history {seed}: {error}\n  replay it with SIMULATION_SEED={seed}") from error


@pytest.mark.parametrize("batch", range(4))
def test_histories(batch: int) -> None:
    for seed in range(batch * 250, batch * 250 + 250):
        play(seed)


def test_replay() -> None:
    play(int(os.environ.get("SIMULATION_SEED", "0")))
