"""A store with faults, for drills and tests: what a network and a store can do to a writer, on demand.

A fault with a probability depends on the seed, the operation, its key, and how often that was asked before: not on
the clock, and not on the order in which threads come. So a drill that has found something is repeated by its seed.
(`after` and `times` count all calls that match, in the order in which they come.)
"""

from __future__ import annotations

import builtins
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from training.checkpoint.store.base import Aged, Buffer, ObjectInfo, Store
from training.checkpoint.store.wrapper import Request, StoreWrapper
from training.errors import RetomaError, Unavailable

T = TypeVar("T")

Kind = Literal["latency", "mute", "error", "error-after", "truncate", "flip", "stale-list", "ignore-condition"]


@dataclass(frozen=True)
class Fault:
    """One line of a plan.

    Attributes:
        kind: `latency`: it takes longer. `mute`: no answer until `released` is set, or an error after `seconds`.
            `error`: nothing happens, and an error. `error-after`: it happens, and an error all the same.
            `truncate`, `flip`: bytes that are written or read lose their end, or have one bit changed.
            `stale-list`: the listing that was true when this prefix was asked for the last time; at first empty.
            `ignore-condition`: put-if-absent overwrites, as servers do that do not know conditions.
        operation: name of the store's method, or `*`.
        prefix: of the keys that it hits.
        after: matching calls that pass before the first hit.
        times: hits, or None for ever.
        probability: of a hit, where it would be one.
        seconds: of latency, or of silence.
        error: what is raised.
    """

    kind: Kind
    operation: str = "*"
    prefix: str = ""
    after: int = 0
    times: int | None = 1
    probability: float = 1.0
    seconds: float = 0.0
    error: Callable[[str], Exception] = Unavailable

    def matches(self, operation: str, key: str) -> bool:
        """Whether this operation on this key may be hit."""
        return self.operation in ("*", operation) and key.startswith(self.prefix)


class Hit(NamedTuple):
    """A fault that has happened."""

    kind: Kind
    operation: str
    key: str


class FaultyStore(StoreWrapper):
    """Does what the plan says, and passes on the rest.

    Args:
        inner: the store.
        plan: faults; all that match are applied, in this order.
        seed: decides where a probability is below 1, and which byte or bit is hit.
        sleep: waits so many seconds.

    Attributes:
        released: set it to let go of what is mute; such an operation then goes on as if nothing had been.
        hits: what has happened so far.
    """

    def __init__(
        self,
        inner: Store,
        plan: Sequence[Fault] = (),
        seed: int = 0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.plan, self.seed = tuple(plan), seed
        self.released = threading.Event()
        self.hits: list[Hit] = []
        self._sleep = sleep
        self._lock = threading.Lock()
        self._asked: Counter[tuple[str, str]] = Counter()
        self._matched: Counter[int] = Counter()
        self._happened: Counter[int] = Counter()
        self._listings: dict[tuple[str, str], Any] = {}

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """See `Store.put`."""
        faults, rng = self._drawn("put", key)
        if _kinds(faults) & {"truncate", "flip"}:
            parts = [_damaged(b"".join(parts), faults, rng)]
        self._do(faults, "put", key, lambda: self.inner.put(key, parts))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        faults, rng = self._drawn("put_if_absent", key)
        written = _damaged(data, faults, rng)

        def ask() -> bool:
            if "ignore-condition" in _kinds(faults):
                self.inner.delete(key)
            return self.inner.put_if_absent(key, written)

        return self._do(faults, "put_if_absent", key, ask)

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        faults, rng = self._drawn("get", key)
        return _damaged(self._do(faults, "get", key, lambda: self.inner.get(key)), faults, rng)

    def read(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.read`."""
        faults, rng = self._drawn("read", key)
        found = self._do(faults, "read", key, lambda: self.inner.read(key, offset, length))
        return _damaged(found, faults, rng)

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See `Store.list`."""
        return self._listing("list", prefix, lambda: self.inner.list(prefix))

    def ages(self, prefix: str) -> builtins.list[Aged]:
        """See `Store.ages`."""
        return self._listing("ages", prefix, lambda: self.inner.ages(prefix))

    def _listing(self, operation: str, prefix: str, ask: Callable[[], builtins.list[T]]) -> builtins.list[T]:
        faults, _ = self._drawn(operation, prefix)
        found = self._do(faults, operation, prefix, ask)
        with self._lock:
            if "stale-list" in _kinds(faults):
                stale: builtins.list[T] = self._listings.get((operation, prefix), [])
                return stale
            self._listings[operation, prefix] = found
        return found

    def _call(self, request: Request, ask: Callable[[], T]) -> T:
        operation, key, _ = request
        return self._do(self._drawn(operation, key)[0], operation, key, ask)

    def _drawn(self, operation: str, key: str) -> tuple[builtins.list[Fault], random.Random]:
        """The faults that hit this call, and its randomness."""
        with self._lock:
            self._asked[operation, key] += 1
            rng = random.Random(f"{self.seed} {operation} {key} {self._asked[operation, key]}")  # noqa: S311
            drawn = [fault for at, fault in enumerate(self.plan) if self._hits(at, fault, operation, key, rng)]
            self.hits += [Hit(fault.kind, operation, key) for fault in drawn]
        return drawn, rng

    def _hits(self, at: int, fault: Fault, operation: str, key: str, rng: random.Random) -> bool:
        if not fault.matches(operation, key):
            return False
        luck = rng.random()  # drawn in any case: what one line of the plan does changes nothing for the next
        self._matched[at] += 1
        if self._matched[at] <= fault.after or luck >= fault.probability:
            return False
        if fault.times is not None and self._happened[at] >= fault.times:
            return False
        self._happened[at] += 1
        return True

    def _do(self, faults: builtins.list[Fault], operation: str, key: str, ask: Callable[[], T]) -> T:
        for fault in faults:
            if fault.kind == "latency":
                self._sleep(fault.seconds)
            if fault.kind == "mute" and not self.released.wait(fault.seconds):
                raise _error(fault, f"{operation} {key}: no answer in {fault.seconds} s (fault of a drill)")
            if fault.kind == "error":
                raise _error(fault, f"{operation} {key}: refused (fault of a drill)")
        result = ask()
        for fault in faults:
            if fault.kind == "error-after":
                raise _error(fault, f"{operation} {key}: the answer was lost (fault of a drill)")
        return result


def _error(fault: Fault, message: str) -> Exception:
    error = fault.error(message)
    return error if isinstance(error, RetomaError | OSError) else Unavailable(message)


def _kinds(faults: builtins.list[Fault]) -> set[Kind]:
    return {fault.kind for fault in faults}


def _damaged(data: bytes, faults: builtins.list[Fault], rng: random.Random) -> bytes:
    kinds = _kinds(faults)
    if "truncate" in kinds and data:
        data = data[: rng.randrange(len(data))]
    if "flip" in kinds and data:
        at = rng.randrange(len(data))
        data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    return data
