"""Asked to leave: SIGTERM, a cancellation or a notice of the cloud become one exception in the main thread."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Leave(BaseException):
    """Somebody asked this process to leave. No error: an `except Exception` on its way must not swallow it."""


class Departure:
    """Raises `Leave` in the body of a `with`, once, however often and by whomever we are asked.

    Between the bodies a request is only remembered. It takes SIGTERM over from Prefect, whose own handler would
    raise again at the second signal, in the middle of the last save, and report a crash over whatever state the
    run has by then. It never gives it back: a signal that comes after the last commit, while the flow run reports
    how it ended, changes nothing. Main thread only, but for `ask`.
    """

    def __init__(self) -> None:
        self.why: str | None = None
        self._armed = False

    def listen(self) -> None:
        """Take over SIGTERM."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def ask(self, why: str) -> None:
        """Ask for it from any thread of this process."""
        if self.why is None:
            self.why = why
            # to the main thread itself, so that it wakes up from whatever it waits for
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def __enter__(self) -> Departure:
        self._armed = True
        if self.why is not None:
            self._raise()
        return self

    def __exit__(self, *_: object) -> None:
        self._armed = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as `signal` calls it
        if self.why is None:
            self.why = signal.Signals(number).name
        if self._armed:
            self._raise()

    def _raise(self) -> None:
        self._armed = False
        raise Leave(self.why)
