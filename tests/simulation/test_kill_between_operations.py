"""A process killed at any of its store operations leaves a store that restores what was acknowledged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.store import Buffer, MemoryStore, ObjectInfo

SAVES = 5


class Killed(BaseException):
    """This process does nothing more."""


class MortalStore:
    """Passes on to a store until the n-th operation; from there every operation dies.

    Args:
        store: where the effects go.
        dies_at: number of the first operation that does not return.
        after_effect: whether that operation still reaches the store.
    """

    def __init__(self, store: MemoryStore, dies_at: int, *, after_effect: bool) -> None:
        self.url = store.url
        self.operations = 0
        self._store, self._dies_at, self._after_effect = store, dies_at, after_effect

    def _run(self, name: str, *arguments: Any) -> Any:
        self.operations += 1
        dying = self.operations >= self._dies_at
        if dying and not (self._after_effect and self.operations == self._dies_at):
            raise Killed
        result = getattr(self._store, name)(*arguments)
        if dying:
            raise Killed
        return result

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        self._run("put", key, parts)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return bool(self._run("put_if_absent", key, data))

    def get(self, key: str) -> bytes:
        return bytes(self._run("get", key))

    def read(self, key: str, offset: int, length: int) -> bytes:
        return bytes(self._run("read", key, offset, length))

    def exists(self, key: str) -> bool:
        return bool(self._run("exists", key))

    def list(self, prefix: str) -> list[ObjectInfo]:
        found: list[ObjectInfo] = self._run("list", prefix)
        return found

    def delete(self, key: str) -> None:
        self._run("delete", key)


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


@pytest.mark.parametrize("after_effect", [False, True])
def test_a_kill_at_any_operation_loses_nothing_that_was_acknowledged(after_effect: bool) -> None:
    counting = MortalStore(MemoryStore(), 10**9, after_effect=False)
    assert attempt(counting) == (0, SAVES)
    assert counting.operations > 30
    for dies_at in range(1, counting.operations + 1):
        store = MemoryStore()
        _, acknowledged = attempt(MortalStore(store, dies_at, after_effect=after_effect))
        start, end = attempt(store)
        assert acknowledged <= start <= acknowledged + 1, f"killed at operation {dies_at}"
        assert end == SAVES


def test_a_second_kill_during_the_recovery_loses_nothing_either() -> None:
    for first in (5, 15, 25, 33):
        for second in range(1, 60, 3):
            store = MemoryStore()
            _, acknowledged = attempt(MortalStore(store, first, after_effect=True))
            _, again = attempt(MortalStore(store, second, after_effect=True))
            start, end = attempt(store)
            assert max(acknowledged, again) <= start, f"killed at operations {first} and {second}"
            assert end == SAVES
