"""Verify finds what is wrong with a store before a restore needs it, and says how bad it is."""

from __future__ import annotations

import pytest

from tests.support.chains import Chains, names
from tests.support.faults import RuledStore, run_script
from training.checkpoint.care.collect import collect
from training.checkpoint.care.compact import compact
from training.checkpoint.care.pins import pin, pin_key
from training.checkpoint.care.verify import Report, verify
from training.checkpoint.manifest import manifest_key, pack_key, rebased_key
from training.checkpoint.store import MemoryStore
from training.checkpoint.token import seal_key


@pytest.fixture
def chains() -> Chains:
    """Two attempts: a base and three deltas; then a delta, a base and two deltas."""
    chains = Chains()
    chains.attempt("bddd")
    chains.attempt("dbdd")
    return chains


def severities(report: Report) -> dict[str, str]:
    return {problem.key: problem.severity for problem in report.problems}


@pytest.mark.parametrize("data", [False, True])
def test_a_whole_store_has_no_problem_and_every_checkpoint_is_intact(chains: Chains, data: bool) -> None:
    report = verify(chains.store, data=data)
    assert report.problems == ()
    assert report.intact
    assert report.head == report.restorable == (2, 7)
    assert [(state.token, state.sequence) for state in report.checkpoints] == sorted(chains.states, reverse=True)
    assert all(state.intact for state in report.checkpoints)
    assert [state.links for state in report.checkpoints] == [3, 2, 1, 5, 4, 3, 2, 1]
    packs = sum(size for key, size in chains.store.list("packs/"))
    assert report.read_bytes == (packs if data else 0)


def test_verifying_changes_nothing_and_reads_no_pack_unless_it_is_asked_to(chains: Chains) -> None:
    writes = ("put", "put_if_absent", "delete", "abort")
    for data in (False, True):
        watched = RuledStore(chains.store)
        verify(watched, data=data)
        asked = {operation for operation, _ in watched.operations}
        assert not asked & set(writes)
        assert ("read" in asked) is data


def test_every_pack_is_read_once_however_long_the_chain(chains: Chains) -> None:
    watched = RuledStore(chains.store)
    verify(watched, data=True)
    read = [key for operation, key in watched.operations if operation == "read"]
    assert sorted(read) == sorted(key for key in chains.listing("packs/"))


def test_a_missing_base_breaks_its_chain_and_the_head_is_safe_if_it_has_another(chains: Chains) -> None:
    chains.store.delete(pack_key(1, 0, 0))
    report = verify(chains.store)
    assert severities(report) == {pack_key(1, 0, 0): "damaged"}
    assert "cannot be restored: 2/4, 1/3, 1/2, 1/1, 1/0" in report.problems[0].what
    assert report.head_is_intact
    assert not report.intact


def test_a_short_pack_below_the_head_is_reported_as_the_heads_and_says_where_a_resume_would_go(
    chains: Chains,
) -> None:
    key = pack_key(2, 5, 0)
    chains.replace(key, chains.store.get(key)[:-1])
    report = verify(chains.store)
    assert severities(report) == {key: "head"}
    assert (report.head, report.restorable) == ((2, 7), (2, 4))
    assert "2/4" in report.problems[0].hint


def test_nothing_intact_at_all_is_said_so(chains: Chains) -> None:
    for key in chains.listing("packs/"):
        chains.store.delete(key)
    report = verify(chains.store)
    assert report.restorable is None
    assert "head" in severities(report).values()


@pytest.mark.parametrize("sequence", [1, 3])
def test_a_flipped_bit_in_a_pack_is_found_with_data_and_only_then(chains: Chains, sequence: int) -> None:
    chains.damage(pack_key(1, sequence, 0))
    assert verify(chains.store).intact
    report = verify(chains.store, data=True)
    assert severities(report)[pack_key(1, sequence, 0)] == "damaged"
    broken = {(state.token, state.sequence) for state in report.checkpoints if not state.intact}
    assert broken <= {*names(1, range(sequence, 4)), (2, 4)}
    restored = {name for name in chains.states if name not in broken}
    assert all(chains.restores(name) for name in restored)
    for name in broken:
        with pytest.raises(Exception, match="checksum"):
            chains.restores(name)


def test_a_damaged_manifest_and_a_manifest_of_another_parent_are_found(chains: Chains) -> None:
    other = Chains()
    other.attempt("bb")
    chains.replace(manifest_key(1, 1), other.store.get(manifest_key(1, 1)))
    chains.damage(manifest_key(2, 6))
    report = verify(chains.store)
    assert severities(report)[manifest_key(2, 6)] == "head"
    broken = [(state.token, state.sequence) for state in report.checkpoints if not state.intact]
    assert set(broken) == {(2, 7), (2, 6), (2, 4), *names(1, range(1, 4))}


