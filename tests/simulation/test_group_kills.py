"""Any rank of a group killed at any of its operations, at the store or in the exchange with the others."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch

from tests.support.faults import RuledStore
from tests.support.ranks import Sharded, together
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.history import read_lineage
from training.checkpoint.ranks.exchange import MemoryBoard
from training.checkpoint.state.tree import PerRank
from training.checkpoint.store import MemoryStore, Store
from training.errors import RetomaError

SAVES = 4
PATIENCE_SECONDS = 20.0


class Killed(BaseException):
    """This rank does nothing more."""


class Mortal:
    """A group of ranks, some of which die at their n-th operation; neither that one nor any later one happens.

    Args:
        size: of the group.
        dies_at: rank -> number of its operation.
    """

    def __init__(self, size: int, dies_at: dict[int, int]) -> None:
        self.size, self.dies_at = size, dies_at
        self.counts = [0] * size
        self.board = MemoryBoard(size, self._before)
        self._lock = threading.Lock()

    def store(self, rank: int, inner: Store) -> RuledStore:
        return RuledStore(inner, lambda operation, key: self._before(rank, operation, key))

    def _before(self, rank: int, *_: object) -> None:
        with self._lock:
            self.counts[rank] += 1
            dies = self.counts[rank] >= self.dies_at.get(rank, 10**9)
        if dies:
            self.board.kill(rank)
            raise Killed


def state_at(step: int, rank: int, size: int) -> dict[str, Any]:
    """What one rank holds after some steps; the same whatever the group's size."""
    drawn = torch.Generator().manual_seed(0)
    big = torch.randn(50, 100, generator=drawn) + 0.01 * step
    return {
        "big": Sharded.of(big, (size, 1), (rank, 0)),
        "all": torch.randn(5000, generator=drawn) * step,
        "step": step,
        "own": PerRank([rank, step]),
    }


def is_whole(restored: Any, rank: int, size: int) -> None:
    live, step = state_at(restored["step"], rank, size), restored["step"]
    assert restored.position.step == step
    assert torch.equal(restored["big"], live["big"].to_local())
    assert torch.equal(restored["all"], live["all"])
    assert restored["own"] == [rank, step]


def attempt(store: Store, group: Mortal) -> list[dict[int, Any]]:
    """Resume and save to the end. Returns what each rank had acknowledged, by step; None: where it started."""

    def one(rank: int) -> dict[int, Any]:
        found: dict[int, Any] = {}
        checkpointer = IncrementalCheckpointer(
            group.store(rank, store), run="r", group=group.board.ranks()[rank], split=["all"], deltas_per_base=2
        )
        try:
            with checkpointer:
                restored = checkpointer.restore(state_at(1, rank, group.size))
                if restored is not None:
                    is_whole(restored, rank, group.size)
                    found[restored.position.step] = restored.checkpoint.ref
                for step in range(max(found, default=0) + 1, SAVES + 1):
                    checkpointer.save(state_at(step, rank, group.size), position=Position(step=step))
                    committed = checkpointer.wait()
                    assert committed is not None
                    found[step] = committed.ref
        except (Killed, RetomaError):
            pass
        return found

    done = together([lambda rank=rank: one(rank) for rank in range(group.size)])  # type: ignore[misc]
    for found in done:
        if isinstance(found, BaseException):
            raise found
    return done  # type: ignore[return-value]


def history(store: Store) -> dict[int, Any]:
    lineage = read_lineage(store)
    return {committed.manifest.position.step: committed.ref for committed in lineage.chain}


def check(store: Store, size: int, dies_at: dict[int, int]) -> None:
    killed = attempt(store, Mortal(size, dies_at))
    story = f"killed at {dies_at}"
    seen = history(store)
    for found in killed:
        for step, ref in found.items():
            assert seen.get(step) == ref, f"{story}: step {step} was acknowledged and is not in the history"
    again = attempt(store, Mortal(size, {}))
    for found in again:
        assert max(found) == SAVES, story
        assert min(found) >= max(seen, default=1), f"{story}: started again from before the newest checkpoint"


def operations(size: int) -> list[int]:
    group = Mortal(size, {})
    assert [max(found) for found in attempt(MemoryStore(), group)] == [SAVES] * size
    return group.counts


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_is_killed_at_any_of_its_operations_leaves_what_was_acknowledged(size: int) -> None:
    for rank, count in enumerate(operations(size)):
        assert count > 10
        for dies_at in range(1, count + 1):
            check(MemoryStore(), size, {rank: dies_at})


def test_two_ranks_that_are_killed_leave_what_was_acknowledged() -> None:
    seed = random.randrange(10**6)
    drawn, counts = random.Random(seed), operations(3)
    for _ in range(60):
        one, other = drawn.sample(range(3), 2)
        dies_at = {one: drawn.randint(1, counts[one]), other: drawn.randint(1, counts[other])}
        try:
            check(MemoryStore(), 3, dies_at)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
