"""What the wrappers add to a store: retries within a budget, figures, and faults that a seed repeats."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.faults import RuledStore, fail_on
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.manifest import Committed, manifest_key
from training.checkpoint.store import MemoryStore, NoSpace, NotFound, ObjectInfo, Store, Unfinished, put_document
from training.checkpoint.store.faulty import Fault, FaultyStore, Hit
from training.checkpoint.store.metered import LATENCY_LIMITS_SECONDS, MeteredStore
from training.checkpoint.store.retry import FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, RetryingStore
from training.checkpoint.token import mark_run, prove_put_if_absent
from training.errors import Corrupt, Fenced, Invalid, Unavailable

EVERYTHING: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("p/a", [b"x"]),
    "put_if_absent": lambda store: store.put_if_absent("d/a", b"x"),
    "get": lambda store: store.get("there"),
    "read": lambda store: store.read("there", 0, 1),
    "exists": lambda store: store.exists("there"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete("gone"),
    "ages": lambda store: store.ages(""),
    "unfinished": lambda store: store.unfinished(),
    "abort": lambda store: store.abort(Unfinished("id", "key", 0.0)),
}
each_operation = pytest.mark.parametrize("operation", EVERYTHING)


class Clock:
    """Time passes by sleeping, and by nothing else."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, [0.0]

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def retrying(inner: Store, clock: Clock, **options: Any) -> RetryingStore:
    return RetryingStore(inner, sleep=clock.sleep, clock=clock, rng=random.Random(7), **options)


def filled() -> MemoryStore:
    store = MemoryStore()
    store.put_if_absent("there", b"12345678")
    return store


# --- retries


@each_operation
def test_what_is_unavailable_is_asked_again_and_nothing_else_is(operation: str) -> None:
    clock = Clock()
    inner = RuledStore(filled(), fail_on(operation, "", Unavailable("503"), times=4))
    EVERYTHING[operation](retrying(inner, clock))
    assert [asked for asked, _ in inner.operations] == [operation] * 5
    for error in (
        NoSpace("full"),
        Corrupt("c"),
        Fenced("f"),
        Invalid("i"),
        NotFound("n"),
        OSError("o"),
        KeyboardInterrupt(),
    ):
        inner = RuledStore(filled(), fail_on(operation, "", error, times=1))  # type: ignore[arg-type]
        with pytest.raises(type(error)):
            EVERYTHING[operation](retrying(inner, clock))
        assert len(inner.operations) == 1


def test_the_waits_are_random_below_a_limit_that_doubles_and_are_not_the_same_for_two_writers() -> None:
    waits = []
    for seed in (1, 2):
        clock = Clock()
        inner = RuledStore(MemoryStore(), fail_on("exists", "", Unavailable("503"), times=11))
        RetryingStore(inner, 1000, 12, clock.sleep, random.Random(seed), clock).exists("a")
        limits = [min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2**n) for n in range(11)]
        assert all(0 <= wait <= limit for wait, limit in zip(clock.slept[1:], limits, strict=True))
        assert max(clock.slept) > 1
        waits.append(clock.slept)
    assert waits[0] != waits[1]


def test_no_try_begins_after_the_budget_and_the_last_error_says_how_often_it_was_tried() -> None:
    clock = Clock()
    inner = RuledStore(MemoryStore(), fail_on("get", "", Unavailable("503 SlowDown"), times=10**9))
    with pytest.raises(Unavailable, match=r"503 SlowDown \(get tried [0-9]+ times in [0-9.]+ s\)") as caught:
        retrying(inner, clock, budget_seconds=20.0, attempts=1000).get("a")
    assert f"tried {len(inner.operations)} times" in str(caught.value)
    assert 10 < clock.now <= 20
    assert len(inner.operations) > 5


def test_the_number_of_tries_is_bounded_too() -> None:
    inner = RuledStore(MemoryStore(), fail_on("get", "", Unavailable("503"), times=10**9))
    with pytest.raises(Unavailable):
        retrying(inner, Clock(), attempts=3).get("a")
    assert len(inner.operations) == 3


def test_after_a_lost_answer_put_if_absent_claims_nothing_and_the_reader_back_finds_its_own_bytes() -> None:
    lost = FaultyStore(MemoryStore(), [Fault("error-after", "put_if_absent", times=2)])
    store = retrying(lost, Clock())
    assert store.put_if_absent("a", b"ours") is False  # another process may have written equal bytes
    assert store.get("a") == b"ours"
    lost.plan = (Fault("error-after", "put_if_absent", times=4),)
    assert put_document(store, "b", b"ours") is True
    assert put_document(store, "b", b"theirs") is False
    lost.plan = (Fault("error-after", "put", times=6),)
    store.put("c", [b"ours"])
    assert store.get("c") == b"ours"


