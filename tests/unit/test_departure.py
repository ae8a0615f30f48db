"""However often and by whomever it is asked, a process leaves once, and only from where it can."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tasks.departure import Departure, Leave


@pytest.fixture
def departure() -> Iterator[Departure]:
    before = signal.getsignal(signal.SIGTERM)
    found = Departure()
    found.listen()
    yield found
    signal.signal(signal.SIGTERM, before)


def test_sigterm_interrupts_what_the_main_thread_waits_for(departure: Departure) -> None:
    started = time.monotonic()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(Leave, match="SIGTERM"), departure:
        time.sleep(30)
    assert time.monotonic() - started < 10


def test_the_second_signal_disturbs_nothing(departure: Departure) -> None:
    saved = []

    def save() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            saved.append(True)

    with pytest.raises(Leave), departure:
        save()
    assert saved


def test_a_signal_before_the_body_is_remembered_and_one_after_it_is_ignored(departure: Departure) -> None:
    with departure:
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)
    with pytest.raises(Leave), departure:
        raise AssertionError("the body must not begin")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.05)


def test_another_thread_asks_and_its_reason_is_told(departure: Departure) -> None:
    def ask() -> None:
        time.sleep(0.2)
        departure.ask("the machine is being taken away")
        departure.ask("again")

    threading.Thread(target=ask).start()
    with pytest.raises(Leave, match="taken away"), departure:
        time.sleep(30)


def test_no_except_exception_on_the_way_swallows_it(departure: Departure) -> None:
    def careless() -> None:
        with suppress(Exception):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)

    with pytest.raises(Leave), departure:
        careless()