def test_a_damaged_seal_claim_marker_or_pin_is_reported(chains: Chains) -> None:
    pin(chains.store, 1, 2)
    keys = [seal_key(2), "tokens/000001.claim.json", "retoma.json", pin_key(1, 2)]
    for key in keys:
        chains.damage(key)
    found = severities(verify(chains.store))
    assert {key: found[key] for key in keys} == {**dict.fromkeys(keys[:3], "damaged"), keys[3]: "garbage"}


def test_a_pin_to_nothing_is_reported(chains: Chains) -> None:
    pin(chains.store, 1, 3)
    chains.replace(pin_key(1, 9), chains.store.get(pin_key(1, 3)))
    report = verify(chains.store)
    assert {p.what for p in report.problems if p.key == pin_key(1, 9)} >= {"it pins a checkpoint that is not there"}
    assert any(state.pinned for state in report.checkpoints)


def test_void_manifests_and_orphans_are_garbage_and_a_save_in_flight_is_not(chains: Chains) -> None:
    late = chains.store.get(manifest_key(1, 3))
    chains.store.put(manifest_key(1, 9), [late])  # a sleeper of token 1, long over
    chains.store.put(pack_key(1, 9, 0), [b"x"])
    chains.store.put(pack_key(2, 3, 0), [b"x"])  # a save of token 2 that failed before its first commit
    chains.store.put(pack_key(2, 8, 0), [b"x"])  # being written
    chains.store.put("rebased/000001/00000002-ab-00.pack", [b"x"])
    chains.store.put("notes.txt", [b"somebody's"])
    report = verify(chains.store)
    assert set(severities(report).values()) == {"garbage"}
    assert set(severities(report)) == {
        manifest_key(1, 9),
        pack_key(1, 9, 0),
        pack_key(2, 3, 0),
        "rebased/000001/00000002-ab-00.pack",
    }
    assert report.in_flight == 1
    assert report.intact


def test_a_rebased_form_counts_and_its_damage_is_found_by_lists_or_by_data(chains: Chains) -> None:
    compact(chains.store, 1, 3)
    report = verify(chains.store, data=True)
    assert report.problems == ()
    assert {(s.token, s.sequence): s.links for s in report.checkpoints if s.rebased} == {(1, 3): 1}
    (key,) = (key for key in chains.listing("rebased/") if key.endswith(".pack"))
    whole = chains.store.get(key)
    chains.damage(key)
    assert verify(chains.store).problems == ()
    report = verify(chains.store, data=True)
    assert severities(report) == {key: "damaged"}
    assert all(state.intact for state in report.checkpoints), "the original chains are there"
    chains.replace(key, whole[1:])
    assert severities(verify(chains.store)) == {key: "damaged"}
    chains.damage(rebased_key(1, 3))
    assert severities(verify(chains.store))[rebased_key(1, 3)] == "damaged"


def test_a_store_is_whole_after_a_collection_through_a_rebased_form(chains: Chains) -> None:
    compact(chains.store, 2, 7)
    chains.attempt("d")
    chains.grow_old()
    collect(chains.store, keep=1)
    collect(chains.store, keep=1)
    report = verify(chains.store, data=True)
    assert report.problems == ()
    assert [(state.token, state.sequence) for state in report.checkpoints] == [(3, 8), (2, 7)]


def test_copies_in_half_precision_are_held_against_their_source_at_every_checkpoint() -> None:
    """Frames of 4 MiB: a copy's frame is made of two of its source."""
    script = """
import torch
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store import MemoryStore
from training.checkpoint.care.verify import verify
from training.checkpoint.care import states
store = MemoryStore()
with IncrementalCheckpointer(store, deltas_per_base=100) as checkpointer:
    weight = torch.randn(2_500_000)
    for step in range(3):
        weight[step * 1_200_000] += 1
        checkpointer.save({"copy": weight.bfloat16(), "weight": weight})
report = verify(store, data=True, threads=2)
assert report.intact and not report.problems, report.problems
compared = []
real = states._Unit._compare
def compare(self, frame, data, chunk, place):
    compared.append((chunk, frame.number))
    if (chunk, frame.number) == ("copy", 1):
        frame = frame._replace(digest=frame.digest[::-1])
    return real(self, frame, data, chunk, place)
states._Unit._compare = compare
report = verify(store, data=True)
assert [state.intact for state in report.checkpoints] == [False, False, False], report
assert ("copy", 0) in compared and ("copy", 1) in compared
"""
    run_script(script)


def test_an_empty_store_is_whole() -> None:
    report = verify(MemoryStore(), data=True)
    assert report.intact
    assert (report.run, report.head, report.checkpoints) == (None, None, ())


def test_verify_needs_no_torch() -> None:
    run_script(
        "import sys; from training.checkpoint.care import collect, compact, pins, verify;"
        " assert 'torch' not in sys.modules"
    )
