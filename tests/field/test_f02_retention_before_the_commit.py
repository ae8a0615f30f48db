"""F2: "latest" moves, and old checkpoints are pruned, before the new one is durable."""

from __future__ import annotations

import pytest

from tests.support.bits import bits
from tests.support.chains import RUN, Chains, state_of
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.care.collect import collect
from training.checkpoint.restore import restore_checkpoint, restore_newest
from training.checkpoint.store.faulty import Fault, FaultyStore
from training.errors import Unavailable


@pytest.mark.parametrize("operation", ["put", "put_if_absent"])
def test_with_keep_1_a_save_that_fails_on_its_last_write_takes_neither_the_head_nor_the_one_before(
    operation: str,
) -> None:
    chains = Chains()
    chains.attempt("bb")
    prefix = "packs/" if operation == "put" else "manifests/"
    failing = FaultyStore(chains.store, [Fault("error", operation, prefix, times=None)])
    checkpointer = IncrementalCheckpointer(failing, run=RUN)
    checkpointer.restore()
    checkpointer.save(state_of(3), base=True)
    with pytest.raises(Unavailable):
        checkpointer.close()
    chains.grow_old()
    collect(chains.store, keep=1)
    newest = restore_newest(chains.store, RUN)
    assert newest is not None
    assert newest.checkpoint.ref.sequence == 1
    assert bits(dict(newest)) == bits(state_of(2))


def test_the_head_and_the_one_before_stay_while_the_newest_commit_may_not_be_known_to_its_writer() -> None:
    """The commit arrived, and its answer did not: the attempt goes on from the checkpoint before."""
    chains = Chains()
    lost = [
        Fault("error-after", "put_if_absent", "manifests/000001/00000001"),
        Fault("error", "get", "manifests/000001/00000001"),
    ]
    with IncrementalCheckpointer(FaultyStore(chains.store, lost), run=RUN, max_failed_saves=1) as checkpointer:
        checkpointer.save(state_of(0))
        checkpointer.wait()
        checkpointer.save(state_of(1), base=True)
        checkpointer.settle()
        assert checkpointer.head is not None
        assert checkpointer.head.ref.sequence == 0
        chains.grow_old()
        collect(chains.store, keep=1)
        checkpointer.save(state_of(2))
    head = checkpointer.head
    assert head.manifest.parent is not None
    assert head.manifest.parent.sequence == 0
    assert bits(dict(restore_checkpoint(chains.store, 1, 2, RUN))) == bits(state_of(2))
