"""A checkpoint of many ranks is one moment of all of them, or none."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.ranks import Sharded, together
from training.checkpoint import IncrementalCheckpointer, pack
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Layout, Position, Tensor
from training.checkpoint.pack import PACK_BYTES
from training.checkpoint.ranks.exchange import MemoryBoard
from training.checkpoint.restore import restore_newest
from training.checkpoint.state.boxes import EVERYTHING, Box, Wanted
from training.checkpoint.state.snapshot import chosen_frames
from training.checkpoint.state.tree import PerRank
from training.checkpoint.store import MemoryStore, Store
from training.errors import Corrupt, Fenced, Invalid, Unavailable

SPLIT = ("model", "optimizer/state")


def wholes(step: int) -> dict[str, torch.Tensor]:
    """The tensors of a training after some steps."""
    drawn = torch.Generator().manual_seed(step)  # not the one that the ranks, which are threads, share
    return {
        "weight": torch.randn(130, 70, generator=drawn),
        "moment": torch.randn(130, 70, generator=drawn).square(),
        "bias": torch.randn(7, generator=drawn),
        "table": torch.randn(9, 1000, generator=drawn),
    }


def state_of(rank: int, size: int, step: int) -> dict[str, Any]:
    """What one rank holds of it: replicas, parts, buffers that differ, and its own generators."""
    whole = wholes(step)
    return {
        "model": {
            "weight": Sharded.of(whole["weight"], (size, 1), (rank, 0)),
            "table": whole["table"].clone(),
            "bias": whole["bias"].clone(),
        },
        "buffers": {"mean": torch.full((5,), float(rank))},
        "optimizer": {
            "state": {"weight": {"exp_avg": Sharded.of(whole["moment"], (size, 1), (rank, 0)), "step": step}},
            "groups": [{"lr": 0.1 / step, "betas": (0.9, 0.999)}],
        },
        "randomness": PerRank({"torch": torch.full((3000,), rank, dtype=torch.uint8), "python": [rank, "mt"]}),
    }


class Group:
    """Ranks in threads, at one store."""

    def __init__(self, store: Store, size: int, board: MemoryBoard | None = None, **options: Any) -> None:
        self.size, self.board = size, board or MemoryBoard(size)
        self.ranks = [
            IncrementalCheckpointer(store, run="r", group=exchange, split=SPLIT, deltas_per_base=9, **options)
            for exchange in self.board.ranks()
        ]

    def restore(self, step: int = 1) -> list[Any]:
        live = [state_of(rank, self.size, step) for rank in range(self.size)]
        return together([partial(rank.restore, state) for rank, state in zip(self.ranks, live, strict=True)])

    def save(self, step: int) -> list[Any]:
        return together([partial(self._save, rank, step) for rank in range(self.size)])

    def _save(self, rank: int, step: int) -> Any:
        self.ranks[rank].save(state_of(rank, self.size, step), position=Position(step=step))
        return self.ranks[rank].wait()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def is_the_state(found: Any, rank: int, size: int, step: int, saved_size: int | None = None) -> None:
    """What one rank restored is what it holds of the training at that step."""
    live = state_of(rank, size, step)
    assert torch.equal(found["model"]["weight"], live["model"]["weight"].to_local())
    assert torch.equal(found["model"]["table"], live["model"]["table"])
    assert torch.equal(found["model"]["bias"], live["model"]["bias"])
    assert torch.equal(found["buffers"]["mean"], torch.zeros(5)), "buffers are rank 0's"
    own = found["optimizer"]["state"]["weight"]
    assert torch.equal(own["exp_avg"], live["optimizer"]["state"]["weight"]["exp_avg"].to_local())
    assert own["step"] == step
    assert found["optimizer"]["groups"] == [{"lr": 0.1 / step, "betas": (0.9, 0.999)}]
    if rank >= (saved_size or size):
        assert found["randomness"] is None
    else:
        assert torch.equal(found["randomness"]["torch"], torch.full((3000,), rank, dtype=torch.uint8))
        assert found["randomness"]["python"] == [rank, "mt"]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_group_saves_and_restores_what_each_rank_holds(size: int) -> None:
    store = MemoryStore()
    group = Group(store, size)
    assert group.restore() == [None] * size
    for step in (1, 2, 3):
        refs = {committed.ref for committed in group.save(step)}
        assert len(refs) == 1, "all ranks have the same checkpoint"
    group.close()
    lineage = read_lineage(store)
    assert [c.manifest.kind for c in lineage.chain] == ["base", "delta", "delta"]
    assert not lineage.problems
    assert {c.manifest.world_size for c in lineage.chain} == {size}
    again = Group(store, size)
    for rank, found in enumerate(again.restore()):
        is_the_state(found, rank, size, 3)
    again.save(4)
    again.close()
    assert read_lineage(store).chain[-1].manifest.kind == "delta", "the chain goes on"


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 3), (3, 1), (1, 3)])
def test_another_world_size_restores_its_own_parts(before: int, after: int) -> None:
    store = MemoryStore()
    group = Group(store, before)
    group.save(1)
    group.save(2)
    group.close()
    again = Group(store, after)
    for rank, found in enumerate(again.restore()):
        is_the_state(found, rank, after, 2, saved_size=before)
    again.save(3)
    again.close()
    for rank, found in enumerate(Group(store, before).restore()):
        is_the_state(found, rank, before, 3, saved_size=after)


def test_without_a_group_the_whole_comes_back() -> None:
    store = MemoryStore()
    group = Group(store, 3)
    group.save(5)
    group.close()
    found = restore_newest(store, "r")
    assert found is not None
    whole = wholes(5)
    assert torch.equal(found["model"]["weight"], whole["weight"])
    assert torch.equal(found["optimizer"]["state"]["weight"]["exp_avg"], whole["moment"])
    assert [own["python"][0] for own in found["randomness"]] == [0, 1, 2]


def test_each_rank_writes_a_part_of_what_all_hold() -> None:
    store = MemoryStore()
    group = Group(store, 4)
    group.save(1)
    group.close()
    packs = read_lineage(store).chain[-1].manifest.packs
    assert {pack.rank for pack in packs} == {0, 1, 2, 3}
    total = sum(pack.size_bytes for pack in packs)
    assert max(pack.size_bytes for pack in packs) < 0.6 * total


@pytest.mark.parametrize("pack_bytes", [20_000, PACK_BYTES])
def test_frames_name_the_right_packs_whatever_each_rank_wrote(
    pack_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pack a rank is usual. Here some write several, and then two of three none at all."""
    monkeypatch.setattr(pack, "PACK_BYTES", pack_bytes)
    store = MemoryStore()
    group = Group(store, 3)
    group.restore()
    group.save(1)
    live = [state_of(rank, 3, 1) for rank in range(3)]
    live[2]["randomness"] = PerRank({"torch": torch.full((3000,), 9, dtype=torch.uint8), "python": [2, "mt"]})
    save = [partial(rank.save, state) for rank, state in zip(group.ranks, live, strict=True)]
    together(save)
    group.close()
    first, second = (committed.manifest for committed in read_lineage(store).chain)
    assert ([one.rank for one in first.packs] == [0, 1, 2]) is (pack_bytes == PACK_BYTES)
    assert [one.rank for one in second.packs] == [2]
    found = Group(store, 3).restore()
    is_the_state(found[0], 0, 3, 1)
    assert torch.equal(found[2]["randomness"]["torch"], torch.full((3000,), 9, dtype=torch.uint8))


