"""Waiting for a background thread, from a thread that signals must reach.

The kernel may hand a signal of the process to any of its threads. Python's handlers run in the main thread, which a
wait without an end keeps from running them: Ctrl-C, or a SIGTERM, would do nothing until the wait is over.
"""

from __future__ import annotations

from concurrent import futures
from typing import TypeVar

LOOK_SECONDS = 0.5
T = TypeVar("T")


def wait(future: futures.Future[T]) -> None:
    """Return when it is done. What a signal's handler raises is raised here, at most `LOOK_SECONDS` late."""
    while not futures.wait([future], LOOK_SECONDS).done:
        pass


def result(future: futures.Future[T]) -> T:
    """Its result, or its error. See `wait`."""
    wait(future)
    return future.result()
