"""A store that asks again: exponential back-off with full jitter, within a budget of time for each call."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

import tenacity

from training.checkpoint.store.base import NoSpace, Store
from training.checkpoint.store.wrapper import Request, StoreWrapper
from training.errors import Unavailable

T = TypeVar("T")

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 5.0


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, Unavailable) and not isinstance(error, NoSpace)


class RetryingStore(StoreWrapper):
    """Repeats what was `Unavailable`, nothing else; not either where the store is full.

    Unknown outcomes stay with the caller. A put-if-absent that is repeated after a lost answer finds the object
    that it has written itself, and says False as it would of anybody else's: whether equal bytes are one's own,
    only the caller knows. `put_document` and `commit` read back and compare; a claim takes the next number.

    Args:
        inner: the store.
        budget_seconds: for one call. No try begins later; the last one ends by its own time limit.
        attempts: tries in one call, at most.
        sleep: waits so many seconds.
        rng: source of the jitter. Many writers that failed together must not come back together.
        clock: counts seconds.
    """

    def __init__(
        self,
        inner: Store,
        budget_seconds: float = 60.0,
        attempts: int = 30,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self.budget_seconds, self.attempts = budget_seconds, attempts
        self._sleep, self._rng, self._clock = sleep, rng or random.Random(), clock  # noqa: S311 - not a secret

    def _call(self, request: Request, ask: Callable[[], T]) -> T:
        started = self._clock()

        def over(state: tenacity.RetryCallState) -> bool:
            spent_seconds = self._clock() - started + state.upcoming_sleep
            return state.attempt_number >= self.attempts or spent_seconds > self.budget_seconds

        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=self._wait,
            stop=over,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return tries(ask)
        except Unavailable as error:
            tried, seconds = tries.statistics.get("attempt_number", 1), self._clock() - started
            if tried > 1:
                error.message = f"{error.message} ({request.operation} tried {tried} times in {seconds:.1f} s)"
            raise

    def _wait(self, state: tenacity.RetryCallState) -> float:
        """Full jitter: anything from nothing up to a limit that doubles."""
        limit = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** (state.attempt_number - 1))
        return self._rng.uniform(0.0, limit)
