"""What the loop tells of its progress: beats after steps, and pauses before work that may be silent for long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from training.allowance import STEPS_OF_SILENCE
from training.checkpoint.manifest import Position
from training.config import SupervisorConfig
from training.errors import Fenced
from training.health import finite
from training.ports import Beat, Message, Pause

BEAT_SECONDS = 0.2
RECENT_STEPS = 64


class Progress:
    """Beats at a bounded rate. Only a finished step, or the end of a pause, makes one: a hung loop is silent.

    Args:
        report: receives beats and pauses.
        position: what comes next.
        limits: how long a first step may take.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        report: Callable[[Message], None],
        position: Position,
        limits: SupervisorConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report, self._limits, self._clock = report, limits, clock
        self._position, self._rate = position, 0.0
        self._loss: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self._first_step_seconds = 0.0
        self._windows: set[int] = set()  # sizes of steps that were compiled for, if anything is compiled
        self._announced = False
        self._trained_seconds, self._trained_samples = 0.0, 0
        self._stepped = self._told = self._agreed = clock()
        self._told_sample = position.sample

    def before_step(self, window_samples: int, new_batches: bool) -> None:
        """Announce a step that may take long: of a size not seen yet, or for which data loading only begins."""
        if window_samples not in self._windows or new_batches:
            self._windows.add(window_samples)
            self._announced = True
            self._report(Pause(what="first step", allowance_seconds=self._limits.first_step_seconds))

    def before_synchronisation(self) -> None:
        """Announce the wait for ranks that were slower since all agreed, if that may be a long one."""
        seconds = STEPS_OF_SILENCE * (self._clock() - self._agreed)
        if seconds > self._limits.silence_seconds:
            self._announced = True
            self._report(Pause(what="synchronising", allowance_seconds=seconds))

    def step(self, position: Position, loss: Tensor | None) -> None:
        """A step is done. Told after an announced one, and else at most every `BEAT_SECONDS`.

        Args:
            position: what comes next.
            loss: that the ranks have agreed on; None: not yet.
        """
        now = self._clock()
        if self._announced:
            self._first_step_seconds = now - self._stepped
        else:
            self._steps.append(now - self._stepped)
            self._trained_seconds += now - self._stepped
            self._trained_samples += position.sample - self._position.sample
        self._stepped, self._position = now, position
        self._agreed = self._agreed if loss is None else now
        if self._announced or now - self._told >= BEAT_SECONDS:
            self._announced = False
            self._loss = finite(loss, position) if loss is not None else self._loss
            self._rate = (position.sample - self._told_sample) / max(now - self._told, 1e-9)
            self._told, self._told_sample = now, position.sample
            self._beat()

    def take_speed(self) -> float | None:
        """Samples per second in the steps since the last call; None: there was none.

        Steps only: neither announced ones, which compile or start loaders, nor pauses.
        """
        seconds, samples = self._trained_seconds, self._trained_samples
        self._trained_seconds, self._trained_samples = 0.0, 0
        return samples / seconds if seconds else None

    @contextmanager
    def pause(self, what: str, allowance_seconds: float) -> Iterator[None]:
        """Announce work that may take long; its end is progress."""
        self._report(Pause(what=what, allowance_seconds=allowance_seconds))
        paused = self._clock()
        yield
        now = self._clock()
        self._told += now - paused
        self._stepped = self._agreed = now
        self._beat()

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """An error on its way out is told together with the step that it came at, not one of a beat before."""
        try:
            yield
        except Fenced:  # speaks for nobody
            raise
        except BaseException:
            self._beat()
            raise

    def _beat(self) -> None:
        # A first step has compiled and warmed up: it stands for the next ones only until one of them is known.
        step_seconds = max(self._steps, default=self._first_step_seconds)
        self._report(
            Beat(
                position=self._position,
                loss=self._loss,
                samples_per_second=self._rate,
                step_seconds=step_seconds,
            )
        )
