"""Who is not wanted any more leaves, whatever its main thread does; who is wanted goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import pytest

from tasks import watch as module
from tasks.departure import Departure
from tasks.watch import Watch
from training.checkpoint.store import Store, open_store
from training.checkpoint.token import claim, mark_run
from training.errors import Fenced, RetomaError, Unavailable

LEASE_SECONDS = 0.6


class Watched:
    """A supervisor that remembers what it was told."""

    def __init__(self) -> None:
        self.token: int | None = 1
        self.unwanted: RetomaError | None = None
        self.killed: list[str] = []
        self.noted: list[RetomaError] = []

    def give_up(self, error: RetomaError) -> None:
        self.unwanted = error

    def kill(self, why: str) -> None:
        self.killed.append(why)

    def note_end(self, error: RetomaError) -> None:
        self.noted.append(error)


class Server:
    """An orchestrator that tells one state, or does not answer."""

    def __init__(self) -> None:
        self.tells: str | None = "RUNNING"
        self.asked = 0

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        pass

    def state(self) -> str:
        self.asked += 1
        if self.tells is None:
            raise Unavailable("no route")
        return self.tells


class Cut:
    """A store that can be cut off."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.away = False
        self.meanwhile: list[Callable[[], None]] = []  # happens after the question and before the answer

    def exists(self, key: str) -> bool:
        if self.away:
            raise Unavailable("no route")
        while self.meanwhile:
            self.meanwhile.pop()()
        return self._store.exists(key)


class Asked:
    """What is asked to leave."""

    def __init__(self) -> None:
        self.whys: list[str] = []

    def ask(self, why: str) -> None:
        self.whys.append(why)


class Bench:
    """A watch with everything around it in hand. `leap_seconds` is what its clock jumps by."""

    def __init__(self, folder: Path) -> None:
        self.real = open_store(folder / "store")
        mark_run(self.real, "r")
        claim(self.real, "r", {})
        self.folder = folder
        self.store, self.server, self.watched, self.departure = Cut(self.real), Server(), Watched(), Asked()
        self.exits: list[int] = []
        self.leap_seconds = 0.0
        self.lease_seconds = LEASE_SECONDS
        self.closed = False

    def clock(self) -> float:
        if self.closed:
            raise SystemExit  # ends the thread that asks
        return time.monotonic() + self.leap_seconds

    def leave(self, code: int) -> None:
        self.exits.append(code)
        raise SystemExit

    def start(self) -> Watch:
        watch = Watch(
            self.watched,
            store=cast("Store", self.store),
            flow_run=lambda: self.server,
            departure=cast("Departure", self.departure),
            lease_seconds=self.lease_seconds,
            notice_file=self.folder / "notice",
            leave=self.leave,
            clock=self.clock,
        )
        watch.start()
        return watch

    def goes_on(self, seconds: float = 0.5) -> bool:
        time.sleep(seconds)
        return not (self.exits or self.watched.killed or self.watched.unwanted or self.departure.whys)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(module, "TICK_SECONDS", 0.02)
    report = threading.excepthook
    monkeypatch.setattr(threading, "excepthook", lambda told: told.exc_type is SystemExit or report(told))
    found = Bench(tmp_path)
    before = set(threading.enumerate())
    yield found
    found.closed = True
    for thread in set(threading.enumerate()) - before:
        thread.join(3)


def test_an_attempt_that_is_wanted_goes_on_and_may_say_how_it_ended(bench: Bench) -> None:
    watch = bench.start()
    assert bench.goes_on()
    assert bench.server.asked > 3
    assert watch.last_look() == "RUNNING"


@pytest.mark.parametrize("state", ["CRASHED", "CANCELLED", "COMPLETED", "SCHEDULED", "DELETED"])
def test_an_attempt_whose_flow_run_is_over_kills_and_leaves_without_a_word(bench: Bench, state: str) -> None:
    bench.start()
    bench.server.tells = state
    until(lambda: bench.exits == [Fenced.exit_code])
    assert bench.watched.killed
    assert state in bench.watched.noted[0].message
    assert not bench.departure.whys


