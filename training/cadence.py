"""When to save between the ends of epochs: by steps, by seconds, or by what saves cost and how often runs fail."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Protocol

from training.config import CheckpointConfig

_PRIOR_SECONDS = 6 * 3600.0  # one failure in so much time, until more was seen
_DETECTION_SECONDS = 10.0  # a dead process is found after about so long: saving more often saves nothing
_RECENT_STEPS = 64


@dataclass(frozen=True)
class Failures:
    """What happened to the attempts of a run so far."""

    count: int = 0
    seconds: float = 0.0  # of training, all attempts together

    @property
    def mean_seconds_between(self) -> float:
        """Estimate with one failure in `_PRIOR_SECONDS` added, so that no failure yet is not taken for safety."""
        return (self.seconds + _PRIOR_SECONDS) / (self.count + 1)


def best_interval_seconds(save_seconds: float, failure_seconds: float, restore_seconds: float) -> float:
    """Training time between two saves that loses the least.

    Young's and Daly's optimum `sqrt(2 Tf Ts)`, refined for the time that a restore takes and the save itself:
    `Ts + sqrt(2 (Tf + Tr) Ts + Ts^2)`, arXiv 2410.18124.

    Args:
        save_seconds: Ts, what one save costs the training.
        failure_seconds: Tf, mean time between failures.
        restore_seconds: Tr, until training goes on after one.
    """
    wait = math.sqrt(2 * (failure_seconds + restore_seconds) * save_seconds + save_seconds**2)
    return save_seconds + wait


class InFlight(Protocol):
    """What is asked of the checkpointer."""

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""


class Cadence:
    """Says when a save is due.

    Args:
        config: steps, seconds, or `auto`.
        saves: tells whether a save is in flight, so that its cost to the steps beside it can be seen.
        failures: of the run so far.
        restore_seconds: what the start of this attempt took.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        saves: InFlight,
        failures: Failures = Failures(),
        restore_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._saves, self._failures = config, saves, failures
        self._restore_seconds, self._clock = restore_seconds, clock
        self._saved_at = self._stepped_at = clock()
        self._stall_seconds: float | None = None
        self._postponed = False
        self._steps: dict[bool, deque[float]] = {b: deque(maxlen=_RECENT_STEPS) for b in (False, True)}
        self._busy_steps = 0
        self._busy_before = False

    def step(self) -> None:
        """An optimizer step is done: learn how long steps take, with a save beside them and without."""
        now, busy = self._clock(), self._saves.busy
        self._steps[busy or self._busy_before].append(now - self._stepped_at)
        self._busy_steps += busy
        self._busy_before, self._stepped_at = busy, now

    def due(self, step: int, possible: bool = True) -> bool:
        """Whether to save after optimizer step `step`, counted from 1 over the whole run.

        A save that comes due where none is possible is due where one is.
        """
        due = self._postponed or self._comes_due(step)
        self._postponed = due and not possible
        return due and possible

    def saved(self, stall_seconds: float | None) -> None:
        """A save was started; None if it was skipped."""
        if stall_seconds is not None:
            self._saved_at = self._clock()
            self._stall_seconds = stall_seconds
        self._stepped_at = self._clock()  # the stall is not a part of a step
        self._busy_steps = 0

    def save_seconds(self) -> float | None:
        """What a save costs the training: its stall, and what it takes from the steps beside it. None: unknown."""
        if self._stall_seconds is None:
            return None
        beside, alone = self._steps[True], self._steps[False]
        slower = max(0.0, fmean(beside) - fmean(alone)) if beside and alone else 0.0
        return self._stall_seconds + slower * max(self._busy_steps, 1)

    def interval_seconds(self) -> float:
        """The chosen distance. The first save comes early: until then nothing is known about its cost."""
        cost = self.save_seconds()
        if cost is None:
            return _DETECTION_SECONDS
        best = best_interval_seconds(cost, self._failures.mean_seconds_between, self._restore_seconds)
        return max(best, _DETECTION_SECONDS)

    def explain(self) -> dict[str, Any]:
        """What the manifest says about the choice."""
        if self._config.every_steps != "auto":
            return {"every_steps": self._config.every_steps, "every_seconds": self._config.every_seconds}
        return {
            "auto_seconds": round(self.interval_seconds(), 3),
            "save_seconds": self.save_seconds(),
            "seconds_between_failures": round(self._failures.mean_seconds_between, 1),
            "failures": self._failures.count,
            "restore_seconds": round(self._restore_seconds, 3),
        }

    def _comes_due(self, step: int) -> bool:
        every, passed = self._config.every_steps, self._clock() - self._saved_at
        if self._config.every_seconds is not None and passed >= self._config.every_seconds:
            return True
        if every == "auto":
            return passed >= self.interval_seconds()
        return every > 0 and step % every == 0
