"""The two phases of a save of many ranks: what they overlap with, and what a commit waits for all the same."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.ranks import Sharded, together
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.history import read_lineage
from training.checkpoint.ranks.exchange import MemoryBoard
from training.checkpoint.store import MemoryStore
from training.errors import Unavailable

SIZE = 3
MOMENT_SECONDS = 30.0  # what never comes is not waited for longer than this


def state_of(rank: int, step: int) -> dict[str, Any]:
    whole = torch.randn(300, 40, generator=torch.Generator().manual_seed(step))
    return {"weight": Sharded.of(whole, (SIZE, 1), (rank, 0)), "step": step}


class Ranks:
    """A group in threads. `attempts`: of each rank."""

    def __init__(self, store: MemoryStore, board: MemoryBoard | None = None) -> None:
        exchanges = (board or MemoryBoard(SIZE)).ranks()
        self.checkpointers = [IncrementalCheckpointer(store, run="r", group=exchange) for exchange in exchanges]
        assert self.together(lambda rank: self.checkpointers[rank].restore()) == [None] * SIZE
        self.attempts: list[Any] = [checkpointer._attempt for checkpointer in self.checkpointers]

    def together(self, work: Any) -> list[Any]:
        return together([partial(work, rank) for rank in range(SIZE)])

    def save(self, rank: int, step: int = 1) -> Any:
        self.checkpointers[rank].save(state_of(rank, step))
        return self.checkpointers[rank].wait()


@pytest.mark.parametrize("slow", range(SIZE))
def test_a_commit_waits_for_every_pack_and_is_made_ready_while_the_last_one_is_on_its_way(slow: int) -> None:
    ready, order = threading.Event(), []

    class Slow(MemoryStore):
        def put(self, key: str, parts: Any) -> None:
            if f"-r000{slow}-" in key:
                assert ready.wait(MOMENT_SECONDS), "rank 0 puts the parts together only when all packs are stored"
                assert not [name for name, _ in self.list("manifests/")], "no commit without this pack"
            super().put(key, parts)
            order.append("pack")

        def put_if_absent(self, key: str, data: bytes) -> bool:
            done = super().put_if_absent(key, data)
            if key.startswith("manifests/"):
                order.append("manifest")
            return done

    store = Slow()
    group = Ranks(store)
    combine = group.attempts[0]._leader.combine

    def combined(parcels: Any) -> Any:
        found = combine(parcels)
        ready.set()
        return found

    group.attempts[0]._leader.combine = combined
    assert len({committed.ref for committed in group.together(group.save)}) == 1
    assert order == ["pack"] * SIZE + ["manifest"]


@pytest.mark.parametrize("phase", ["part", "stored"])
def test_a_rank_that_dies_between_any_two_messages_fails_the_save_on_the_others(phase: str) -> None:
    def dies(rank: int, what: str, key: str) -> None:
        if rank == 1 and (dead or (what == "post" and key.endswith(phase))):
            dead.append(key)
            board.kill(1)
            raise SystemExit

    dead: list[str] = []
    store, board = MemoryStore(), MemoryBoard(SIZE)
    group = Ranks(store, board)
    board.before = dies
    outcomes = group.together(group.save)
    assert isinstance(outcomes[1], SystemExit)
    for rank in (0, 2):
        assert isinstance(outcomes[rank], Unavailable)
        assert "rank 1 is dead" in str(outcomes[rank])
    assert read_lineage(store).chain == []


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_rank_cannot_store_the_others_know_before_a_slow_one_has_coded(failing: int) -> None:
    class Full(MemoryStore):
        full = True

        def put(self, key: str, parts: Any) -> None:
            if self.full and f"-r000{failing}-" in key:
                raise Unavailable("the disk is full", key=key)
            super().put(key, parts)

    def slow_write(*arguments: Any) -> Any:
        assert others_know.wait(MOMENT_SECONDS), "a failure waits for a rank that is slow"
        return write(*arguments)

    def save(rank: int) -> Any:
        try:
            return group.save(rank)
        finally:
            if rank == 0:
                others_know.set()

    others_know = threading.Event()
    store = Full()
    group = Ranks(store)
    write = group.attempts[2]._write_packs
    group.attempts[2]._write_packs = slow_write
    outcomes = group.together(save)
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
    assert all("the disk is full" in str(outcome) for outcome in outcomes)
    assert f"rank {failing}: " in str(outcomes[2])
    store.full = False
    assert len({committed.ref for committed in group.together(partial(group.save, step=2))}) == 1
    assert len(read_lineage(store).chain) == 1


def test_the_messages_of_past_saves_are_forgotten() -> None:
    board = MemoryBoard(SIZE)
    group = Ranks(MemoryStore(), board)
    for step in range(1, 6):
        group.together(partial(group.save, step=step))
    saves = {key.split("/")[1] for key in board.messages if key.startswith("save/")}
    assert saves == {"4"}, "the last one's may still be asked for"