def test_a_newer_token_ends_the_training_and_leaves_the_word_to_the_main_thread(bench: Bench) -> None:
    watch = bench.start()
    claim(bench.real, "r", {})
    until(lambda: bench.watched.unwanted)
    assert isinstance(bench.watched.unwanted, Fenced)
    assert not bench.exits
    assert watch.last_look() == "RUNNING", "nobody gave the flow run up: it may end as Cancelled"


def test_a_newer_token_and_a_cancelled_flow_run_are_a_replacement(bench: Bench) -> None:
    bench.start()
    claim(bench.real, "r", {})
    until(lambda: bench.watched.unwanted)
    bench.server.tells = "CANCELLING"
    until(lambda: bench.exits == [Fenced.exit_code])


def test_our_own_next_token_is_not_taken_for_anothers(bench: Bench) -> None:
    def restart_in_place() -> None:
        bench.watched.token = None
        bench.watched.token = claim(bench.real, "r", {})

    bench.store.meanwhile.append(restart_in_place)
    bench.start()
    assert bench.goes_on(0.3)
    assert bench.watched.token == 2


def test_a_cancellation_is_a_request_to_leave_in_order(bench: Bench) -> None:
    watch = bench.start()
    bench.server.tells = "CANCELLING"
    until(lambda: bench.departure.whys)
    assert not bench.exits
    assert not bench.watched.killed
    assert watch.last_look() == "CANCELLING"


def test_a_notice_of_the_cloud_is_a_request_to_leave_in_order(bench: Bench) -> None:
    bench.start()
    assert bench.goes_on(0.2)
    (bench.folder / "notice").touch()
    until(lambda: bench.departure.whys)
    assert "notice" in bench.departure.whys[0]
    assert not bench.exits


def test_with_one_of_store_and_orchestrator_the_training_goes_on_and_without_both_it_ends(bench: Bench) -> None:
    bench.start()
    bench.store.away = True
    assert bench.goes_on(2 * LEASE_SECONDS)
    bench.store.away, bench.server.tells = False, None
    assert bench.goes_on(2 * LEASE_SECONDS)
    bench.store.away = True
    cut = time.monotonic()
    until(lambda: bench.exits == [Unavailable.exit_code])
    assert time.monotonic() - cut > LEASE_SECONDS / 2
    assert bench.watched.killed


def test_an_error_that_is_no_answer_counts_as_none(bench: Bench) -> None:
    def broken(key: str) -> bool:
        raise OSError(key)

    cast("Any", bench.store).exists = broken
    bench.server.tells = None
    bench.start()
    until(lambda: bench.exits == [Unavailable.exit_code])


def test_after_a_sleep_it_looks_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 60.0)
    bench.lease_seconds = 60.0
    bench.start()
    assert bench.goes_on(0.2)
    bench.server.tells = "CRASHED"
    assert bench.goes_on(0.2)
    bench.leap_seconds = module.DOZED_SECONDS + 0.1
    until(lambda: bench.exits == [Fenced.exit_code], seconds=1.0)


def test_the_last_look_waits_for_a_server_that_restarts(bench: Bench) -> None:
    watch = bench.start()
    bench.server.tells = None
    threading.Timer(0.2, setattr, (bench.server, "tells", "RUNNING")).start()
    assert watch.last_look() == "RUNNING"


def test_without_an_answer_to_the_last_look_nothing_is_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_LOOK_SECONDS", 0.2)
    watch = bench.start()
    bench.server.tells = None
    with pytest.raises(SystemExit):
        watch.last_look()
    assert bench.exits == [Unavailable.exit_code]


def test_a_note_that_hangs_keeps_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.watched, "note_end", lambda _: time.sleep(2))
    bench.start()
    bench.server.tells = "CRASHED"
    until(lambda: bench.exits, seconds=1.5)


def test_who_sleeps_after_the_last_look_says_nothing_any_more(bench: Bench) -> None:
    watch = bench.start()
    assert watch.last_look() == "RUNNING"
    bench.server.tells = "COMPLETED"  # what it said itself
    assert bench.goes_on(0.3)
    bench.leap_seconds = module.SLEPT_SECONDS + 1
    until(lambda: bench.exits == [Unavailable.exit_code])


def until(happened: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
