"""The one save that is on its way, and what became of those before it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures

from training.checkpoint import patience
from training.checkpoint.draft import Draft
from training.checkpoint.manifest import Committed, MetricPoint
from training.errors import Fenced, RetomaError, Unavailable


class Flight:
    """At most one save at a time. Errors of the background surface here, each once; `Fenced` for ever.

    Args:
        max_failed_saves: so many failures in a row, with the store away, are forgiven.
        on_failed: called with each failed save, and how many in a row have failed.

    Attributes:
        failed: saves that failed so far.
        metrics: of saves that failed or were skipped: they go with the next one.
    """

    def __init__(self, max_failed_saves: int, on_failed: Callable[[RetomaError, int], None] | None) -> None:
        self.failed = 0
        self.metrics: list[MetricPoint] = []
        self._max_failed_saves, self._on_failed = max_failed_saves, on_failed
        self._in_a_row = 0
        self._fenced: Fenced | None = None
        self._pending: tuple[Draft, futures.Future[Committed]] | None = None

    @property
    def draft(self) -> Draft | None:
        """Of the save that nobody has waited for yet."""
        return self._pending[0] if self._pending is not None else None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._pending is not None and not self._pending[1].done()

    def take_metrics(self) -> tuple[MetricPoint, ...]:
        """All that wait for a save."""
        taken, self.metrics = tuple(self.metrics), []
        return taken

    def start(self, draft: Draft, done: futures.Future[Committed]) -> None:
        """A save has begun."""
        self._pending = draft, done

    def wait(self) -> None:
        """Return when no save is in flight; raise the error of the last one."""
        if self._fenced is not None:
            raise self._fenced
        if self._pending is None:
            return
        patience.wait(self._pending[1])  # interrupted here, the save is still ours to wait for
        (draft, done), self._pending = self._pending, None
        try:
            done.result()
        except Fenced as error:
            self._fenced = error
            raise
        except RetomaError as error:
            self.metrics = [*draft.metrics, *self.metrics]
            self.failed += 1
            self._in_a_row += 1
            if self._on_failed is not None:
                self._on_failed(error, self._in_a_row)
            raise
        self._in_a_row = 0

    def settle(self) -> None:
        """Like `wait`, but a store that does not answer is forgiven a few times in a row."""
        try:
            self.wait()
        except Unavailable as error:
            if self._in_a_row > self._max_failed_saves:
                if self._in_a_row > 1:
                    error.message = f"{self._in_a_row} saves in a row failed; the last one: {error.message}"
                raise
