"""A signal that the kernel hands to another thread interrupts a wait of the main thread all the same."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.support.faults import Gate, RuledStore
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store import MemoryStore
from training.checkpoint.store.s3_loop import run


class Woken(BaseException):
    """Raised by the handler of the signal."""


@pytest.fixture
def handler() -> Iterator[None]:
    def wake(*_: Any) -> None:
        raise Woken

    before = signal.signal(signal.SIGUSR1, wake)
    yield
    signal.signal(signal.SIGUSR1, before)


def interrupted(wait: Callable[[], object]) -> float:
    """Seconds from a signal that another thread gets until the wait is over."""
    sent: list[float] = []

    def other() -> None:
        time.sleep(0.3)
        sent.append(time.monotonic())
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        time.sleep(8)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    with pytest.raises(Woken):
        wait()
    return time.monotonic() - sent[0]


@pytest.mark.usefixtures("handler")
def test_a_wait_for_a_save_is_interrupted() -> None:
    gate = Gate("put", "packs/")
    checkpointer = IncrementalCheckpointer(RuledStore(MemoryStore(), gate))
    checkpointer.save({"x": torch.zeros(9)})
    try:
        assert interrupted(checkpointer.wait) < 4
    finally:
        gate.opened.set()
        checkpointer.close()


@pytest.mark.usefixtures("handler")
def test_a_wait_for_s3_is_interrupted() -> None:
    assert interrupted(lambda: run(asyncio.sleep(8))) < 4
