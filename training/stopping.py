"""The wish that a training ends: noted at once, granted after the step, and at once in what can be done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Interrupted(BaseException):
    """Ends work that can be done again. No `Exception`, so that no job catches it by accident."""


class StopRequest:
    """Asked from a signal handler, in the thread that trains.

    Attributes:
        asked: whether it was. Asking again changes nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._may_interrupt = False

    def ask(self) -> None:
        """Note the wish. Within `unless_asked` this raises `Interrupted`."""
        self.asked = True
        if self._may_interrupt:
            self._may_interrupt = False
            raise Interrupted

    def unless_asked(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; None if the wish came before its end."""
        try:
            try:
                self._may_interrupt = True
                return None if self.asked else work()
            finally:
                self._may_interrupt = False
        except Interrupted:
            return None
