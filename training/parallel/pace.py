"""How the ranks of a group share the time of their steps: who works, who waits, who holds up the others.

Each rank knows its own time of a step: what is left of it without its waits in collectives. With the sum of the
losses all tell it to all, so that the clock of one is never compared to that of another. What a rank has less of
its own than the slowest one, it has waited for that one; in the rest of a step not even the slowest one computes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

SLOW_SHARE = 0.1  # of a step: so much more of its own than the median of the others has a slow rank
SLOW_SECONDS = 10.0  # for so long, before it is told, and so long not, before it is over
WINDOW_SECONDS = 2.0  # steps that are judged together
KEPT_EPISODES = 16


@dataclass(frozen=True)
class Shares:
    """Means over some steps. Seconds; shares are of a step.

    Attributes:
        steps: how many.
        step_seconds: from the begin of a step until all ranks have agreed on its loss.
        own_seconds: of each rank, without its waits in collectives.
        slowest_seconds: of the slowest rank of each step, whichever it was.
    """

    steps: int
    step_seconds: float
    own_seconds: tuple[float, ...]
    slowest_seconds: float

    @property
    def communication_share(self) -> float:
        """In which not even the slowest rank computes: it waits for data that all have sent."""
        return max(0.0, 1 - self.slowest_seconds / self.step_seconds)

    @property
    def waiting_shares(self) -> tuple[float, ...]:
        """In which each rank waits for slower ones."""
        return tuple((self.slowest_seconds - own) / self.step_seconds for own in self.own_seconds)

    @property
    def slow_rank(self) -> int | None:
        """Which one has `SLOW_SHARE` of a step more of its own than the median of the others, if there are any."""
        if len(self.own_seconds) == 1:
            return None
        rank = max(range(len(self.own_seconds)), key=self.own_seconds.__getitem__)
        return rank if self.excess_seconds(rank) >= SLOW_SHARE * self.step_seconds else None

    def excess_seconds(self, rank: int) -> float:
        """What a rank has more of its own than the median of the others."""
        others = [own for other, own in enumerate(self.own_seconds) if other != rank]
        return self.own_seconds[rank] - statistics.median(others)


@dataclass(frozen=True)
class Episode:
    """A rank holds up the others.

    Attributes:
        rank: which.
        since_step: the step at which it was begun, counted over the run.
        until_step: the step at which it was over; None: it goes on.
        excess_seconds: what the rank had more of its own in each step than the median of the others, at its begin.
        step_seconds: what a step took then.
    """

    rank: int
    since_step: int
    until_step: int | None
    excess_seconds: float
    step_seconds: float


class Pace:
    """The steps of a group, as all of its ranks see them.

    Args:
        clock: seconds, monotonic.

    Attributes:
        episodes: the last ones of ranks that hold up the others.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._since_taken, self._window = _Sums(), _Sums()
        self._window_begun = clock()
        self._window_step = 0
        self._suspect: tuple[int | None, float, int] = (None, clock(), 0)  # since when, and which step
        self.episodes: list[Episode] = []

    @property
    def slow(self) -> Episode | None:
        """The episode that goes on."""
        return self.episodes[-1] if self.episodes and self.episodes[-1].until_step is None else None

    def step(self, step_seconds: float, own_seconds: Sequence[float]) -> None:
        """All ranks have agreed on a step."""
        self._since_taken.add(step_seconds, own_seconds)
        self._window.add(step_seconds, own_seconds)

    def take(self) -> Shares | None:
        """Over the steps since the last call; None: there was none."""
        shares, self._since_taken = self._since_taken.mean(), _Sums()
        return shares

    def look(self, step: int) -> Episode | None:
        """Judge the last steps, if it is time to; `step` comes next. An episode that has begun, or that is over."""
        now = self._clock()
        if now - self._window_begun < WINDOW_SECONDS:
            return None
        shares, self._window = self._window.mean(), _Sums()
        begun, self._window_begun = self._window_begun, now
        first, self._window_step = self._window_step, step
        if shares is None:
            return None
        rank = shares.slow_rank
        if rank != self._suspect[0]:
            self._suspect = rank, begun, first
        _, since, since_step = self._suspect
        if now - since < SLOW_SECONDS or rank == (self.slow.rank if self.slow else None):
            return None
        if self.slow is not None:
            self.episodes[-1] = replace(self.slow, until_step=since_step)
        else:
            assert rank is not None  # noqa: S101 - none is no change
            excess = shares.excess_seconds(rank)
            self.episodes.append(Episode(rank, since_step, None, excess, shares.step_seconds))
            del self.episodes[:-KEPT_EPISODES]
        return self.episodes[-1]


def scaling_efficiency(speed: float, world_size: int, one_rank_speed: float) -> float:
    """What a group reaches of what as many ranks would, if each were as fast as one that trains alone."""
    return speed / (world_size * one_rank_speed)


@dataclass
class _Sums:
    """Of steps."""

    steps: int = 0
    step_seconds: float = 0.0
    slowest_seconds: float = 0.0
    own_seconds: list[float] = field(default_factory=list)

    def add(self, step_seconds: float, own_seconds: Sequence[float]) -> None:
        self.steps += 1
        self.step_seconds += step_seconds
        self.slowest_seconds += max(own_seconds)
        before = self.own_seconds or [0.0] * len(own_seconds)
        self.own_seconds = [sum(pair) for pair in zip(before, own_seconds, strict=True)]

    def mean(self) -> Shares | None:
        if not self.steps:
            return None
        own = tuple(seconds / self.steps for seconds in self.own_seconds)
        return Shares(self.steps, self.step_seconds / self.steps, own, self.slowest_seconds / self.steps)
