"""Pins keep checkpoints, and are refused where nothing can be kept any more."""

from __future__ import annotations

import pytest

from tests.support.chains import Chains
from tests.support.faults import RuledStore
from training.checkpoint.care.collect import collect
from training.checkpoint.care.pins import pin, pinned, read_pin, unpin
from training.checkpoint.manifest import manifest_key, pack_key
from training.errors import Corrupt


@pytest.fixture
def chains() -> Chains:
    chains = Chains()
    chains.attempt("bddbdbd")
    chains.grow_old()
    return chains


def test_a_pinned_checkpoint_and_what_it_needs_stay_until_it_is_unpinned(chains: Chains) -> None:
    pin(chains.store, 1, 1, reason="for the paper", created="2026-01-02")
    assert read_pin(chains.store, 1, 1).reason == "for the paper"
    report = collect(chains.store, keep=1)
    assert {(kept.token, kept.sequence): kept.reason for kept in report.kept}[1, 1] == "pinned"
    assert chains.restorable() == [(1, 0), (1, 1), (1, 5), (1, 6)]
    assert unpin(chains.store, 1, 1)
    assert not unpin(chains.store, 1, 1)
    collect(chains.store, keep=1)
    assert chains.restorable() == [(1, 5), (1, 6)]


def test_pinning_twice_keeps_the_first_reason(chains: Chains) -> None:
    pin(chains.store, 1, 1, reason="first")
    pin(chains.store, 1, 1, reason="second")
    assert pinned(chains.store) == {(1, 1)}
    assert read_pin(chains.store, 1, 1).reason == "first"


@pytest.mark.parametrize("key", [manifest_key(1, 1), pack_key(1, 0, 0)])
def test_what_is_not_whole_is_not_pinned(chains: Chains, key: str) -> None:
    chains.store.delete(key)
    with pytest.raises(Corrupt):
        pin(chains.store, 1, 1)
    assert pinned(chains.store) == set()


def test_a_checkpoint_that_is_collected_while_it_is_pinned_is_refused(chains: Chains) -> None:
    def collect_first(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.startswith("pins/"):
            collect(chains.store, keep=1)

    with pytest.raises(Corrupt, match="being removed"):
        pin(RuledStore(chains.store, collect_first), 1, 1)
    assert pinned(chains.store) == set()


@pytest.mark.parametrize(
    ("operation", "prefix"),
    [("ages", "packs/"), ("put_if_absent", "collected/"), ("exists", "tokens/"), ("list", "pins/"), ("delete", "")],
)
def test_a_pin_that_comes_while_a_collection_is_at_work_either_keeps_or_is_refused(
    chains: Chains, operation: str, prefix: str
) -> None:
    refused: list[bool] = []

    def pin_now(asked: str, key: str) -> None:
        if asked == operation and key.startswith(prefix) and not refused:
            refused.append(False)
            try:
                pin(chains.store, 1, 1)
            except Corrupt:
                refused[0] = True

    collect(RuledStore(chains.store, pin_now), keep=1)
    assert refused
    assert chains.restores((1, 1)) is not refused[0]
    collect(chains.store, keep=1)
    assert chains.restores((1, 1)) is not refused[0]


def test_a_damaged_pin_keeps_its_checkpoint_all_the_same(chains: Chains) -> None:
    pin(chains.store, 1, 1)
    chains.damage("pins/000001-00000001.json")
    with pytest.raises(Corrupt):
        read_pin(chains.store, 1, 1)
    collect(chains.store, keep=1)
    assert chains.restores((1, 1))
