"""Claim, list, seal, pack, commit, check: every interleaving of small attempts, on the real functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.interleave import Attempt, State, explore
from training.checkpoint.commit import commit
from training.checkpoint.history import candidates, read_committed, read_lineage
from training.checkpoint.manifest import Committed, Manifest, Pack, Ref, encode_manifest
from training.checkpoint.store import Store
from training.checkpoint.token import Seal, check_not_fenced, claim, read_seal, seal, token_numbers

RUN = "r"


def newest(store: Store, before: int | None = None) -> Committed | None:
    for token, sequence in candidates(store, before):
        return read_committed(store, token, sequence, RUN)
    return None


def manifest(token: int, sequence: int, parent: Ref | None) -> Manifest:
    return Manifest(
        run=RUN,
        token=token,
        sequence=sequence,
        kind="delta" if parent else "base",
        parent=parent,
        layout_digest="d",
        values=[],
        chunk_count=0,
        state_digest="s",
        packs=(Pack(size_bytes=1),),
    )


def attempt(name: str, commits: int, commit: Callable[[Store, Manifest], Ref] = commit) -> Attempt:
    """One attempt, as the checkpointer runs it."""

    def run(store: Any, acknowledged: list[Ref]) -> None:
        token = claim(store, RUN, {"name": name})
        head = newest(store, before=token)
        seal(store, Seal(run=RUN, token=token, head=head.ref if head else None))
        ref = head.ref if head else None
        sequence = ref.sequence + 1 if ref else 0
        for number in range(sequence, sequence + commits):
            document = manifest(token, number, ref)
            store.put(document.pack_keys()[0], [b"x"])
            ref = commit(store, document)
            acknowledged.append(ref)

    return run


def commit_without_second_look(store: Store, document: Manifest) -> Ref:
    data, ref = encode_manifest(document)
    check_not_fenced(store, document.token, document.run)
    store.put_if_absent(document.key, data)
    return ref


def attempt_that_lists_before_it_claims(name: str) -> Attempt:
    def run(store: Any, acknowledged: list[Ref]) -> None:
        head = newest(store)
        token = claim(store, RUN, {"name": name})
        seal(store, Seal(run=RUN, token=token, head=head.ref if head else None))
        document = manifest(token, head.ref.sequence + 1 if head else 0, head.ref if head else None)
        acknowledged.append(commit(store, document))

    return run


def check_history(state: State, acknowledged: list[Ref], ended: bool) -> None:
    """What a new attempt would find in this state, which is also what it finds after a kill of everyone."""
    store = state.store()
    history = read_lineage(store)
    assert not history.problems, history.problems
    refs = [committed.ref for committed in history.chain]
    for ref in acknowledged:
        assert ref in refs, f"acknowledged {ref} is lost"
    _, seals = token_numbers(store)
    for token in seals & {ref.token for ref in refs}:  # before a token's own manifests lies exactly its sealed head
        older = [ref for ref in refs if ref.token < token]
        sealed = read_seal(store, token).head
        assert (older[-1] if older else None) == sealed, f"a void manifest entered the history of token {token}"


@pytest.mark.parametrize(
    ("attempts", "commits"),
    [(2, 1), (2, 3), pytest.param(3, 1, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_no_acknowledged_checkpoint_is_lost_and_no_void_one_enters_history(attempts: int, commits: int) -> None:
    states = explore([attempt(str(i), commits) for i in range(attempts)], check_history)
    assert states > 1000, f"{states} states are too few to mean anything"


def test_without_the_second_look_the_checker_finds_a_lost_checkpoint() -> None:
    attempts = [attempt(str(i), 1, commit_without_second_look) for i in range(2)]
    with pytest.raises(AssertionError, match="is lost"):
        explore(attempts, check_history)


def test_listing_before_claiming_loses_a_checkpoint() -> None:
    with pytest.raises(AssertionError, match="is lost"):
        explore([attempt("a", 1), attempt_that_lists_before_it_claims("b")], check_history)


def test_every_run_ends_with_a_store_that_can_be_continued() -> None:
    def check(state: State, acknowledged: list[Ref], ended: bool) -> None:
        if not ended:
            return
        store = state.store()
        token = claim(store, RUN, {"name": "next"})
        head = newest(store, before=token)
        seal(store, Seal(run=RUN, token=token, head=head.ref if head else None))
        ref = commit(store, manifest(token, head.ref.sequence + 1 if head else 0, head.ref if head else None))
        check_history(State(tuple((k, store.get(k)) for k, _ in store.list("")), ()), [*acknowledged, ref], True)

    explore([attempt("a", 1), attempt("b", 1)], check)
