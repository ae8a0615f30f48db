"""The rebased form of a checkpoint: the same state by a shorter way, and harmless whatever happens to it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.bits import bits
from tests.support.faults import RuledStore, fail_on, run_script
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint import pack as packs
from training.checkpoint.care.compact import compact, compactable
from training.checkpoint.chain import plan_chunks, read_chain
from training.checkpoint.frames import read_frames
from training.checkpoint.history import candidates
from training.checkpoint.manifest import CAST, rebased_key
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import MemoryStore, Store, open_store
from training.errors import Corrupt, Unavailable

LAST = 5


def state_at(step: int) -> dict[str, Any]:
    """A dense part of two frames and a half, its copy in half precision, what hardly changes, and small things."""
    weight = torch.randn(2_600_000, generator=torch.Generator().manual_seed(1))
    weight += 0.001 * step * torch.randn(2_600_000, generator=torch.Generator().manual_seed(2))
    table = torch.zeros(40_000)
    table[step * 100 : step * 100 + 50] = step
    return {"copy": weight.bfloat16(), "weight": weight, "table": table, "empty": torch.empty(0), "step": step}


def write_chain(store: Store, last: int = LAST, state: Callable[[int], dict[str, Any]] = state_at) -> None:
    with IncrementalCheckpointer(store, run="r", deltas_per_base=1000) as checkpointer:
        for step in range(last + 1):
            checkpointer.save(state(step), position=Position(step=step), meta={"step": step})


@pytest.fixture(scope="module")
def chain() -> MemoryStore:
    """Read-only: six checkpoints, the first one a base."""
    store = MemoryStore()
    write_chain(store)
    return store


@pytest.fixture
def store(chain: MemoryStore) -> MemoryStore:
    """A copy."""
    copy = MemoryStore()
    for key, _ in chain.list(""):
        copy.put(key, [chain.get(key)])
    return copy


def restored(store: Store, sequence: int = LAST) -> Any:
    return bits(dict(restore_checkpoint(store, 1, sequence)))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_rebased_form_is_the_same_state_bit_for_bit_and_restores_without_the_chain(
    store: MemoryStore, threads: int
) -> None:
    original = read_chain(store, 1, LAST).head
    done = compact(store, 1, LAST, threads=threads, created="2026-01-02T03:04:05Z")
    assert (done.written, done.links) == (True, LAST + 1)
    short = read_chain(store, 1, LAST)
    (manifest,) = short.contents
    assert manifest.rebases == original.ref
    for name in ("state_digest", "values", "position", "parent", "job", "data", "meta", "run"):
        assert getattr(manifest, name) == getattr(original.manifest, name), name
    for key, _ in store.list("packs/"):
        store.delete(key)
    assert restored(store) == bits(state_at(LAST))


def test_the_original_manifest_stays_as_it_was_and_the_history_with_it(store: MemoryStore) -> None:
    before = {key: store.get(key) for key, _ in store.list("")}
    history = list(candidates(store))
    compact(store, 1, LAST)
    assert {key: store.get(key) for key in before} == before
    assert list(candidates(store)) == history


def test_a_rounded_copy_is_still_computed_and_costs_nothing(store: MemoryStore) -> None:
    done = compact(store, 1, LAST)
    chunks = {chunk.key: chunk for chunk in read_chain(store, 1, LAST).contents[0].chunks}
    assert chunks["copy"].codec == CAST
    assert all(frame.length == 0 for frame in chunks["copy"].frames)
    assert done.read_bytes_after < 2_600_000 * 4


def test_later_deltas_build_on_the_same_checkpoint_and_restore_through_its_short_form(store: MemoryStore) -> None:
    compact(store, 1, LAST)
    with IncrementalCheckpointer(store, run="r", deltas_per_base=1000) as checkpointer:
        assert bits(dict(checkpointer.restore() or {})) == bits(state_at(LAST))
        checkpointer.save(state_at(LAST + 1))
    assert len(read_chain(store, 2, LAST + 1).contents) == 2
    assert bits(dict(restore_checkpoint(store, 2, LAST + 1))) == bits(state_at(LAST + 1))


def test_compacting_a_base_or_twice_writes_nothing(store: MemoryStore) -> None:
    compact(store, 1, LAST)
    keys = store.list("")
    assert not compact(store, 1, LAST).written
    assert not compact(store, 1, 0).written
    assert store.list("") == keys


def test_a_damaged_chain_is_not_made_into_a_whole_checkpoint(store: MemoryStore) -> None:
    key = next(key for key, _ in store.list("packs/") if "00000003" in key)
    data = bytearray(store.get(key))
    data[len(data) // 2] ^= 1
    store.delete(key)
    store.put(key, [bytes(data)])
    keys = store.list("")
    with pytest.raises(Corrupt, match="checksum"):
        compact(store, 1, LAST)
    assert store.list("") == keys, "packs were left behind"


def test_a_rounded_copy_that_is_not_one_is_found_while_its_source_streams_by(store: MemoryStore) -> None:
    plans = plan_chunks(read_chain(store, 1, LAST))
    read_frames(store, plans)
    last = plans["copy"].sources[-1]
    last[0] = last[0]._replace(frame=last[0].frame._replace(digest="0" * 32))
    with pytest.raises(Corrupt, match="chunk copy frame 1"):
        read_frames(store, plans)


def test_the_loser_of_a_race_deletes_its_own_packs_and_nobody_elses(store: MemoryStore) -> None:
    def winner_first(operation: str, key: str) -> None:
        if (operation, key) == ("put_if_absent", rebased_key(1, LAST)):
            slow.rule = lambda operation, key: None
            assert compact(store, 1, LAST, nonce=lambda: "aaaa").written

    slow = RuledStore(store, winner_first)
    assert not compact(slow, 1, LAST, nonce=lambda: "bbbb").written
    keys = [key for key, _ in store.list("rebased/")]
    assert any("aaaa" in key for key in keys)
    assert not any("bbbb" in key for key in keys)
    assert restored(store) == bits(state_at(LAST))


def test_no_manifest_appears_when_a_pack_cannot_be_written_or_reads_back_otherwise(store: MemoryStore) -> None:
    keys = store.list("")
    for rule in (
        fail_on("put", "rebased/", Unavailable("no answer")),
        fail_on("read", "rebased/", Corrupt("other bytes")),
    ):
        with pytest.raises((Unavailable, Corrupt)):
            compact(RuledStore(store, rule), 1, LAST)
        assert store.list("") == keys


def test_an_unknown_outcome_leaves_the_packs_since_the_manifest_may_still_arrive(store: MemoryStore) -> None:
    with pytest.raises(Unavailable):
        compact(RuledStore(store, fail_on("put_if_absent", "rebased/", Unavailable("no answer"))), 1, LAST)
    left = [key for key, _ in store.list("rebased/")]
    assert left
    assert all(key.endswith(".pack") for key in left)


def test_a_damaged_short_form_is_passed_by(store: MemoryStore) -> None:
    compact(store, 1, LAST)
    key = next(key for key, _ in store.list("rebased/") if key.endswith(".pack"))
    store.delete(key)
    assert restored(store) == bits(state_at(LAST))


def test_only_a_chain_that_is_too_long_or_too_slow_is_compacted(store: MemoryStore) -> None:
    assert compactable(store) is None
    assert compactable(store, max_links=LAST + 1) is None
    found = compactable(store, max_links=LAST)
    assert found is not None
    assert (found.checkpoint.ref.sequence, found.links) == (LAST, LAST + 1)
    slow = compactable(store, restore_seconds=found.restore_seconds / 2)
    assert slow is not None
    assert "are allowed" in slow.reason
    compact(store, 1, LAST)
    assert compactable(store, max_links=2, restore_seconds=found.restore_seconds) is None
    assert compactable(MemoryStore()) is None


def test_an_empty_or_bounded_state_can_be_compacted() -> None:
    empty = MemoryStore()
    write_chain(empty, 2, lambda step: {"step": step})
    assert compact(empty, 1, 2).written
    assert restored(empty, 2) == bits({"step": 2})
    store = MemoryStore()
    with IncrementalCheckpointer(store, bounded="int8", deltas_per_base=1000) as checkpointer:
        for step in range(3):
            torch.manual_seed(0)
            checkpointer.save({"weight": torch.randn(100_000) + 0.001 * step * torch.rand(100_000)})
    before = restored(store, 2)
    bound = max(chunk.bound or 0 for chunk in read_chain(store, 1, 2).contents[0].chunks)
    compact(store, 1, 2)
    assert restored(store, 2) == before
    assert max(chunk.bound or 0 for chunk in read_chain(store, 1, 2).contents[0].chunks) >= bound > 0


def test_memory_does_not_grow_with_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """192 MB of random numbers in one chain; the compactor may take a third of that, in a process of its own."""
    monkeypatch.setattr(packs, "PACK_BYTES", 8 * 1024 * 1024)
    with IncrementalCheckpointer(tmp_path, deltas_per_base=1000) as checkpointer:
        for step in range(2):
            torch.manual_seed(step)
            checkpointer.save({str(n): torch.rand(4_000_000) for n in range(12)})
    script = """
import resource, sys
from training.checkpoint import frames, pack
from training.checkpoint.care.compact import compact
from training.checkpoint.store import open_store
pack.PACK_BYTES = 8 * 1024 * 1024
frames.PIECE_BYTES = 1024 * 1024
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert compact(open_store(sys.argv[1]), 1, 1).written
assert "torch" not in sys.modules
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    grown_bytes = int(run_script(script, tmp_path).stdout)
    assert grown_bytes < 192_000_000 / 3, f"{grown_bytes / 1e6:.0f} MB"
    assert len(read_chain(open_store(tmp_path), 1, 1).contents) == 1


def test_this_file_has_torch_so_that_the_check_above_means_something() -> None:
    assert "torch" in sys.modules
