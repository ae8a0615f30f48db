"""A store that counts: operations, bytes, errors and how long it took."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from training.checkpoint.store.base import NotFound, Store
from training.checkpoint.store.wrapper import Request, StoreWrapper

T = TypeVar("T")

LATENCY_LIMITS_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class OperationMetrics:
    """One kind of operation.

    Attributes:
        count: calls that have ended, those with an error included.
        errors: calls that ended with an error. `NotFound` is an answer and not counted.
        sent_bytes, received_bytes: content of objects; what a failed call has moved is not known.
        seconds, longest_seconds: sum and maximum of the durations.
        latencies: calls of up to each of `LATENCY_LIMITS_SECONDS`, and as the last number the longer ones.
    """

    count: int = 0
    errors: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    seconds: float = 0.0
    longest_seconds: float = 0.0
    latencies: tuple[int, ...] = (0,) * (len(LATENCY_LIMITS_SECONDS) + 1)


@dataclass(frozen=True)
class StoreMetrics:
    """All operations at one moment, by the name of the method."""

    operations: Mapping[str, OperationMetrics]

    @property
    def count(self) -> int:
        """Calls of all kinds."""
        return sum(one.count for one in self.operations.values())

    @property
    def errors(self) -> int:
        """Calls of all kinds that ended with an error."""
        return sum(one.errors for one in self.operations.values())

    @property
    def sent_bytes(self) -> int:
        """Bytes written."""
        return sum(one.sent_bytes for one in self.operations.values())

    @property
    def received_bytes(self) -> int:
        """Bytes read."""
        return sum(one.received_bytes for one in self.operations.values())

    def __str__(self) -> str:
        """One line for a log."""
        parts = [
            f"{one.count} {name}"
            + (f" ({one.errors} failed)" if one.errors else "")
            + f" in {one.seconds:.2f} s, the longest {1000 * one.longest_seconds:.0f} ms"
            for name, one in sorted(self.operations.items())
        ]
        moved = f"{self.sent_bytes / 1e6:.1f} MB written, {self.received_bytes / 1e6:.1f} MB read"
        return "store: " + "; ".join([moved, *parts])


class MeteredStore(StoreWrapper):
    """Counts what passes. Around a `RetryingStore` it sees calls, inside of one it sees tries."""

    def __init__(self, inner: Store, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self._clock = clock
        self._lock = threading.Lock()
        self._operations: dict[str, OperationMetrics] = {}

    def snapshot(self) -> StoreMetrics:
        """What was counted up to now."""
        with self._lock:
            return StoreMetrics(dict(self._operations))

    def _call(self, request: Request, ask: Callable[[], T]) -> T:
        started, failed, received_bytes = self._clock(), True, 0
        try:
            result = ask()
            failed, received_bytes = False, len(result) if isinstance(result, bytes) else 0
            return result
        except NotFound:
            failed = False
            raise
        finally:
            moved = (0, 0) if failed else (request.sent_bytes, received_bytes)
            self._count(request.operation, self._clock() - started, failed, moved)

    def _count(self, operation: str, seconds: float, failed: bool, moved: tuple[int, int]) -> None:
        with self._lock:
            old = self._operations.get(operation, OperationMetrics())
            latencies = list(old.latencies)
            latencies[bisect_left(LATENCY_LIMITS_SECONDS, seconds)] += 1
            self._operations[operation] = replace(
                old,
                count=old.count + 1,
                errors=old.errors + failed,
                sent_bytes=old.sent_bytes + moved[0],
                received_bytes=old.received_bytes + moved[1],
                seconds=old.seconds + seconds,
                longest_seconds=max(old.longest_seconds, seconds),
                latencies=tuple(latencies),
            )
