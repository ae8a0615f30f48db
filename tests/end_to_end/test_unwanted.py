"""An attempt that is not wanted any more, with a real server, a real worker and real signals.

It may have been frozen, replaced, cancelled, or told that its machine goes. It commits nothing that counts,
overwrites no verdict, and ends by itself.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from infra.deploy import deploy
from infra.processes import ProcessTable
from infra.settings import Settings
from tests.support.ranges import Range, dies_within, end_all, wait_for
from training.checkpoint.history import head_ref, read_lineage, sequences
from training.checkpoint.manifest import Ref

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("net")]

ENDS_SECONDS = 2.0


@pytest.fixture
def epochs(stack: Settings, tmp_path: Path) -> Iterator[Range]:
    deploy(stack)
    found = Range(stack, tmp_path, epochs=50)
    yield found
    end_all(found)


def replaced_while_frozen(attempt: Range, seed: int, longest_seconds: float) -> None:
    """Freeze the whole tree at a random moment, replace it, wake it at a random moment in a random order."""
    dice = random.Random(seed)
    attempt.start()
    tree = list(attempt.processes(token=1))
    time.sleep(dice.uniform(0, 0.6))
    dice.shuffle(tree)
    for process in tree:
        process.suspend()
    heads: list[Ref | None] = []
    steps: list[Callable[[], object]] = [
        lambda: attempt.set_state(dice.choice(("CRASHED", "CANCELLED")), "given up by the test"),
        lambda: heads.append(attempt.take_over(token=2)),
    ]
    dice.shuffle(steps)
    for step in steps:
        step()
    verdict, manifests = attempt.state(), sequences(attempt.store, 1)
    time.sleep(dice.uniform(0, longest_seconds))
    dice.shuffle(tree)
    for process in tree:
        with suppress(psutil.NoSuchProcess):  # ended with the one that was woken before it
            process.resume()
        time.sleep(dice.uniform(0, 0.3))
    woken = time.monotonic()
    for process in tree:
        assert dies_within(process, woken + ENDS_SECONDS - time.monotonic()), f"{process} is alive, seed {seed}"
    time.sleep(2)  # the worker has its say, too
    assert attempt.state() == verdict, f"seed {seed}"
    assert head_ref(attempt.store) == heads[0], f"seed {seed}"
    # One manifest may have been on its way, beyond the check before it. Nobody acknowledged it, and it is void.
    late = sequences(attempt.store, 1)[len(manifests) :]
    assert len(late) <= 1, f"seed {seed}: {late}"


def test_a_frozen_attempt_that_wakes_after_it_was_replaced_changes_nothing_and_ends(epochs: Range) -> None:
    replaced_while_frozen(epochs, seed=random.randrange(2**32), longest_seconds=4.0)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(24))
def test_whenever_it_was_frozen_and_whenever_it_wakes(epochs: Range, number: int) -> None:
    replaced_while_frozen(epochs, seed=random.randrange(2**32), longest_seconds=20.0)


def test_an_attempt_whose_token_is_taken_while_nobody_gave_it_up_says_so(epochs: Range) -> None:
    epochs.start()
    supervisor, training = epochs.processes(token=1)
    head = epochs.take_over(token=2)
    assert dies_within(training, 3.0)
    state = wait_for(epochs.ended, 15)
    assert state["type"] == "CANCELLED", "Crashed would make its parent start another attempt, and so on in turns"
    assert state["message"].startswith("Fenced")
    assert dies_within(supervisor, 15.0)
    assert head_ref(epochs.store) == head


def test_sigterm_ends_in_a_commit_and_the_next_attempt_goes_on_from_it(epochs: Range) -> None:
    epochs.start()
    supervisor, training = epochs.processes(token=1)
    asked = time.monotonic()
    supervisor.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    supervisor.send_signal(signal.SIGTERM)
    assert dies_within(training, 10.0)
    state = wait_for(epochs.ended, 15)
    took_seconds = time.monotonic() - asked
    assert state["type"] == "CRASHED"
    assert state["message"].startswith("Preempted: asked to leave (SIGTERM)"), state["message"]
    assert took_seconds < 15
    assert dies_within(supervisor, 15.0)
    head = read_lineage(epochs.store).head
    assert head is not None
    assert str(head.ref) in state["message"]
    assert head.manifest.position.step % 4, "it was saved when it was asked, not by the interval"

    epochs.start(attempt=2)
    supervisor, _ = epochs.processes(token=2)
    start = read_lineage(epochs.store).attempts[1].seal
    assert start is not None
    assert start.head == head.ref
    epochs.set_state("CANCELLING", "a person cancels it")
    state = wait_for(epochs.ended, 40)
    assert state["type"] == "CANCELLED"
    assert dies_within(supervisor, 15.0)


def test_a_worker_that_is_stopped_lets_its_range_save_and_say_so(stack: Settings, epochs: Range) -> None:
    epochs.start()
    supervisor, training = epochs.processes(token=1)
    found = ProcessTable(stack.state_dir).find("worker-gpu")
    assert found is not None
    found[1].terminate()
    assert dies_within(training, 10.0)
    state = wait_for(epochs.ended, 15)
    assert state["type"] == "CRASHED"
    assert state["message"].startswith("Preempted"), state["message"]
    head = read_lineage(epochs.store).head
    assert head is not None
    assert head.manifest.position.step % 4, "it was saved when it was asked, not by the interval"
    assert dies_within(supervisor, 15.0)
    assert dies_within(found[1], 15.0)
