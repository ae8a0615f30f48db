"""A store that asks again: exponential back-off with full jitter, within a budget of time for each call."""

from __future__ import annotations

import builtins
import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import tenacity

from training.checkpoint.store.base import Aged, Buffer, ObjectInfo, Store, Unfinished
from training.errors import Unavailable

T = TypeVar("T")

_FIRST_WAIT_SECONDS = 0.2
_LONGEST_WAIT_SECONDS = 10.0


class RetryingStore:
    """Repeats what was `Unavailable`, nothing else.

    Unknown outcomes stay with the caller. A put-if-absent that is repeated after a lost answer finds the object
    that it has written itself, and says False like for anybody else's: whether equal bytes are one's own, only the
    caller can know. `put_document` and `commit` read back and compare; a claim takes the next number.

    Args:
        inner: the store.
        budget_seconds: for one call. No try begins later; the last one may end later by its own time limit.
        attempts: tries in one call, at most.
        sleep: waits so many seconds.
        rng: source of the jitter. Many writers that failed together must not come back together.
        clock: counts seconds.
    """

    def __init__(
        self,
        inner: Store,
        budget_seconds: float = 60.0,
        attempts: int = 12,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner, self.url = inner, inner.url
        self.budget_seconds, self.attempts = budget_seconds, attempts
        self._sleep, self._rng, self._clock = sleep, rng or random.Random(), clock  # noqa: S311 - not a secret

    def __repr__(self) -> str:
        return f"RetryingStore({self.inner!r})"

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """See `Store.put`."""
        self._again(lambda: self.inner.put(key, parts))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Store.put_if_absent`. False also where an earlier try of this very call has written it."""
        return self._again(lambda: self.inner.put_if_absent(key, data))

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return self._again(lambda: self.inner.get(key))

    def read(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.read`."""
        return self._again(lambda: self.inner.read(key, offset, length))

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        return self._again(lambda: self.inner.exists(key))

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See `Store.list`."""
        return self._again(lambda: self.inner.list(prefix))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._again(lambda: self.inner.delete(key))

    def ages(self, prefix: str) -> builtins.list[Aged]:
        """See `Store.ages`."""
        return self._again(lambda: self.inner.ages(prefix))

    def unfinished(self) -> builtins.list[Unfinished]:
        """See `Store.unfinished`."""
        return self._again(self.inner.unfinished)

    def abort(self, unfinished: Unfinished) -> None:
        """See `Store.abort`."""
        self._again(lambda: self.inner.abort(unfinished))

    def _again(self, ask: Callable[[], T]) -> T:
        started = self._clock()

        def over(state: tenacity.RetryCallState) -> bool:
            spent_seconds = self._clock() - started + state.upcoming_sleep
            return state.attempt_number >= self.attempts or spent_seconds > self.budget_seconds

        tries = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Unavailable),
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
                error.message = f"{error.message} (tried {tried} times in {seconds:.1f} s)"
            raise

    def _wait(self, state: tenacity.RetryCallState) -> float:
        """Full jitter: anything from nothing up to a limit that doubles."""
        limit = min(_LONGEST_WAIT_SECONDS, _FIRST_WAIT_SECONDS * 2.0 ** (state.attempt_number - 1))
        return self._rng.uniform(0.0, limit)