# --- figures


def test_operations_bytes_errors_and_durations_are_counted() -> None:
    clock = Clock()

    def rule(operation: str, key: str) -> None:
        clock.sleep(0.02 if operation == "get" else 0.5)
        if key == "bad":
            raise Unavailable("503")

    store = MeteredStore(RuledStore(filled(), rule), clock)
    store.put("a", [b"12", b"345"])
    store.put_if_absent("b", b"1")
    for _ in range(3):
        assert store.get("a") == b"12345"
    store.read("there", 0, 4)
    with pytest.raises(NotFound):
        store.get("no")
    with pytest.raises(Unavailable):
        store.put("bad", [b"12345678"])
    figures = store.snapshot()
    got = figures.operations["get"]
    assert (got.count, got.errors, got.received_bytes, got.sent_bytes) == (4, 0, 15, 0)
    assert got.seconds == pytest.approx(0.08)
    assert got.longest_seconds == pytest.approx(0.02)
    assert got.latencies[LATENCY_LIMITS_SECONDS.index(0.03)] == sum(got.latencies) == 4
    put = figures.operations["put"]
    assert (put.count, put.errors, put.sent_bytes) == (2, 1, 5)
    assert (figures.count, figures.errors) == (8, 1)
    assert (figures.sent_bytes, figures.received_bytes) == (6, 19)
    store.list("")
    assert figures.count == 8, "a snapshot does not change"


def test_no_count_is_lost_among_threads() -> None:
    store = MeteredStore(filled())
    with ThreadPoolExecutor(8) as executor:
        list(executor.map(lambda _: store.get("there"), range(4000)))
    assert store.snapshot().operations["get"].count == 4000
    assert store.snapshot().received_bytes == 32000


# --- faults


@each_operation
def test_an_error_comes_as_often_as_planned_and_before_or_after_the_effect(operation: str) -> None:
    store = FaultyStore(filled(), [Fault("error", operation, after=1, times=2)])
    call = EVERYTHING[operation]
    call(store)
    for _ in range(2):
        with pytest.raises(Unavailable, match="drill"):
            call(store)
    call(store)
    assert [hit[:2] for hit in store.hits] == [("error", operation)] * 2


def test_an_error_after_the_effect_has_had_it_and_one_before_has_not() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, [Fault("error", prefix="a"), Fault("error-after", prefix="b", error=Invalid)])
    with pytest.raises(Unavailable):
        store.put_if_absent("a", b"1")
    with pytest.raises(Invalid):
        store.put_if_absent("b", b"2")
    assert inner.list("") == [ObjectInfo("b", 1)]


@pytest.mark.parametrize("kind", ["truncate", "flip"])
def test_bytes_are_damaged_on_the_way_in_and_on_the_way_out(kind: Any) -> None:
    data = random.Random(0).randbytes(1000)
    inner = MemoryStore()
    store = FaultyStore(inner, [Fault(kind, times=None)])
    store.put("a", [data[:500], data[500:]])
    store.put_if_absent("b", data)
    inner.put_if_absent("c", data)
    damaged = [inner.get("a"), inner.get("b"), store.get("c"), store.read("c", 0, 1000)]
    for got in damaged:
        if kind == "truncate":
            assert len(got) < 1000
            assert data.startswith(got)
        else:
            assert sum((x ^ y).bit_count() for x, y in zip(got, data, strict=True)) == 1
    assert len(set(damaged)) > 1
    assert inner.get("c") == data


def test_a_stale_listing_is_the_one_from_before() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, [Fault("stale-list", after=1, times=2)])
    inner.put_if_absent("a", b"1")
    first = store.list("")
    inner.put_if_absent("b", b"1")
    assert store.list("") == store.list("") == first
    assert len(store.list("")) == 2
    unasked = FaultyStore(inner, [Fault("stale-list")])
    assert unasked.list("") == []


def test_a_store_that_ignores_the_condition_overwrites_and_is_found_out() -> None:
    store = FaultyStore(MemoryStore(), [Fault("ignore-condition", times=None)])
    assert store.put_if_absent("a", b"1")
    assert store.put_if_absent("a", b"2")
    assert store.get("a") == b"2"
    mark_run(store, "r")
    with pytest.raises(Invalid, match="does not honour put-if-absent"):
        prove_put_if_absent(store, "r")


def test_the_probe_survives_lost_answers_and_accepts_a_store_that_is_only_slow() -> None:
    plan = [Fault("error-after", "put_if_absent", times=2), Fault("error", times=3), Fault("latency", times=None)]
    store = retrying(FaultyStore(MemoryStore(), plan, sleep=lambda seconds: None), Clock())
    mark_run(store, "r")
    prove_put_if_absent(store, "r")


