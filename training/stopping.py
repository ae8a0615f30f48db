"""The wish that a training ends: noted at once, granted after the step, and at once in what can be done again."""

from __future__ import annotations

import os
import signal
import threading
import time
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
        self._working = self._raised = False

    @property
    def unheard(self) -> bool:
        """Whether the wish did not reach the thread that trains, or what it interrupts goes on all the same."""
        return self._working or not self.asked

    def ask(self) -> None:
        """Note the wish. Within `unless_asked` this raises `Interrupted`, once: cleaning up is not interrupted."""
        self.asked = True
        if self._working and not self._raised:
            self._raised = True
            raise Interrupted

    def ask_again(self) -> None:
        """Let the next `ask` raise again."""
        self._raised = False

    def unless_asked(self, work: Callable[[], T]) -> T | None:
        """The result of `work`; None if the wish came before its end.

        What must be put back in order whatever happens does not belong into `work`, but around this call.
        """
        try:
            try:
                self._working, self._raised = True, False
                return None if self.asked else work()
            finally:
                self._working = False
        except Interrupted:
            return None


class GroupStop(StopRequest):
    """The wish of one rank of a group: granted after the step at which all ranks know of it.

    An evaluation is not interrupted: the other ranks are in it, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wished = False

    @property
    def unheard(self) -> bool:
        """See `StopRequest.unheard`."""
        return not self.wished

    def ask(self) -> None:
        """Note the wish."""
        self.wished = True

    def unless_asked(self, work: Callable[[], T]) -> T | None:
        """The result of `work`."""
        return work()


def insist(request: StopRequest, every_seconds: float = 1.0) -> None:
    """Repeat a SIGTERM for the main thread until the request is heard. Called in the main thread.

    One is not enough: it comes just before the thread begins to wait in C, another thread of the process gets it,
    or the interpreter drops what the handler raised, which it does in finalizers and callbacks of the collector.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    # A forked loader worker has this pipe, too: what is meant for it must not stop the training.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    trains = threading.get_ident()

    def repeat() -> None:
        while signals := os.read(told, 4096):
            while signal.SIGTERM in signals and request.unheard:
                time.sleep(every_seconds)
                if request.unheard:
                    request.ask_again()
                    signal.pthread_kill(trains, signal.SIGTERM)

    threading.Thread(target=repeat, name="retoma-insist", daemon=True).start()
