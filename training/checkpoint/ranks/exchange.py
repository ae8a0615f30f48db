"""How the ranks of a group talk about a checkpoint: small messages under keys, beside the training's own group.

A save never uses a collective of the training: one rank that is dead would hold up all others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from training.errors import Unavailable


class Stopped(Exception):
    """A message is not waited for any more, since there is another one, under `key`."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


class Exchange(Protocol):
    """One rank's access. Every key is posted once.

    Attributes:
        rank: of this process.
        size: of the group.
        taken: whether a checkpointer uses it. It serves one: another one's messages have the same keys.
    """

    rank: int
    size: int
    taken: bool

    def post(self, key: str, data: bytes) -> None:
        """Let every rank take `data` under `key`."""

    def wait(self, keys: Sequence[str], seconds: float, stop: Sequence[str] = ()) -> None:
        """Return when something was posted under each of the keys.

        Raises:
            Stopped: some of it is not there, and something is under one of the keys `stop`.
            Unavailable: it did not come in time, or the messages can't be reached.
        """

    def take(self, keys: Sequence[str], seconds: float, stop: Sequence[str] = ()) -> list[bytes]:
        """What was posted under each of the keys; waits for it, and raises, as `wait` does."""

    def forget(self, key: str) -> None:
        """Nobody will take it any more."""


def dead_key(rank: int) -> str:
    """Posted by whoever has started the ranks, when one of them has ended or is about to be killed."""
    return f"dead/{rank}"


def not_in_time(keys: Sequence[str], seconds: float) -> Unavailable:
    """The error of those who have waited for long enough."""
    return Unavailable(f"not all was heard of {', '.join(keys)} in {seconds:g} s: a rank does not answer")


class MemoryBoard:
    """The ranks of a group as threads of one process: for tests and simulations.

    Args:
        size: of the group.
        before: called before each operation with the rank, `post` or `take`, and the key; what it raises is raised.
    """

    def __init__(self, size: int, before: Callable[[int, str, str], None] = lambda *_: None) -> None:
        self.size = size
        self.before = before
        self.changed = threading.Condition()
        self.messages: dict[str, bytes] = {}

    def ranks(self) -> list[Exchange]:
        """An access for each rank."""
        return [_MemoryExchange(self, rank) for rank in range(self.size)]

    def kill(self, rank: int) -> None:
        """From now on a rank is known to be dead."""
        with self.changed:
            self.messages[dead_key(rank)] = b""
            self.changed.notify_all()


class _MemoryExchange:
    def __init__(self, board: MemoryBoard, rank: int) -> None:
        self.rank, self.size, self.taken = rank, board.size, False
        self._board = board

    def post(self, key: str, data: bytes) -> None:
        self._board.before(self.rank, "post", key)
        with self._board.changed:
            self._board.messages[key] = data
            self._board.changed.notify_all()

    def wait(self, keys: Sequence[str], seconds: float, stop: Sequence[str] = ()) -> None:
        board, deadline = self._board, time.monotonic() + seconds
        for key in keys:
            board.before(self.rank, "take", key)
        with board.changed:
            while not all(key in board.messages for key in keys):
                if found := next((other for other in stop if other in board.messages), None):
                    raise Stopped(found)
                if not board.changed.wait(max(0.0, deadline - time.monotonic())):
                    raise not_in_time(keys, seconds)

    def take(self, keys: Sequence[str], seconds: float, stop: Sequence[str] = ()) -> list[bytes]:
        self.wait(keys, seconds, stop)
        with self._board.changed:
            return [self._board.messages[key] for key in keys]

    def forget(self, key: str) -> None:
        with self._board.changed:
            self._board.messages.pop(key, None)