def test_an_upload_that_fails_on_one_rank_fails_the_save_on_all_and_the_next_one_is_whole() -> None:
    class Poor(MemoryStore):
        fails = False

        def put(self, key: str, parts: Any) -> None:
            if Poor.fails and "-r0002-" in key:
                raise Unavailable("503 SlowDown", key=key)
            super().put(key, parts)

    store = Poor()
    group = Group(store, 3)
    group.save(1)
    Poor.fails = True
    outcomes = group.save(2)
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
    assert all("SlowDown" in str(outcome) for outcome in outcomes)
    assert "rank 2" in str(outcomes[0])
    Poor.fails = False
    assert len({committed.ref for committed in group.save(3)}) == 1
    group.close()
    again = Group(store, 3)
    for rank, found in enumerate(again.restore()):
        is_the_state(found, rank, 3, 3)
    again.close()


def test_an_error_that_nobody_foresaw_on_one_rank_is_told_to_all_at_once() -> None:
    class Broken(MemoryStore):
        def put(self, key: str, parts: Any) -> None:
            if "-r0001-" in key:
                raise ZeroDivisionError("a mistake of ours")
            super().put(key, parts)

    begun = time.monotonic()
    outcomes = Group(Broken(), 3).save(1)
    assert time.monotonic() - begun < 60, "the others do not wait for their patience to end"
    assert isinstance(outcomes[1], ZeroDivisionError)
    assert all("rank 1: a mistake of ours" in str(outcomes[rank]) for rank in (0, 2))


def test_a_rank_that_dies_in_a_save_fails_it_on_the_others_within_a_moment() -> None:
    board = MemoryBoard(3)

    def dies(rank: int, what: str, key: str) -> None:
        if rank == 1 and what == "post" and key.startswith("save/1/"):
            board.kill(1)
            raise SystemExit

    store = MemoryStore()
    group = Group(store, 3, board)
    group.save(1)
    board.before = dies
    outcomes = group.save(2)
    assert isinstance(outcomes[0], Unavailable)
    assert isinstance(outcomes[2], Unavailable)
    assert "rank 1 is dead" in str(outcomes[0])
    assert "rank 1 is dead" in str(outcomes[2])
    assert [c.manifest.position.step for c in read_lineage(store).chain] == [1]


