"""F9: damage any object of a run in any way; no wrong tensor is ever handed out, and no run restarts from zero.

What must be intact for a checkpoint: the manifests of its chain down to its base, and their packs, of which frames
that a later full frame replaced are not read. Not needed, and so not looked at by a restore that finds its head
intact: claims (they say who, nothing decides by them), seals and checkpoints that are not on the way, and the
marker `retoma.json`, whose loss is reported. `read_lineage` finds damage in all documents. A newest manifest that
was *deleted* looks as if its save had not come to its commit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.bits import bits
from training.checkpoint import IncrementalCheckpointer, RestoredState
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Committed
from training.checkpoint.store import MemoryStore
from training.errors import Corrupt, Invalid

Objects = dict[str, bytes]
Number = tuple[int, int]


@dataclass
class Run:
    """A small real run: its objects, what was saved under each number, and what each checkpoint needs."""

    objects: Objects
    states: dict[Number, Any]
    chain: list[Committed]

    def needs(self, head: Number) -> set[str]:
        manifests = {(c.ref.token, c.ref.sequence): c.manifest for c in self.chain}
        found: set[str] = set()
        at: Number = head
        while True:
            manifest = manifests[at]
            found |= {manifest.key, *manifest.pack_keys()}
            if manifest.kind == "base" or manifest.parent is None:
                return found
            at = (manifest.parent.token, manifest.parent.sequence)

    def newest_without(self, damaged: set[str]) -> Number | None:
        numbers = [(c.ref.token, c.ref.sequence) for c in reversed(self.chain)]
        return next((number for number in numbers if not self.needs(number) & damaged), None)


def build(attempts: int, saves: int, bases: set[Number]) -> Run:
    store = MemoryStore()
    generator = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {
        "weight": torch.randn(5_000, generator=generator),
        "frozen": torch.randn(4_500, generator=generator).bfloat16(),
        "small": {"step": torch.tensor(0.0), "bias": torch.zeros(10)},
        "lr": 0.1,
    }
    states: dict[Number, Any] = {}
    for attempt in range(1, attempts + 1):
        with IncrementalCheckpointer(store, run="small-run") as checkpointer:
            checkpointer.restore()
            for save in range(saves):
                state["weight"] += torch.randn(5_000, generator=generator) * 1e-3
                state["small"]["step"] += 1
                state["lr"] *= 0.9
                checkpointer.save(state, base=(attempt, save) in bases)
                committed = checkpointer.wait()
                assert committed is not None
                states[committed.ref.token, committed.ref.sequence] = bits(state)
    chain = read_lineage(store).chain
    assert len(chain) == len(states)
    return Run(dict(store._objects), states, chain)


TWO_BASES = build(attempts=2, saves=3, bases={(2, 1)})
ONE_BASE = build(attempts=2, saves=2, bases=set())
Fault = tuple[str, set[str], Objects]


def flips(data: bytes) -> Iterator[tuple[str, bytes]]:
    places = {
        0,
        1,
        len(data) // 7,
        len(data) // 3,
        len(data) // 2,
        len(data) * 4 // 5,
        len(data) - 20,
        len(data) - 1,
    }
    for place in sorted(place for place in places if 0 <= place < len(data)):
        for bit in (0, 6):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            yield f"bit {bit} of byte {place}", bytes(changed)


def damages(data: bytes) -> Iterator[tuple[str, bytes | None]]:
    yield from flips(data)
    for length in (0, 1, len(data) // 2, len(data) - 1):
        yield f"cut to {length}", data[:length]
    yield "one byte more", data + b"\n"
    yield "twice", data * 2
    third = len(data) // 3
    yield "two parts swapped", data[third : 2 * third] + data[:third] + data[2 * third :]
    yield "zeros", bytes(len(data))
    yield "deleted", None


def kind_of(key: str) -> str:
    return key.split("/", maxsplit=1)[0] + key.partition(".")[2]


def faults(run: Run, key: str) -> Iterator[Fault]:
    for what, data in damages(run.objects[key]):
        if data == run.objects[key]:
            continue
        objects = dict(run.objects)
        if data is None:
            del objects[key]
        else:
            objects[key] = data
        yield f"{key}: {what}", {key}, objects
    for sibling in run.objects:
        if sibling != key and kind_of(sibling) == kind_of(key):
            copied = {**run.objects, key: run.objects[sibling]}
            yield f"{key}: holds {sibling}", {key}, copied
            if sibling > key:
                swapped = {**copied, sibling: run.objects[key]}
                yield f"{key}: swapped with {sibling}", {key, sibling}, swapped


def opened(objects: Objects) -> tuple[IncrementalCheckpointer, MemoryStore]:
    store = MemoryStore()
    store._objects.update(objects)
    return IncrementalCheckpointer(store), store


def check_fault(run: Run, fault: Fault) -> None:
    what, damaged, objects = fault
    expected = run.newest_without(damaged)
    head = (run.chain[-1].ref.token, run.chain[-1].ref.sequence)
    with opened(objects)[0] as checkpointer:
        restored, error = _restored(checkpointer)
        if error is not None:
            assert expected is None, f"{what}: {expected} is intact"
            assert any(key in error.message for key in damaged), f"{what}: not named in {error}"
            return
        assert restored is not None, f"{what}: started from zero"
        number = (restored.checkpoint.ref.token, restored.checkpoint.ref.sequence)
        assert bits(dict(restored)) == run.states[number], f"{what}: a wrong state"
        assert number >= (expected or head), f"{what}: fell back to {number}, {expected} is intact"
        reasons = {item.key: item.reason for item in restored.skipped}
        told = [reasons[key] for key in damaged if key in reasons]
        deleted_head = what == f"{run.chain[-1].manifest.key}: deleted"
        if number != head and not deleted_head:
            assert told, f"{what}: fell back to {number} without naming the damage: {reasons}"
        if "retoma.json" in damaged:
            assert told, f"{what}: not reported"
        assert number == head or deleted_head or not told or any(_explains(reason) for reason in told), told
        assert set(reasons) <= damaged, f"{what}: also skipped {set(reasons) - damaged}"


def _restored(checkpointer: IncrementalCheckpointer) -> tuple[RestoredState | None, Corrupt | None]:
    try:
        return checkpointer.restore(), None
    except Corrupt as error:
        return None, error


def _explains(reason: str) -> bool:
    return ("expected" in reason and "actual" in reason) or "no object" in reason or "holds the" in reason


@pytest.mark.parametrize("key", sorted(TWO_BASES.objects))
def test_damage_of_one_object_falls_back_to_the_newest_intact_checkpoint_and_says_so(key: str) -> None:
    for fault in faults(TWO_BASES, key):
        check_fault(TWO_BASES, fault)


@pytest.mark.parametrize("key", sorted(ONE_BASE.objects))
def test_damage_where_nothing_intact_is_left_is_an_error_and_never_a_start_from_zero(key: str) -> None:
    for fault in faults(ONE_BASE, key):
        check_fault(ONE_BASE, fault)


def test_the_sweep_meets_every_kind_of_object_and_both_outcomes() -> None:
    assert {kind_of(key) for key in TWO_BASES.objects} == {
        "retoma.jsonjson",
        "tokensclaim.json",
        "tokensseal.json",
        "manifestsjson",
        "packspack",
    }
    assert len(TWO_BASES.objects) == 17
    assert ONE_BASE.newest_without({"packs/000001/00000000-r0000-00.pack"}) is None
    assert TWO_BASES.newest_without({"packs/000002/00000004-r0000-00.pack"}) == (2, 3)


@pytest.mark.parametrize("key", sorted(TWO_BASES.objects))
def test_after_a_fallback_the_run_goes_on_and_later_attempts_agree(key: str) -> None:
    objects = dict(TWO_BASES.objects)
    objects[key] = objects[key][:-2] + b"??"
    checkpointer, store = opened(objects)
    with checkpointer:
        state = dict(checkpointer.restore() or {})
        state["weight"] = state["weight"] + 1
        checkpointer.save(state)
    with IncrementalCheckpointer(store) as later:
        restored = later.restore()
        assert restored is not None
        assert restored.checkpoint.ref.token == 3
        assert bits(dict(restored)) == bits(state)


DOCUMENTS = sorted(key for key in TWO_BASES.objects if key.startswith(("tokens/", "manifests/")))


@pytest.mark.parametrize("key", DOCUMENTS)
def test_a_look_at_the_whole_history_finds_damage_in_every_document(key: str) -> None:
    for what, damaged, objects in faults(TWO_BASES, key):
        if "deleted" in what and (key.startswith("tokens/") or key == TWO_BASES.chain[-1].manifest.key):
            continue
        _, store = opened(objects)
        lineage = read_lineage(store)
        assert damaged & {problem.key for problem in lineage.problems}, what


def test_a_flipped_exponent_bit_of_one_weight_is_named_with_both_digests() -> None:
    key = TWO_BASES.chain[-1].manifest.pack_keys()[0]
    objects = dict(TWO_BASES.objects)
    middle = len(objects[key]) // 2
    objects[key] = objects[key][:middle] + bytes([objects[key][middle] ^ 0x40]) + objects[key][middle + 1 :]
    with opened(objects)[0] as checkpointer:
        restored = checkpointer.restore()
    assert restored is not None
    (skipped,) = restored.skipped
    assert skipped.key == key
    assert "expected checksum" in skipped.reason
    assert "actual" in skipped.reason


def test_a_lost_marker_does_not_rename_the_run() -> None:
    objects = {key: data for key, data in TWO_BASES.objects.items() if key != "retoma.json"}
    checkpointer, store = opened(objects)
    with checkpointer:
        assert checkpointer.run == "small-run"
        assert checkpointer.restore() is not None
    assert store.get("retoma.json") == TWO_BASES.objects["retoma.json"]


@pytest.mark.parametrize("marker", [None, b"rubbish"])
def test_another_run_does_not_get_in_through_a_lost_marker(marker: bytes | None) -> None:
    objects = {key: data for key, data in TWO_BASES.objects.items() if key != "retoma.json"}
    if marker is not None:
        objects["retoma.json"] = marker
    store = MemoryStore()
    store._objects.update(objects)
    with (
        IncrementalCheckpointer(store, run="another") as checkpointer,
        pytest.raises(Invalid, match="holds run 'small-run'"),
    ):
        checkpointer.restore()
    assert store._objects == objects


def test_the_only_manifest_of_a_sealed_head_lost_is_not_a_run_without_checkpoints() -> None:
    run = build(attempts=1, saves=1, bases=set())
    checkpointer, store = opened(run.objects)
    with checkpointer:
        assert checkpointer.restore() is not None  # seals it as token 2, and commits nothing
    store.delete("manifests/000001/00000000.json")
    with (
        IncrementalCheckpointer(store) as later,
        pytest.raises(Corrupt, match="no object manifests/000001/00000000"),
    ):
        later.restore()


def test_a_damaged_seal_of_an_attempt_that_never_committed_stops_nobody() -> None:
    store = MemoryStore()
    with IncrementalCheckpointer(store) as first:
        assert first.restore() is None
    store._objects["tokens/000001.seal.json"] = b"rubbish"
    with IncrementalCheckpointer(store) as second:
        assert second.restore() is None
        second.save({"w": torch.ones(3)})
    with IncrementalCheckpointer(store) as third:
        assert dict(third.restore() or {}).keys() == {"w"}


def test_foreign_files_in_the_store_are_left_alone() -> None:
    checkpointer, _ = opened(
        {
            **TWO_BASES.objects,
            "tokens/000009.claim.json.part": b"",
            "tokens/readme.md": b"",
            "manifests/000002/00000099.json.bak": b"",
            "manifests/000002/copies/00000098.json": b"",
        }
    )
    with checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.skipped == ()
        assert checkpointer.token == 3
