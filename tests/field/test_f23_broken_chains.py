"""F23: a delta is acknowledged on a base that cannot be restored; collection breaks chains."""

from __future__ import annotations

import pytest
import torch

from tests.support.bits import bits
from tests.support.chains import RUN, Chains, state_of
from tests.support.faults import RuledStore
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.care.collect import collect
from training.checkpoint.care.compact import compact, compactable
from training.checkpoint.care.verify import verify
from training.checkpoint.chain import read_chain
from training.checkpoint.manifest import pack_key
from training.checkpoint.restore import restore_newest
from training.checkpoint.store import MemoryStore


def test_a_base_that_was_deleted_is_found_by_verify_before_a_restore_needs_it() -> None:
    chains = Chains()
    chains.attempt("b")
    with IncrementalCheckpointer(chains.store, run=RUN) as checkpointer:
        checkpointer.restore()
        chains.store.delete(pack_key(1, 0, 0))
        checkpointer.save(state_of(2))
        checkpointer.wait()  # it cannot know; its state is whole in memory
        report = verify(chains.store)
        assert not report.head_is_intact
        assert [problem.severity for problem in report.problems] == ["head"]
        assert pack_key(1, 0, 0) in report.problems[0].what
        checkpointer.save(state_of(3), base=True)
    report = verify(chains.store)
    assert report.head_is_intact
    assert {problem.severity for problem in report.problems} == {"damaged"}


def test_a_collection_counts_no_broken_base_and_removes_nothing_in_its_favour() -> None:
    chains = Chains()
    chains.attempt("bdbd")
    chains.store.delete(pack_key(1, 2, 0))
    chains.grow_old()
    collect(chains.store, keep=1)
    assert chains.restorable() == [(1, 0), (1, 1)]
    restored = restore_newest(chains.store, RUN)
    assert restored is not None
    assert bits(dict(restored)) == bits(state_of(2))


def test_after_a_failed_second_attempt_a_collection_keeps_what_the_first_one_saved() -> None:
    chains = Chains()
    chains.attempt("bd")
    failing = RuledStore(chains.store)
    second = IncrementalCheckpointer(failing, run=RUN)
    second.restore()
    # it dies after its packs and before its manifest, as a killed process does
    chains.store.put(pack_key(2, 2, 0), [b"half a save"])
    chains.grow_old()
    report = collect(chains.store, keep=1)
    assert report.collected == ()
    assert report.in_flight == 1
    assert chains.restorable() == [(1, 0), (1, 1)]
    chains.attempt("d")
    chains.grow_old()
    collect(chains.store, keep=1)
    assert pack_key(2, 2, 0) not in chains.listing("packs/")
    assert chains.restorable() == [(1, 0), (1, 1), (3, 2)]
    second.close()


def test_a_collection_between_the_data_and_the_manifest_of_a_save_leaves_its_data() -> None:
    chains = Chains()
    ran: list[int] = []

    def collect_now(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.startswith("manifests/"):
            chains.grow_old()
            ran.append(collect(chains.store, keep=1).in_flight)

    with IncrementalCheckpointer(RuledStore(chains.store, collect_now), run=RUN, deltas_per_base=1) as checkpointer:
        for step in range(6):
            checkpointer.save(state_of(step), position=Position(step=step))
            checkpointer.wait()
            restored = restore_newest(chains.store, RUN)
            assert restored is not None
            assert bits(dict(restored)) == bits(state_of(step))
    assert ran == [1] * 6


@pytest.mark.parametrize("limit", [50])
def test_a_chain_of_1000_deltas_is_bounded_by_compaction(limit: int) -> None:
    """The writer cuts a chain after 256 deltas at most; compaction keeps it shorter, without a base of its own."""
    store = MemoryStore()
    weight = torch.zeros(50)
    longest = compactions = bases = 0
    with IncrementalCheckpointer(store, run=RUN, deltas_per_base=10_000) as checkpointer:
        for step in range(1001):
            weight[step % 50] += 1
            checkpointer.save({"weight": weight, "step": step}, position=Position(step=step))
            committed = checkpointer.wait()
            assert committed is not None
            bases += committed.manifest.kind == "base"
            if step % 10 == 0:
                found = compactable(store, RUN, max_links=limit)
                if found is not None:
                    longest = max(longest, found.links)
                    compactions += compact(store, found.checkpoint.ref.token, found.checkpoint.ref.sequence).written
    assert compactions >= 1000 // (limit + 10) - bases
    assert longest <= limit + 10
    head = checkpointer.head
    assert head is not None
    assert len(read_chain(store, head.ref.token, head.ref.sequence).contents) <= limit + 10
    collect(store, keep=1, grace_seconds=0.0)
    restored = restore_newest(store, RUN)
    assert restored is not None
    assert bits(dict(restored)) == bits({"weight": weight, "step": 1000})
    assert len(store.list("manifests/")) <= limit + 20
    assert verify(store, data=True).intact
