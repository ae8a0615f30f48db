"""What only some ranks hold becomes one ordinary state, and each rank is given its own of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.support.ranks import Sharded, together
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Layout, Position
from training.checkpoint.ranks.exchange import MemoryBoard
from training.checkpoint.ranks.merge import merge
from training.checkpoint.restore import restore_newest
from training.checkpoint.state.boxes import NOTHING, Wanted
from training.checkpoint.state.parts import box_like
from training.checkpoint.state.pooled import Pooled
from training.checkpoint.state.snapshot import chosen_frames
from training.checkpoint.state.tree import PerRank, flatten
from training.checkpoint.store import MemoryStore, Store
from training.errors import Invalid

NAMES = ("embed", "a.weight", "a.bias", "b.weight", "b.bias", "head")
STAGES = (("embed", "a.weight", "a.bias"), ("b.weight", "b.bias", "head"))


def tensor(name: str, step: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(1000 * step + NAMES.index(name))
    return torch.randn((9,) if name.endswith("bias") else (90, 60), generator=drawn)


def whole(step: int) -> dict[str, Any]:
    """What one process would hold."""
    return {
        "model": {name: tensor(name, step) for name in NAMES},
        "optimizer": {
            "state": {name: {"moment": tensor(name, step) / 2, "step": step} for name in NAMES},
            "groups": [{"lr": 0.1 / step, "params": [name for name in NAMES if not name.endswith("bias")]}],
        },
    }


class Cut:
    """Ranks in threads, `at_one_stage` of which hold the same; what is large is sharded among those, or not."""

    def __init__(self, store: Store, at_one_stage: int = 2, *, sharded: bool = False, stages: int = 2) -> None:
        self.width, self.sharded, self.size = at_one_stage, sharded, stages * at_one_stage
        self.ranks = [
            IncrementalCheckpointer(
                store,
                run="r",
                group=exchange,
                split=("model", "optimizer/state"),
                holders_of=self.holders,
                deltas_per_base=9,
            )
            for exchange in MemoryBoard(self.size).ranks()
        ]

    def names(self, rank: int) -> tuple[str, ...]:
        return STAGES[rank // self.width] if self.size > self.width else NAMES

    def holders(self, key: str) -> range:
        name = key.split("/")[2 if key.startswith("optimizer") else 1] if "/" in key else ""
        for rank in range(0, self.size, self.width):
            if name in self.names(rank):
                return range(rank, rank + self.width)
        return range(self.size)

    def state(self, rank: int, step: int) -> dict[str, Any]:
        state, mine = whole(step), self.names(rank)

        def held(value: Any) -> Any:
            if self.sharded and isinstance(value, torch.Tensor) and value.dim() == 2:
                return Sharded.of(value, (self.width, 1), (rank % self.width, 0))
            return {k: held(v) for k, v in value.items()} if isinstance(value, dict) else value

        model = {name: held(state["model"][name]) for name in reversed(mine)}  # the order of the whole counts
        moments = {name: held(state["optimizer"]["state"][name]) for name in mine}
        (group,) = state["optimizer"]["groups"]
        params = [name for name in mine if name in group["params"]]
        return {
            "model": Pooled(model, NAMES),
            "optimizer": {"state": Pooled(moments, NAMES), "groups": [{**group, "params": Pooled(params, NAMES)}]},
            "own": PerRank(rank),
        }

    def restore(self) -> list[Any]:
        return together([partial(r.restore, self.state(rank, 1)) for rank, r in enumerate(self.ranks)])

    def save(self, step: int) -> list[Any]:
        def save(rank: int) -> Any:
            self.ranks[rank].save(self.state(rank, step), position=Position(step=step))
            return self.ranks[rank].wait()

        return together([partial(save, rank) for rank in range(self.size)])

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def is_whole(found: Any, step: int) -> None:
    """As one process would have saved it, in its order."""
    expected = whole(step)
    assert list(found["model"]) == list(NAMES)
    assert all(torch.equal(found["model"][name], value) for name, value in expected["model"].items())
    assert list(found["optimizer"]["state"]) == list(NAMES)
    for name, values in expected["optimizer"]["state"].items():
        assert torch.equal(found["optimizer"]["state"][name]["moment"], values["moment"])
        assert found["optimizer"]["state"][name]["step"] == step
    assert found["optimizer"]["groups"] == expected["optimizer"]["groups"]


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, Sharded) else value


def is_part(found: Any, cut: Cut, rank: int, step: int) -> None:
    """What that rank holds, and nothing else."""
    live = cut.state(rank, step)
    assert sorted(found["model"]) == sorted(live["model"].value)
    assert all(torch.equal(found["model"][name], local(value)) for name, value in live["model"].value.items())
    moments = found["optimizer"]["state"]
    assert sorted(moments) == sorted(cut.names(rank))
    for name, values in live["optimizer"]["state"].value.items():
        assert torch.equal(moments[name]["moment"], local(values["moment"]))
        assert moments[name]["step"] == step


@pytest.mark.parametrize(("width", "sharded"), [(1, False), (2, False), (3, True)])
def test_a_checkpoint_of_stages_is_the_state_of_one_process(width: int, sharded: bool) -> None:
    store = MemoryStore()
    cut = Cut(store, width, sharded=sharded)
    assert cut.restore() == [None] * cut.size
    for step in (1, 2):
        assert len({committed.ref for committed in cut.save(step)}) == 1
    cut.close()
    is_whole(restore_newest(store, "r"), 2)
    assert '"p"' not in read_lineage(store).chain[0].manifest.model_dump_json(), "a reader knows no new node"
    again = Cut(store, width, sharded=sharded)
    for rank, found in enumerate(again.restore()):
        is_part(found, again, rank, 2)
    again.save(2)
    again.close()
    last = read_lineage(store).chain[-1].manifest
    assert last.chunks == (), "each rank had what its deltas are taken against"
    assert last.layout is None, "the structure is the same"


@pytest.mark.parametrize("after", [{"at_one_stage": 1}, {"at_one_stage": 3, "sharded": True}, {"stages": 1}])
def test_a_state_moves_to_other_stages_and_back(after: dict[str, Any]) -> None:
    store = MemoryStore()
    cut = Cut(store, 2)
    cut.save(1)
    cut.close()
    moved = Cut(store, **after)
    for rank, found in enumerate(moved.restore()):
        is_part(found, moved, rank, 1)
    moved.save(2)
    moved.close()
    is_whole(restore_newest(store, "r"), 2)
    back = Cut(store, 2)
    for rank, found in enumerate(back.restore()):
        is_part(found, back, rank, 2)
    back.close()


def test_ranks_of_a_stage_share_the_writing() -> None:
    store = MemoryStore()
    cut = Cut(store, 2)
    cut.save(1)
    cut.close()
    packs = read_lineage(store).chain[-1].manifest.packs
    assert {pack.rank for pack in packs} == {0, 1, 2, 3}
    total = sum(pack.size_bytes for pack in packs)
    assert max(pack.size_bytes for pack in packs) < 0.5 * total


def test_a_rank_reads_no_frame_of_other_stages() -> None:
    store = MemoryStore()
    cut = Cut(store, 1)
    cut.save(1)
    cut.close()
    layout = read_lineage(store).chain[-1].manifest.layout
    assert layout is not None
    for rank in (0, 1):
        mine = set(chosen_frames(layout, Wanted(rank, box_like(cut.state(rank, 1)))))
        large = {name for name in NAMES if not name.endswith("bias")}
        assert {key.removeprefix("model/") for key in mine if key.startswith("model/")} == large & {*STAGES[rank]}
        assert not any(f"/p{1 - rank:04d}/" in key for key in mine), "nor of their small tensors"


def test_only_what_is_pooled_may_differ() -> None:
    cut = Cut(MemoryStore(), 1)

    def save(rank: int) -> Any:
        state = cut.state(rank, 1)
        cut.ranks[rank].save({**state, "model": state["model"].value})
        return cut.ranks[rank].wait()

    outcomes = together([lambda: save(0), lambda: save(1)])
    assert all(isinstance(outcome, Invalid) for outcome in outcomes)
    assert "model: rank 1 has other keys than rank 0" in str(outcomes[0])
    assert "Pooled" in str(outcomes[0])


def layout_of(rank: int, value: Any) -> Layout:
    flat = flatten({"x": value}, rank)
    return Layout(tree=flat.tree, tensors=())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([Pooled({"a": 1}, "ab"), Pooled({"a": None}, "ab")], "x/a: rank 1 has other kinds than rank 0"),
        ([Pooled({"a": "on"}, "ab"), Pooled({"a": "off"}, "ab")], "x/a: rank 1 has other values than rank 0"),
        ([Pooled({"a": 1}, "ab"), Pooled({"b": 1}, "ba")], "x: rank 1 has other names in this place than rank 0"),
        ([Pooled({"a": 1}, "ab"), Pooled({"a": 1}, "ba")], "x: the ranks do not agree on the order"),
        ([Pooled({"a": 1}, "ab"), {"b": 1}], "x: rank 1 has other kinds than rank 0"),
        ([Pooled({"a": 1}, "ab"), Pooled(["b"], "ab")], "x: rank 1 has other kinds than rank 0"),
    ],
)
def test_ranks_that_do_not_fit_together_are_named(values: list[Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        merge([layout_of(rank, value) for rank, value in enumerate(values)], [1] * len(values))


def test_scalars_find_their_places_whatever_else_a_rank_sends() -> None:
    held = [
        {"first": PerRank(10), "x": Pooled({"a": 1, "c": 3}, "abcd"), "lr": 0.5, "last": PerRank([11, 12])},
        {"first": PerRank(20), "x": Pooled({"c": 3, "b": 2}, "abcd"), "lr": 0.5, "last": PerRank([21, 22])},
        {"first": PerRank(30), "x": Pooled({"d": 4}, "abcd"), "lr": 0.5, "last": PerRank([31, 32])},
    ]
    flats = [flatten(state, rank) for rank, state in enumerate(held)]
    sent = [
        flat.values if rank == 0 else [flat.values[i] for i in flat.own_values] for rank, flat in enumerate(flats)
    ]
    layout = merge([Layout(tree=flat.tree, tensors=()) for flat in flats], [len(values) for values in sent])
    values = [value for of_rank in sent for value in of_rank]
    fields: Any = dict(layout.tree["d"])
    assert [(key, values[node["v"]]) for key, node in fields["x"]["d"]] == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    assert [values[node["v"]] for node in fields["first"]["r"]] == [10, 20, 30]
    assert [[values[v["v"]] for v in node["l"]] for node in fields["last"]["r"]] == [[11, 12], [21, 22], [31, 32]]
    assert values[fields["lr"]["v"]] == 0.5


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"x": Pooled({"c": 1}, "ab")}, "x: 'c' is not among the 2 names"),
        ({"x": Pooled({"a": PerRank(1)}, "ab")}, "x/a: PerRank and Pooled cannot be within one another"),
        ({"x": PerRank(Pooled({"a": 1}, "ab"))}, "PerRank and Pooled cannot be within one another"),
    ],
)
def test_a_mark_in_the_wrong_place_is_refused_by_name(state: Any, named: str) -> None:
    with pytest.raises(Invalid, match=named):
        flatten(state, 0)


def test_nobody_saves_what_is_pooled_without_knowing_who_holds_it() -> None:
    board = MemoryBoard(2)
    (rank, _) = board.ranks()
    with pytest.raises(Invalid, match="nobody knows which ranks hold"):
        IncrementalCheckpointer(MemoryStore(), run="r", group=rank)._buffers.prepare(
            {"x": Pooled({"a": torch.zeros(3)}, "ab")}
        )


def test_without_a_group_it_is_a_plain_dict() -> None:
    store = MemoryStore()
    with IncrementalCheckpointer(store, run="r") as alone:
        alone.save({"x": Pooled({"b": torch.ones(2), "a": 1}, "ab"), "names": Pooled(["b", "a"], "ab")})
    found = restore_newest(store, "r")
    assert found is not None
    assert list(found["x"]) == ["a", "b"]
    assert found["names"] == ["a", "b"]


def test_what_a_rank_needs_follows_from_what_it_has() -> None:
    box = box_like({"model": Pooled({"a/b": torch.ones(2)}, ["a/b", "c"]), "other": torch.ones(2)})
    assert box("model/c") is NOTHING
    assert box("model/c/deeper") is NOTHING
    assert box("model/a~1b") is None
    assert box("other") is None
