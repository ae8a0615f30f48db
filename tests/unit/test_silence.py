"""How long a process may be silent, and what its stack says, without any process."""

from __future__ import annotations

import faulthandler
import tempfile
from collections.abc import Callable

import psutil
import pytest

from tasks.silence import Silence
from tasks.stack import main_stack
from training.allowance import Allowance
from training.checkpoint.manifest import Position, Ref
from training.config import SupervisorConfig
from training.ports import Beat, Failed, Message, Pause, Profiled, Restored, Saved, SaveFailed, Slow

LIMITS = SupervisorConfig(silence_seconds=5, start_seconds=120)
RUNNING, STOPPED = psutil.STATUS_RUNNING, psutil.STATUS_STOPPED


class World:
    """A process that is looked at ten times a second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.silence = Silence(LIMITS, lambda: self.now)

    def passes(self, seconds: float, status: str = RUNNING) -> str | None:
        """The first verdict within this time."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            if verdict := self.silence.verdict(status):
                return verdict
        return None


@pytest.fixture
def world() -> World:
    return World()


def beat(step_seconds: float = 0.0) -> Beat:
    return Beat(position=Position(step=1), loss=1.0, samples_per_second=1.0, step_seconds=step_seconds)


def saved() -> Saved:
    return Saved(
        checkpoint=Ref(token=1, sequence=0, digest="d"),
        checkpoint_kind="base",
        position=Position(),
        written_bytes=1,
        state_bytes=1,
        stall_seconds=0.0,
    )


def test_a_start_may_take_its_time_and_then_silence_counts(world: World) -> None:
    assert world.passes(119) is None
    world.silence.hear(Restored(checkpoint=None, position=Position(), seconds=1, total_steps=1, steps_per_epoch=1))
    assert world.passes(4.9) is None
    assert world.passes(1) == "hung: it said nothing for 5.1 s"


def test_a_start_that_never_ends_is_named(world: World) -> None:
    verdict = world.passes(130)
    assert verdict is not None
    assert verdict.startswith("hung while starting")


def test_slow_steps_are_allowed_four_of_the_longest(world: World) -> None:
    world.silence.hear(beat(step_seconds=30))
    assert world.passes(119) is None
    world.silence.hear(beat(step_seconds=1))
    assert world.passes(6) is not None


def test_a_pause_is_allowed_what_it_announces_and_ends_with_the_next_message_of_the_loop(world: World) -> None:
    world.silence.hear(Pause(what="evaluating", allowance_seconds=600))
    assert world.silence.pause == "evaluating"
    assert world.passes(599) is None
    world.silence.hear(beat())
    verdict = world.passes(6)
    assert verdict is not None
    assert "evaluating" not in verdict


@pytest.mark.parametrize(
    "from_the_background",
    [
        saved,
        lambda: SaveFailed(error="Unavailable", message="m", failures_in_a_row=1),
        lambda: Slow(rank=1, since_step=3, over=False, excess_seconds=0.1, step_seconds=0.2),
        lambda: Profiled(rank=1, path="/a/b"),
    ],
)
def test_what_the_background_says_changes_nothing(world: World, from_the_background: Callable[[], Message]) -> None:
    world.silence.hear(Pause(what="evaluating", allowance_seconds=60))
    world.silence.hear(from_the_background())
    assert world.passes(59) is None
    world.silence.hear(beat())
    world.passes(3)
    world.silence.hear(from_the_background())
    assert world.passes(2.5) is not None


def test_a_stopped_process_is_found_whatever_it_has_announced(world: World) -> None:
    world.silence.hear(Pause(what="evaluating", allowance_seconds=600))
    assert world.passes(4.9, STOPPED) is None
    assert world.passes(10, RUNNING) is None, "it woke in time"
    verdict = world.passes(6, STOPPED)
    assert verdict is not None
    assert verdict.startswith("was frozen")


def test_a_wait_in_the_kernel_is_named(world: World) -> None:
    world.silence.hear(beat())
    verdict = world.passes(6, psutil.STATUS_DISK_SLEEP)
    assert verdict is not None
    assert "in the kernel" in verdict


def test_when_we_slept_ourselves_silence_counts_anew(world: World) -> None:
    world.silence.hear(beat())
    world.now += 60
    assert world.silence.verdict(RUNNING) is None
    assert world.passes(4.5) is None
    assert world.passes(1) is not None


def test_a_last_word_leaves_no_pause() -> None:
    allowance = Allowance(LIMITS)
    assert allowance.hear(Failed(error="KeyError", message="m"))
    assert (allowance.seconds, allowance.pause) == (5, None)


def test_the_stack_is_that_of_the_main_thread_newest_call_first_and_short() -> None:
    def deep(levels: int) -> list[str]:
        if levels:
            return deep(levels - 1)
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            return file.read().splitlines()

    stack = main_stack(["what a job printed", *deep(30)], frames=4)
    assert stack is not None
    first, *middle, last = stack.splitlines()
    assert first.startswith("tests/unit/test_silence.py:")
    assert first.endswith(" deep")
    assert len(middle) == 3
    assert last.startswith("... ")


def test_a_dump_without_a_current_thread_gives_the_last_and_no_dump_none() -> None:
    dump = [
        "Timeout (0:00:08)!",
        "Thread 0x00007f1 [retoma-save] (most recent call first):",
        '  File "/usr/lib/python3.11/threading.py", line 324 in wait',
        "",
        "Thread 0x00007f2 (most recent call first):",
        '  File "/app/.venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 125 in forward',
        '  File "/app/training/trainer.py", line 96 in optimizer_step',
    ]
    assert main_stack(dump) == ("torch/nn/modules/linear.py:125 forward\napp/training/trainer.py:96 optimizer_step")
    assert main_stack([]) is None
    assert main_stack(["nothing of the kind"]) is None
