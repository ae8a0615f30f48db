"""What the loop tells: beats from progress only, honest pauses, and the wish to stop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from infra.beat import Progress as Shown
from infra.beat import Reporter
from training.checkpoint.manifest import Position
from training.config import SupervisorConfig
from training.errors import Diverged, Fenced
from training.ports import Beat, Message, Pause
from training.progress import BEAT_SECONDS, Progress
from training.stopping import Interrupted, StopRequest

LOSS = torch.tensor(0.5)


class Loop:
    """A loop with a clock."""

    def __init__(self) -> None:
        self.now, self.at = 0.0, 0
        self.said: list[Message] = []
        limits = SupervisorConfig(first_step_seconds=77)
        self.progress = Progress(self.said.append, Position(), limits, lambda: self.now)

    def step(self, seconds: float, window: int = 4, new_batches: bool = False) -> None:
        self.progress.before_step(window, new_batches)
        self.now += seconds
        self.at += 1
        self.progress.step(Position(step=self.at, sample=4 * self.at), LOSS)

    def beats(self) -> list[Beat]:
        return [message for message in self.said if isinstance(message, Beat)]

    def pauses(self) -> list[tuple[str, float]]:
        return [(message.what, message.allowance_seconds) for message in self.said if isinstance(message, Pause)]


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_first_step_is_announced_and_its_end_told_at_once(loop: Loop) -> None:
    loop.step(BEAT_SECONDS / 4)
    assert loop.pauses() == [("first step", 77)]
    assert [beat.position.step for beat in loop.beats()] == [1]


def test_a_step_of_another_size_and_one_that_starts_the_loaders_are_announced_too(loop: Loop) -> None:
    for _ in range(3):
        loop.step(0.1)
    assert len(loop.pauses()) == 1
    loop.step(0.1, window=2)
    loop.step(0.1, window=2)
    assert len(loop.pauses()) == 2
    loop.step(0.1, new_batches=True)
    assert len(loop.pauses()) == 3


def test_beats_come_at_a_bounded_rate(loop: Loop) -> None:
    for _ in range(1000):
        loop.step(0.01)
    assert 45 <= len(loop.beats()) <= 51
    assert loop.beats()[-1].samples_per_second == pytest.approx(400)


def test_a_beat_says_how_long_steps_take_and_the_first_one_stands_for_none_but_the_next(loop: Loop) -> None:
    loop.step(60)
    assert loop.beats()[-1].step_seconds == 60
    loop.step(2)
    assert loop.beats()[-1].step_seconds == 2
    loop.step(3)
    assert loop.beats()[-1].step_seconds == 3
    for _ in range(64):
        loop.step(1)
    assert loop.beats()[-1].step_seconds == 1


def test_the_end_of_a_pause_is_told_and_is_no_part_of_a_step(loop: Loop) -> None:
    loop.step(1)
    loop.step(1)
    with loop.progress.pause("evaluating", 600):
        loop.now += 100
    assert loop.pauses()[-1] == ("evaluating", 600)
    assert loop.beats()[-1].position.step == 2
    loop.step(1)
    assert loop.beats()[-1].step_seconds == 1
    assert loop.beats()[-1].samples_per_second == pytest.approx(4)


def test_a_pause_that_ends_with_an_error_is_not_told_as_progress(loop: Loop) -> None:
    loop.step(1)
    beats = len(loop.beats())
    with pytest.raises(ValueError, match="m"), loop.progress.pause("evaluating", 600):
        raise ValueError("m")
    assert len(loop.beats()) == beats


@pytest.mark.parametrize(("error", "told"), [(ValueError("m"), True), (Fenced("m"), False)])
def test_an_error_is_told_with_the_step_that_it_came_at(error: Exception, told: bool, loop: Loop) -> None:
    loop.step(1)
    loop.step(0.01)
    loop.step(0.01)
    assert loop.beats()[-1].position.step == 1, "not every step is told"
    with pytest.raises(type(error)), loop.progress.until_the_end():
        raise error
    assert loop.beats()[-1].position.step == (3 if told else 1)


def test_a_loss_that_is_not_finite_makes_no_beat(loop: Loop) -> None:
    loop.step(1)
    beats = len(loop.beats())
    loop.now += 1
    with pytest.raises(Diverged):
        loop.progress.step(Position(step=2), torch.tensor(float("nan")))
    assert len(loop.beats()) == beats


@pytest.mark.parametrize(("beats", "events"), [(0, 0), (1, 1)])
def test_no_event_is_sent_before_the_first_message(beats: int, events: int) -> None:
    def refuse() -> Any:
        raise ConnectionError("refused")

    sent: list[dict[str, Any]] = []
    shown = Shown(
        run="r", start=0, stop=1, epochs=1, attempt=1, flow_run_id="f", host="h", pid=1, pid_started=0, beats=beats
    )
    reporter = Reporter("0" * 32, send_seconds=0.01, connect=refuse, emit=lambda **event: sent.append(event))
    reporter.report(shown)
    reporter.close()
    assert len(sent) == events


def test_a_wish_interrupts_what_can_be_done_again_once_and_nothing_else() -> None:
    request = StopRequest()
    assert request.unless_asked(lambda: 3) == 3
    cleaned = []

    def work() -> int:
        try:
            request.ask()
        finally:
            request.ask()  # the second signal does not raise again
            cleaned.append(1)
        return 3

    assert request.unless_asked(work) is None
    assert cleaned == [1]
    request.ask()
    assert request.asked
    assert request.unless_asked(lambda: 3) is None, "it was asked before"


def test_a_job_does_not_catch_the_interruption_by_accident() -> None:
    assert not issubclass(Interrupted, Exception)


def test_a_wait_for_slower_ranks_is_announced_if_it_may_be_longer_than_silence(loop: Loop) -> None:
    loop.step(0.5)
    for _ in range(3):  # steps whose loss the ranks have not agreed on yet
        loop.now += 1.0
        loop.at += 1
        loop.progress.step(Position(step=loop.at), None)
    assert loop.beats()[-1].loss == 0.5, "the newest that is known"
    loop.now += 1.0
    loop.progress.before_synchronisation()
    assert loop.pauses()[-1] == ("synchronising", 16.0), "four times as long as it took this rank"
    loop.progress.step(Position(step=5), LOSS)
    assert loop.beats()[-1].position.step == 5, "told at once"
    loop.now += 1.0
    loop.progress.before_synchronisation()
    assert len(loop.pauses()) == 2, "the usual silence is longer than such a round"
