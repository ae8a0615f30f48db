"""Collection removes what nobody can need, and nothing else, whoever is at work meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.support.chains import NEVER, Chains, names
from tests.support.faults import RuledStore
from training.checkpoint.care.collect import CollectionReport, collect
from training.checkpoint.care.compact import compact
from training.checkpoint.care.retention import choose
from training.checkpoint.care.verify import verify
from training.checkpoint.collected import collected_key, read_collected
from training.checkpoint.history import candidates, read_committed, read_lineage
from training.checkpoint.manifest import manifest_key, pack_key
from training.checkpoint.restore import restore_newest
from training.checkpoint.store import LocalStore, MemoryStore, Store, Unfinished
from training.checkpoint.token import Seal, claim, seal, seal_key
from training.errors import Corrupt, Invalid, Unavailable

Name = tuple[int, int]


@pytest.fixture
def chains() -> Chains:
    """Sequences 0 to 7 of one token: three bases, the head a delta."""
    chains = Chains()
    chains.attempt("bddbddbd")
    chains.grow_old()
    return chains


def counts(report: CollectionReport) -> dict[str, int]:
    return {deleted.kind: deleted.objects for deleted in report.deleted if deleted.objects}


@pytest.mark.parametrize(("keep", "left"), [(1, 6), (2, 3), (3, 0), (9, 0)])
def test_the_newest_bases_and_all_that_is_newer_stay(chains: Chains, keep: int, left: int) -> None:
    before = sum(size for _, size in chains.store.list(""))
    report = collect(chains.store, keep=keep)
    assert chains.restorable() == names(1, range(left, 8))
    assert list(candidates(chains.store)) == names(1, range(7, left - 1, -1))
    assert report.collected == tuple(names(1, range(left - 1, -1, -1)))
    documents = sum(size for _, size in chains.store.list("collected/"))
    assert report.freed_bytes == before - sum(size for _, size in chains.store.list("")) + documents
    assert chains.restores((1, 7))


def test_a_second_collection_finds_nothing_and_writes_nothing(chains: Chains) -> None:
    collect(chains.store, keep=1)
    keys = chains.listing()
    assert counts(collect(chains.store, keep=1)) == {}
    assert chains.listing() == keys


def test_a_dry_run_tells_the_same_and_does_nothing(chains: Chains) -> None:
    watched = RuledStore(chains.store)
    told = collect(watched, keep=1, dry_run=True)
    assert not {operation for operation, _ in watched.operations} & {"put", "put_if_absent", "delete", "abort"}
    done = collect(chains.store, keep=1)
    assert (told.deleted, told.collected, told.kept) == (done.deleted, done.collected, done.kept)
    assert counts(told) == {"manifests": 6, "packs": 6}


def test_nothing_within_the_grace_period_goes_nor_anything_that_it_needs(chains: Chains) -> None:
    chains.attempt("dbdb")  # young; the first of them stands on 6, 7
    report = collect(chains.store, keep=1, grace_seconds=100)
    assert chains.restorable() == [*names(1, (6, 7)), *names(2, range(8, 12))]
    assert report.freed_bytes > 0
    assert counts(collect(chains.store, keep=1, grace_seconds=NEVER)) == {}


def test_a_clock_that_is_wrong_by_anything_removes_nothing_that_is_needed(chains: Chains) -> None:
    for now in (-1e9, float("nan"), 1e12):
        chains.clock.now = now
        collect(chains.store, keep=1, grace_seconds=100)
        assert chains.restores((1, 7))
        assert chains.restores((1, 6))


def test_history_and_lineage_say_collected_and_not_lost(chains: Chains) -> None:
    old = read_lineage(chains.store).chain[5]
    collect(chains.store, keep=1)
    lineage = read_lineage(chains.store)
    assert lineage.problems == []
    assert lineage.collected == old.ref
    assert [c.ref.sequence for c in lineage.chain] == [6, 7]
    assert verify(chains.store, data=True).problems == ()


def test_a_run_that_lost_all_that_was_kept_does_not_look_like_a_new_one() -> None:
    chains = Chains()
    chains.attempt("bd")
    chains.attempt("b")
    chains.grow_old()
    collect(chains.store, keep=1, running=False)
    for key in chains.listing("manifests/"):
        chains.store.delete(key)
    with pytest.raises(Corrupt, match="none of the run's checkpoints is intact"):
        restore_newest(chains.store, "r")


def test_the_one_before_the_head_stays_while_an_attempt_may_go_on_from_it(chains: Chains) -> None:
    chains.attempt("b")
    chains.grow_old()
    collect(chains.store, keep=1)
    assert chains.restorable() == [*names(1, (6, 7)), (2, 8)]
    collect(chains.store, keep=1, running=False)
    assert chains.restorable() == [(2, 8)]


def test_what_a_newer_attempt_made_void_goes_and_the_sealed_head_stays() -> None:
    chains = Chains()
    chains.attempt("bd")
    chains.attempt("d")
    late = chains.store.get(manifest_key(1, 1))
    for sequence in (2, 3):  # token 1 did not know yet
        chains.store.put(manifest_key(1, sequence), [late])
        chains.store.put(pack_key(1, sequence, 0), [b"void"])
    chains.grow_old()
    report = collect(chains.store)
    assert report.collected == ((1, 3), (1, 2))
    assert chains.restorable() == [(1, 0), (1, 1), (2, 2)]
    assert not [
        key for key in chains.listing("packs/") if "0000000" in key and key > pack_key(1, 1, 0) and "000001/" in key
    ]


def test_nothing_goes_while_an_attempt_looks_for_its_start(chains: Chains) -> None:
    claim(chains.store, "r", {})
    keys = chains.listing()
    report = collect(chains.store, keep=1)
    assert "has not said yet" in report.reason
    assert (report.collected, report.freed_bytes) == ((), 0)
    assert chains.listing() == keys
    collect(chains.store, keep=1, running=False)  # somebody knows that it has died
    assert chains.restorable() == names(1, (6, 7))


@pytest.mark.parametrize("prefix", ["manifests/", "packs/", "pins/", "collected/"])
def test_an_attempt_that_claims_while_a_collection_looks_around_loses_nothing(chains: Chains, prefix: str) -> None:
    """It may come to any of the checkpoints that were there when it claimed: the newer ones may be damaged."""

    def claim_now(operation: str, key: str) -> None:
        if key.startswith(prefix) and len(chains.listing("tokens/")) == 2:
            claim(chains.store, "r", {})

    report = collect(RuledStore(chains.store, claim_now), keep=1)
    assert report.reason
    assert report.collected == ()
    assert chains.restorable() == names(1, range(8))


def test_an_attempt_that_claims_after_the_look_is_not_offered_what_goes(chains: Chains) -> None:
    offered: list[Name] = []

    def open_now(operation: str, key: str) -> None:
        if operation == "delete" and not offered:
            token = claim(chains.store, "r", {})
            offered.extend(candidates(chains.store, before=token))

    collect(RuledStore(chains.store, open_now), keep=1)
    assert offered == [(1, 7), (1, 6)]


def test_an_attempt_that_started_from_what_was_announced_makes_the_announcement_void(chains: Chains) -> None:
    """It had looked before. The collection saw its claim, deleted nothing, and could not take its word back."""

    def attempt_and_die(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.startswith("collected/"):
            for pack in (pack_key(1, 6, 0), pack_key(1, 3, 0)):
                chains.store.delete(pack)
            claim(chains.store, "r", {})  # token 2, and has already looked: it will start from 2

    report = collect(RuledStore(chains.store, attempt_and_die), keep=1)
    assert report.reason
    assert (1, 2) in read_collected(chains.store).names
    seal(chains.store, Seal(run="r", token=2, head=read_committed(chains.store, 1, 2).ref))
    assert list(candidates(chains.store)) == names(1, (2, 1, 0))
    chains.attempt("d")
    chains.grow_old()
    collect(chains.store, keep=1)
    assert chains.restorable() == [*names(1, (0, 1, 2)), (3, 3)]


def test_a_save_in_flight_keeps_its_packs_and_a_failed_one_does_not(chains: Chains) -> None:
    chains.attempt("")
    failed, flying = pack_key(1, 8, 0), pack_key(2, 8, 0)
    for key in (failed, flying):
        chains.store.put(key, [b"x"])
    chains.grow_old()
    report = collect(chains.store, keep=9)
    assert report.in_flight == 1
    assert counts(report) == {"packs": 1}
    assert chains.listing("packs/000002/") == [flying]
    assert failed not in chains.listing()


def test_a_rebased_form_frees_the_chain_below_it_and_the_originals_own_packs(chains: Chains) -> None:
    chains.attempt("ddd")
    compact(chains.store, 2, 9)
    chains.grow_old()
    collect(chains.store, keep=1)
    assert chains.restorable() == [(2, 9), (2, 10)]
    collect(chains.store, keep=1)
    assert chains.listing("packs/") == [pack_key(2, 10, 0)]
    assert manifest_key(2, 9) in chains.listing()
    assert verify(chains.store, data=True).problems == ()


@pytest.mark.parametrize("what", ["manifest", "pack"])
def test_a_damaged_rebased_form_frees_nothing(chains: Chains, what: str) -> None:
    chains.attempt("ddd")
    compact(chains.store, 2, 9)
    chains.grow_old()
    key = next(key for key in chains.listing("rebased/") if key.endswith(".json") is (what == "manifest"))
    chains.replace(key, chains.store.get(key)[:-1])
    chains.grow_old()
    collect(chains.store, keep=1)
    assert chains.restorable() == [*names(1, (6, 7)), *names(2, (8, 9, 10))]


def test_a_rebased_form_goes_with_its_original_and_unfinished_ones_after_grace(chains: Chains) -> None:
    compact(chains.store, 1, 2)
    orphan = "rebased/000001/00000007-ab-00.pack"
    chains.store.put(orphan, [b"x"])
    collect(chains.store, keep=1)
    assert orphan in chains.listing()
    chains.grow_old()
    collect(chains.store, keep=1)
    assert chains.listing("rebased/") == []
    assert "ab" in read_collected(chains.store).forms


def test_a_compaction_that_finishes_while_its_packs_are_swept_is_not_relied_on(chains: Chains) -> None:
    """Its packs look abandoned to a clock that jumped."""
    chains.attempt("ddd")

    def collect_now(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key.startswith("rebased/"):
            chains.grow_old()
            collect(chains.store, keep=1)

    compact(RuledStore(chains.store, collect_now), 2, 9, nonce=lambda: "ab")
    chains.grow_old()
    collect(chains.store, keep=1)
    assert chains.restorable() == [*names(1, (6, 7)), *names(2, (8, 9, 10))]


def test_a_compaction_that_finished_before_the_second_look_keeps_its_packs(chains: Chains) -> None:
    chains.attempt("ddd")
    held: list[tuple[str, bytes]] = []
    compact(chains.store, 2, 9, nonce=lambda: "ab")
    key = next(key for key in chains.listing("rebased/") if key.endswith(".json"))
    held.append((key, chains.store.get(key)))
    chains.store.delete(key)
    chains.grow_old()

    def finish_now(operation: str, asked: str) -> None:
        if operation == "put_if_absent" and asked.startswith("collected/"):
            chains.store.put(key, [held[0][1]])

    collect(RuledStore(chains.store, finish_now), keep=1)
    assert [k for k in chains.listing("rebased/") if k.endswith(".pack")], "its packs are gone"
    for pack in chains.listing("packs/000001/"):
        chains.store.delete(pack)
    assert chains.restores((2, 9)), "whoever restores may still use it"


def test_two_collections_at_once_agree(chains: Chains) -> None:
    def other(operation: str, key: str) -> None:
        if operation == "put_if_absent" and key == collected_key(1) and not chains.listing("collected/"):
            collect(chains.store, keep=2)

    collect(RuledStore(chains.store, other), keep=1)
    assert chains.restorable() == names(1, (6, 7))
    assert chains.listing("collected/") == [collected_key(1), collected_key(2)]
    assert read_collected(chains.store).names == set(names(1, range(6)))


class Killed(BaseException):
    """The collector does nothing more."""


def test_a_kill_before_any_operation_leaves_a_store_that_restores_and_that_the_next_collection_cleans() -> None:
    def killed_at(number: int) -> tuple[Chains, bool]:
        chains = Chains()
        chains.attempt("bddbdd")
        compact(chains.store, 1, 5)
        chains.attempt("dd")
        chains.grow_old()

        def die(operation: str, key: str) -> None:
            if len(watched.operations) > number:
                raise Killed

        watched = RuledStore(chains.store, die)
        try:
            collect(watched, keep=1)
        except Killed:
            return chains, True
        return chains, False

    number, alive = 0, True
    while alive:
        chains, alive = killed_at(number)
        left = chains.restorable()
        assert {(1, 5), (2, 6), (2, 7)} <= set(left), f"killed at {number}"
        offered = list(candidates(chains.store))
        assert all(name in left for name in offered), f"killed at {number}: {offered} are offered, {left} restore"
        assert verify(chains.store, data=True).intact
        for _ in range(2):
            collect(chains.store, keep=1)
        assert verify(chains.store, data=True).problems == (), f"killed at {number}"
        assert chains.restorable() == [(1, 5), (2, 6), (2, 7)]
        number += 1
    assert number > 25


def test_unfinished_writes_are_aborted_after_grace_only() -> None:
    class Dangling(MemoryStore):
        writes = (Unfinished("a", "packs/000001", 50.0), Unfinished("b", "packs/000001", 5000.0))
        aborted: tuple[Unfinished, ...] = ()

        def unfinished(self) -> list[Unfinished]:
            return list(self.writes)

        def abort(self, unfinished: Unfinished) -> None:
            self.aborted += (unfinished,)

    store = Dangling()
    Chains(store).attempt("b")
    report = collect(store, grace_seconds=1000)
    assert [write.name for write in store.aborted] == ["b"]
    assert counts(report) == {"unfinished writes": 1}


def test_a_real_folder_is_collected_too(tmp_path: object) -> None:
    chains = Chains(LocalStore(str(tmp_path)))
    chains.attempt("bdbdb")
    collect(chains.store, keep=1, grace_seconds=3600)
    assert len(chains.restorable()) == 5
    collect(chains.store, keep=1, grace_seconds=0, running=False)
    assert chains.restorable() == [(1, 4)]
    assert verify(chains.store, data=True).problems == ()


def test_a_damaged_seal_or_announcement_stops_the_collection_and_says_which(chains: Chains) -> None:
    collect(chains.store, keep=2)
    chains.attempt("d")
    chains.grow_old()
    for key in (seal_key(2), collected_key(1)):
        whole = chains.store.get(key)
        chains.damage(key)
        chains.grow_old()
        keys = chains.listing()
        with pytest.raises(Corrupt, match=key.rpartition("/")[2]):
            collect(chains.store, keep=1)
        assert chains.listing() == keys
        assert chains.restores((2, 8))
        chains.replace(key, whole)


def test_a_store_that_stops_answering_loses_nothing_that_is_kept(chains: Chains) -> None:
    watched = RuledStore(chains.store)
    collect(watched, keep=1, dry_run=True)
    for number in range(len(watched.operations)):
        left = [number]

        def fail(operation: str, key: str, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise Unavailable("no answer")

        with pytest.raises(Unavailable):
            collect(RuledStore(chains.store, fail), keep=1)
        assert chains.restorable() == names(1, range(8))


def test_an_alias_keeps_its_checkpoint_and_one_of_nothing_is_ignored(chains: Chains) -> None:
    report = collect(chains.store, keep=1, aliases=[(1, 1), (7, 7)])
    assert chains.restorable() == names(1, (0, 1, 6, 7))
    assert (7, 7) not in {(kept.token, kept.sequence) for kept in report.kept}


def test_an_empty_store_is_left_alone() -> None:
    store: Store = MemoryStore()
    assert collect(store).deleted is not None
    assert store.list("") == []


class Links:
    """Checkpoints 0 .. n of token 1; some are bases, some damaged."""

    def __init__(self, last: int, bases: set[int], damaged: set[int]) -> None:
        self.last, self.bases, self.damaged = last, bases | {0}, damaged

    def parent(self, name: Name) -> Name | None:
        return (1, name[1] - 1) if name[1] else None

    def needs(self, name: Name) -> Iterator[Name]:
        for sequence in range(name[1], -1, -1):
            yield (1, sequence)
            if sequence in self.bases:
                return

    def is_base(self, name: Name) -> bool:
        return name[1] in self.bases

    def is_intact(self, name: Name) -> bool:
        return not {sequence for _, sequence in self.needs(name)} & self.damaged


def test_what_stays_is_closed_and_holds_as_many_intact_bases_as_there_are() -> None:
    rng = random.Random(7)
    for _ in range(500):
        last = rng.randrange(12)
        links = Links(last, set(rng.sample(range(12), 4)), set(rng.sample(range(12), rng.randrange(4))))
        history, keep = names(1, range(last, -1, -1)), rng.randrange(1, 4)
        pins = {(1, rng.randrange(last + 1))}
        kept = choose(links, history, keep=keep, pins=pins, writing=1)
        assert {history[0], *pins, *history[1:2]} <= kept.keys()
        assert all(link in kept for name in kept for link in links.needs(name))
        intact = [name for name in history if links.is_base(name) and links.is_intact(name)]
        assert set(intact[:keep]) <= kept.keys()


def test_keeping_nothing_is_refused(chains: Chains) -> None:
    with pytest.raises(Invalid, match="at least 1"):
        collect(chains.store, keep=0)
