"""Actors that take turns at one store, an operation at a time, in an order that a seed decides.

Each actor is a thread, but only the one that holds the baton runs; it hands it on before each operation of its
store. So real functions run as they are, and the same seed gives the same history.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import pytest

from training.checkpoint import checkpointer, frames, reader, restore
from training.checkpoint.care import compact, states
from training.checkpoint.state import buffers

T = TypeVar("T")
_STAYS = 0.6  # of the chance that an actor does its next operation, too
_TURN_SECONDS = 60.0  # a turn that takes longer is a deadlock of the test


class Killed(BaseException):
    """This process does nothing more."""


class InlineExecutor(Executor):
    """Does each job at once, in the thread that submits it. A kill goes through: it is no result of a job."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def submit(self, job: Callable[..., T], /, *arguments: Any, **keywords: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(job(*arguments, **keywords))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


class _Futures:
    """`concurrent.futures` for the checkpointer."""

    ThreadPoolExecutor = InlineExecutor

    @staticmethod
    def wait(futures: Iterable[Future[Any]]) -> None:
        assert all(future.done() for future in futures)


def without_threads(patch: pytest.MonkeyPatch) -> None:
    """Let the engine do everything in the thread of its caller."""
    for module in (buffers, compact, frames, reader, restore, states):
        patch.setattr(module, "ThreadPoolExecutor", InlineExecutor)
    patch.setattr(checkpointer, "futures", _Futures)


class Actor:
    """One process of the history."""

    def __init__(self, turns: Turns, name: str, work: Callable[[Actor], None], starts_at: int) -> None:
        self.turns, self.name = turns, name
        self.wakes_at = starts_at
        self.dies_at: int | None = None  # operations of its own
        self.operations = 0
        self.ended = self.killed = False
        self.go = threading.Lock()
        self.go.acquire()
        self._work = work
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def turn(self) -> None:
        """Before each operation of the store: others may go first."""
        self.operations += 1
        if self.dies_at is not None and self.operations >= self.dies_at:
            self.killed = True
            raise Killed
        self.turns.hand_on(self)
        if self.turns.failure is not None:
            raise Killed

    def sleep(self, operations: int) -> None:
        """Do nothing until so many operations of others have been done, or there are no others."""
        self.wakes_at = self.turns.now + operations

    def _run(self) -> None:
        self.go.acquire()
        try:
            self._work(self)
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised again, by `Turns.run`
            self.turns.failure = self.turns.failure or error
        finally:
            self.ended = True
            self.turns.hand_on(self)


class Turns:
    """Who comes next. `now` counts operations; `at_each` is called with every one of them."""

    def __init__(self, rng: random.Random, at_each: Callable[[], None]) -> None:
        self.rng = rng
        self.now = 0
        self.failure: BaseException | None = None
        self._at_each = at_each
        self.actors: list[Actor] = []
        self._done = threading.Event()

    def add(self, name: str, work: Callable[[Actor], None], starts_at: int = 0) -> Actor:
        """An actor that begins when the history has got so far."""
        actor = Actor(self, name, work, starts_at)
        self.actors.append(actor)
        return actor

    def run(self) -> None:
        """Let all of them work until each has ended. Raises what an actor has failed with."""
        for actor in self.actors:
            actor.thread.start()
        self._next(None).go.release()
        assert self._done.wait(_TURN_SECONDS), "the actors wait for each other"
        for actor in self.actors:
            actor.thread.join(_TURN_SECONDS)
        if self.failure is not None:
            raise self.failure

    def hand_on(self, actor: Actor) -> None:
        """Give the baton to whoever comes next, and wait for it to come back."""
        self.now += 1
        if self.failure is None:
            self._at_each()
        if all(other.ended for other in self.actors):
            self._done.set()
            return
        following = self._next(actor)
        if following is not actor:
            following.go.release()
            if not actor.ended:
                actor.go.acquire()

    def _next(self, actor: Actor | None) -> Actor:
        if actor is not None and not actor.ended and actor.wakes_at <= self.now and self.rng.random() < _STAYS:
            return actor
        there = [other for other in self.actors if not other.ended]
        awake = [other for other in there if other.wakes_at <= self.now]
        if not awake:
            self.now = min(other.wakes_at for other in there)  # everybody sleeps: time passes
            awake = [other for other in there if other.wakes_at <= self.now]
        return self.rng.choice(awake)
