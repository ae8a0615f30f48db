"""A process killed at any of its store operations leaves a store that restores what was acknowledged."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.faults import RuledStore
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.store import MemoryStore, Store

SAVES = 5


class Killed(BaseException):
    """This process does nothing more."""


class MortalStore(RuledStore):
    """Passes on to a store until the n-th operation; neither that one nor any later one happens.

    A kill right after an operation is a kill before the next.
    """

    def __init__(self, store: Store, dies_at: int) -> None:
        super().__init__(store, self._die)
        self._dies_at = dies_at

    def _die(self, operation: str, key: str) -> None:
        if len(self.operations) >= self._dies_at:
            raise Killed


def state_at(step: int) -> dict[str, torch.Tensor]:
    """Deterministic: a run that is resumed computes the same states again."""
    generator = torch.Generator().manual_seed(0)
    big = torch.randn(5000, generator=generator)
    return {"big": big + 0.01 * step, "small": torch.tensor(step), "frozen": torch.ones(6000)}


def attempt(store: Any) -> tuple[int, int]:
    """Resume, save until SAVES states are in the store. Returns steps acknowledged at the start and at the end."""
    checkpointer = IncrementalCheckpointer(store, run="r", deltas_per_base=2)
    acknowledged = start = 0
    try:
        restored = checkpointer.restore()
        if restored is not None:
            acknowledged = start = restored.position.step
            for name, value in state_at(start).items():
                assert torch.equal(restored[name], value), f"step {start}: {name} is not what was saved"
        for step in range(start + 1, SAVES + 1):
            checkpointer.save(state_at(step), position=Position(step=step))
            checkpointer.wait()
            acknowledged = step
    except Killed:
        pass
    return start, acknowledged


def test_a_kill_at_any_operation_loses_nothing_that_was_acknowledged() -> None:
    counting = MortalStore(MemoryStore(), 10**9)
    assert attempt(counting) == (0, SAVES)
    assert len(counting.operations) > 30
    for dies_at in range(1, len(counting.operations) + 1):
        store = MemoryStore()
        _, acknowledged = attempt(MortalStore(store, dies_at))
        start, end = attempt(store)
        assert acknowledged <= start <= acknowledged + 1, f"killed at operation {dies_at}"
        assert end == SAVES


def test_a_second_kill_during_the_recovery_loses_nothing_either() -> None:
    for first in (5, 15, 25, 33):
        for second in range(1, 60, 3):
            store = MemoryStore()
            _, acknowledged = attempt(MortalStore(store, first))
            _, again = attempt(MortalStore(store, second))
            start, end = attempt(store)
            assert max(acknowledged, again) <= start, f"killed at operations {first} and {second}"
            assert end == SAVES
