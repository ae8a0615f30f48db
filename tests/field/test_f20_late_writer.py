"""F20: the writer that was declared dead is alive, wakes, and writes."""

from __future__ import annotations

import pytest

from tests.support.bits import bits
from tests.support.chains import RUN, Chains, state_of
from tests.support.faults import Gate, RuledStore
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.care.collect import collect
from training.checkpoint.care.verify import verify
from training.checkpoint.history import candidates
from training.checkpoint.manifest import manifest_key
from training.checkpoint.restore import restore_newest
from training.errors import Fenced


@pytest.mark.parametrize(
    "stops_at",
    [("put", "packs/"), ("exists", "tokens/"), ("put_if_absent", "manifests/")],
    ids=["before its pack", "before it looks", "before its commit"],
)
def test_a_writer_that_wakes_after_its_successor_committed_and_a_collection_ran_is_fenced(
    stops_at: tuple[str, str],
) -> None:
    chains = Chains()
    late = RuledStore(chains.store)
    a = IncrementalCheckpointer(late, run=RUN)
    a.save(state_of(1), position=Position(step=1))
    a.wait()
    a.save(state_of(2), position=Position(step=2), base=True)
    a.wait()
    gate = Gate(*stops_at)
    late.rule = gate
    a.save(state_of(3), position=Position(step=3))  # sequence 2 of token 1
    assert gate.reached.wait(10)
    chains.attempt("bbb")
    chains.grow_old()
    freed = collect(chains.store, keep=1)
    assert (1, 0) in freed.collected
    before = list(candidates(chains.store))
    slots = chains.listing("manifests/")

    gate.opened.set()
    with pytest.raises(Fenced):
        a.wait()
    with pytest.raises(Fenced):  # final for this attempt
        a.save(state_of(4), position=Position(step=4))
    with pytest.raises(Fenced):
        a.close()

    assert list(candidates(chains.store)) == before, "the head has moved"
    restored = restore_newest(chains.store, RUN)
    assert restored is not None
    assert restored.checkpoint.ref.token == 2
    assert bits(dict(restored)) == bits(state_of(restored.position.step))
    if stops_at[0] != "put_if_absent":
        assert chains.listing("manifests/") == slots, "a freed slot was taken"
    chains.grow_old()
    collect(chains.store, keep=1)
    assert chains.listing("manifests/000001/") == []
    assert verify(chains.store, data=True).problems == ()


def test_a_manifest_that_appears_in_a_freed_slot_is_nobodys_checkpoint() -> None:
    chains = Chains()
    chains.attempt("bb")
    slot = manifest_key(1, 0)
    old = chains.store.get(slot)
    chains.attempt("bb")
    chains.grow_old()
    collect(chains.store, keep=1)
    assert slot not in chains.listing("manifests/")
    before = list(candidates(chains.store))
    chains.store.put_if_absent(slot, old)
    assert list(candidates(chains.store)) == before
    assert verify(chains.store).intact
    chains.grow_old()
    assert (1, 0) in collect(chains.store, keep=1).collected