def test_a_newer_attempt_fences_every_rank() -> None:
    store = MemoryStore()
    group = Group(store, 2)
    group.save(1)
    newer = Group(store, 2)
    newer.restore()
    assert all(isinstance(outcome, Fenced) for outcome in group.save(2))
    assert len({committed.ref for committed in newer.save(2)}) == 1
    newer.close()


def test_damage_that_one_rank_finds_makes_all_fall_back_to_the_same_checkpoint() -> None:
    store = MemoryStore()
    group = Group(store, 3)
    group.save(1)
    group.save(2)
    group.close()
    key = next(key for key, _ in store.list("packs/") if "00000001-r0002" in key)
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.delete(key)
    store.put(key, [bytes(data)])
    again = Group(store, 3)
    for rank, found in enumerate(again.restore()):
        is_the_state(found, rank, 3, 1)
        assert any("checksum" in skipped.reason for skipped in found.skipped)
    again.close()


def test_nothing_intact_is_an_error_on_all_ranks_and_not_a_start_from_zero() -> None:
    store = MemoryStore()
    group = Group(store, 2)
    group.save(1)
    group.close()
    for key, _ in store.list("packs/"):
        store.delete(key)
    assert all(isinstance(outcome, Corrupt) for outcome in Group(store, 2).restore())


def test_ranks_whose_states_have_different_structures_are_named() -> None:
    store = MemoryStore()
    group = Group(store, 2)
    group.restore()

    def save(rank: int) -> Any:
        group.ranks[rank].save({"model": {"weight": torch.zeros(3 + rank)}})
        return group.ranks[rank].wait()

    outcomes = together([lambda: save(0), lambda: save(1)])
    assert all(isinstance(outcome, Invalid) for outcome in outcomes)
    assert "rank 1 has other tensors than rank 0" in str(outcomes[0])
    assert "model/weight" in str(outcomes[1])


def test_a_structure_that_was_refused_is_forgotten_by_all_ranks() -> None:
    store = MemoryStore()
    group = Group(store, 2)
    group.save(1)

    def save(rank: int) -> Any:
        group.ranks[rank].save({"model": torch.zeros(2), f"of rank {rank}": 1})
        return group.ranks[rank].wait()

    assert all(isinstance(outcome, Invalid) for outcome in together([lambda: save(0), lambda: save(1)]))
    assert len({committed.ref for committed in group.save(2)}) == 1
    group.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_that_one_rank_cannot_save_fails_the_save_on_all_at_once(rank: int) -> None:
    store = MemoryStore()
    group = Group(store, 3)

    def save(each: int) -> Any:
        odd = {1, 2} if each == rank else 1
        group.ranks[each].save({**state_of(each, 3, 1), "odd": odd})
        return group.ranks[each].wait()

    begun = time.monotonic()
    outcomes = together([partial(save, each) for each in range(3)])
    assert time.monotonic() - begun < 60, "nobody waits for its patience to end"
    assert all(isinstance(outcome, Invalid) for outcome in outcomes)
    assert all("odd: a builtins.set cannot be saved" in str(outcome) for outcome in outcomes)
    assert all(f"rank {rank}: " in str(outcome) for each, outcome in enumerate(outcomes) if each != rank)
    assert len({committed.ref for committed in group.save(2)}) == 1
    group.close()
    assert [c.manifest.position.step for c in read_lineage(store).chain] == [2]


def test_all_ranks_are_told_alike_whether_there_is_a_checkpoint() -> None:
    store = MemoryStore()
    for step, expected in ((1, False), (2, True)):
        group = Group(store, 2)
        assert together([rank.has_checkpoint for rank in group.ranks]) == [expected] * 2
        assert len({rank.ref for rank in group.save(step)}) == 1
        assert together([rank.has_checkpoint for rank in group.ranks]) == [True] * 2
        group.close()
    assert [c.ref.token for c in read_lineage(store).chain] == [1, 2], "asking and opening claim one token"


def test_a_part_cannot_be_saved_by_one_rank_alone() -> None:
    with pytest.raises(Invalid, match=r"model/weight: a Sharded, sharded over several ranks"):
        IncrementalCheckpointer(MemoryStore()).save(state_of(0, 2, 1))


def test_a_rank_reads_only_the_frames_that_hold_its_part() -> None:
    entry = Tensor(key="w", dtype="float32", shape=(4096, 4096), offsets=(0, 0), chunk="w", start=0)
    layout = Layout(tree={"t": 0}, tensors=(entry,))
    last = Wanted(1, {"w": Box((3072, 0), (1024, 4096))}.get)
    assert chosen_frames(layout, last) == {"w": {12, 13, 14, 15}}, "of 16 frames of 4 MiB the last quarter"
    assert len(chosen_frames(layout, EVERYTHING)["w"]) == 16