def test_what_is_mute_goes_on_when_it_is_released_and_fails_at_its_time_limit() -> None:
    store = FaultyStore(MemoryStore(), [Fault("mute", "put_if_absent", times=2, seconds=0.05)])
    started = time.monotonic()
    with pytest.raises(Unavailable, match="no answer"):
        store.put_if_absent("a", b"1")
    assert 0.04 < time.monotonic() - started < 5
    assert not store.exists("a")
    sleeper = FaultyStore(store.inner, [Fault("mute", "put_if_absent", seconds=60)])
    thread = threading.Thread(target=lambda: sleeper.put_if_absent("a", b"2"))
    thread.start()
    assert thread.is_alive()
    assert not store.exists("a")
    sleeper.released.set()
    thread.join(10)
    assert store.get("a") == b"2"


def test_latency_is_what_the_plan_says() -> None:
    clock = Clock()
    store = FaultyStore(filled(), [Fault("latency", "get", seconds=1.5, times=2)], sleep=clock.sleep)
    for _ in range(3):
        store.get("there")
    assert clock.now == 3.0


def run_drill(seed: int, threads: int) -> list[Hit]:
    plan = [Fault("error", times=None, probability=0.3), Fault("flip", "get", times=None, probability=0.5)]
    store = FaultyStore(filled(), plan, seed)

    def work(number: int) -> None:
        for _ in range(20):
            for ask in (lambda: store.put_if_absent(f"k{number}", b"x"), lambda: store.get(f"k{number}")):
                try:
                    ask()
                except (Unavailable, NotFound):
                    continue

    with ThreadPoolExecutor(threads) as executor:
        list(executor.map(work, range(8)))
    return sorted(store.hits)


def test_a_seed_repeats_its_faults_however_many_threads_there_are() -> None:
    assert run_drill(1, 1) == run_drill(1, 8)
    assert run_drill(1, 1) != run_drill(2, 1)
    assert 30 < len(run_drill(1, 1)) < 300


# --- the engine behind them


def weights(step: int) -> torch.Tensor:
    return torch.full((5_000,), float(step))


@pytest.mark.parametrize(("attempts", "lost"), [(30, 1), (30, 3), (1, 1)])
def test_a_commit_whose_answer_is_lost_is_acknowledged_and_not_taken_for_a_foreign_one(
    attempts: int, lost: int
) -> None:
    """By the retries, or where they are used up by the commit, which reads back itself."""
    faulty = FaultyStore(MemoryStore(), [Fault("error-after", "put_if_absent", "manifests/", times=lost)])
    store = retrying(faulty, Clock(), attempts=attempts)
    with IncrementalCheckpointer(store) as checkpointer:
        checkpointer.save({"w": weights(1)})
        committed = checkpointer.wait()
    assert len(faulty.hits) == lost
    assert committed is not None
    assert [key for key, _ in store.list("manifests/")] == [committed.manifest.key]


def test_a_commit_that_finds_other_bytes_after_a_lost_answer_is_fenced() -> None:
    faulty = FaultyStore(MemoryStore(), [Fault("error", "put_if_absent", "manifests/", times=2)])
    checkpointer = IncrementalCheckpointer(retrying(faulty, Clock()))
    checkpointer.restore()
    faulty.inner.put_if_absent(manifest_key(1, 0), b"theirs")
    checkpointer.save({"w": weights(1)})
    with pytest.raises(Fenced, match="written by another process"):
        checkpointer.close()
    assert len(faulty.hits) == 2


@pytest.mark.parametrize("seed", range(20))
def test_over_a_store_with_random_faults_what_was_acknowledged_is_there_and_whole(seed: int) -> None:
    inner = MemoryStore()
    plan = [
        Fault("error", times=None, probability=0.15),
        Fault("error-after", times=None, probability=0.15),
    ]
    acknowledged: list[Committed] = []
    for attempt in range(3):
        store = retrying(FaultyStore(inner, plan, seed * 3 + attempt), Clock(), attempts=2)
        try:
            with IncrementalCheckpointer(store, run="r", on_saved=acknowledged.append) as checkpointer:
                for step in range(6):
                    checkpointer.save({"w": weights(10 * attempt + step)}, meta={"n": 10 * attempt + step})
        except Unavailable:
            continue  # this attempt is over; the next one resumes
    with IncrementalCheckpointer(inner, run="r") as later:
        restored = later.restore()
    if not acknowledged:
        return
    assert restored is not None, f"seed {seed}"
    assert restored.skipped == ()
    newest = acknowledged[-1]
    found = restored.checkpoint.ref
    assert (found.token, found.sequence) >= (newest.ref.token, newest.ref.sequence), f"seed {seed}"
    assert torch.equal(restored["w"], weights(restored.manifest.meta["n"])), f"seed {seed}"
    for committed in acknowledged:
        assert inner.exists(committed.manifest.key)
