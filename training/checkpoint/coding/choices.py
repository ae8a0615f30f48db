"""What was found out about each chunk in earlier saves, so that it is not measured again at every save."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

_MOST_SAVES_BETWEEN_SAMPLES = 8


class _Known(NamedTuple):
    delta: bool
    saves_left: int  # that may use it before it is measured again
    period: int


@dataclass
class Choices:
    """Memory of an attempt.

    Attributes:
        sources: of each chunk that is a rounded copy, the chunk that it is a copy of.
        lossless: chunks that could not hold their bound: saves until it is tried again.
    """

    sources: dict[str, str] = field(default_factory=dict)
    lossless: dict[str, int] = field(default_factory=dict)
    _deltas: dict[str, _Known] = field(default_factory=dict)

    def may_be_bounded(self, key: str) -> bool:
        """Whether to try a bounded delta. After a failure not again for some saves."""
        left = self.lossless.get(key, 0)
        self.lossless[key] = max(0, left - 1)
        return left == 0

    def cannot_be_bounded(self, key: str) -> None:
        """Remember that a chunk did not hold its bound."""
        self.lossless[key] = _MOST_SAVES_BETWEEN_SAMPLES

    def prefers_delta(self, key: str, measure: Callable[[], bool]) -> bool:
        """The choice between a delta and a full chunk: measured on a sample, then kept for some saves.

        For one save at first, and for twice as many each time that the same is found again.
        """
        known = self._deltas.get(key)
        if known is not None and known.saves_left > 0:
            self._deltas[key] = known._replace(saves_left=known.saves_left - 1)
            return known.delta
        delta = measure()
        again = known is not None and known.delta == delta
        period = min(2 * known.period, _MOST_SAVES_BETWEEN_SAMPLES) if known is not None and again else 1
        self._deltas[key] = _Known(delta, period - 1, period)
        return delta


class OneChoice:
    """The choice of one chunk in one save: made by the first of its frames that changed, good for all of them."""

    def __init__(self, choices: Choices, key: str) -> None:
        self._choices, self._key = choices, key
        self._lock = threading.Lock()
        self._delta: bool | None = None

    def prefers_delta(self, measure: Callable[[], bool]) -> bool:
        """See `Choices.prefers_delta`."""
        with self._lock:
            if self._delta is None:
                self._delta = self._choices.prefers_delta(self._key, measure)
            return self._delta

    @property
    def delta(self) -> bool | None:
        """What was chosen; None if no frame had to choose."""
        return self._delta
