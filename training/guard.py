"""A training process must not outlive its supervisor: whatever survives is fenced, but it also holds a GPU.

Nothing here needs the goodwill of the code that is guarded: the kernel, a thread that reads a pipe, and a timer
and a signal handler in C, which work while other code holds the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import faulthandler
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
STOP_WORD = b"stop"
# The supervisor asks for stacks, kills and reports; the timer here is for when there is nobody to do that.
TIMER_MARGIN_SECONDS = 3.0


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel for SIGKILL when the thread that started this process ends. Linux; elsewhere a no-op.

    Args:
        parent: pid that is expected as parent; if it is gone already, this process ends now.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)  # it died before the kernel was asked


def watch_lifeline(lifeline: int) -> None:
    """End this process as soon as the other side of a pipe closes, whatever else it is doing.

    The word `stop` on the pipe is a SIGTERM that no shell in between can swallow.

    Args:
        lifeline: file descriptor of the reading end. Read without a buffer: a buffer's lock, held by a thread
            that waits, makes the interpreter abort when it shuts down.
    """

    def watch() -> None:
        while data := os.read(lifeline, 4096):
            if STOP_WORD in data:
                os.kill(os.getpid(), signal.SIGTERM)
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, name="retoma-lifeline", daemon=True).start()


class HangTimer:
    """Ends this process with its stacks in the log when it makes no progress and nobody else ends it.

    It counts while the process is stopped: one that was frozen for longer ends as soon as it wakes, also where the
    loop is quicker to wind the timer than the timer to run out.
    Stacks are written on SIGUSR2, too, which is how a supervisor asks for them.
    """

    def __init__(self) -> None:
        self._file = _log_that_never_blocks()
        self._until = math.inf
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)

    def wind(self, seconds: float) -> None:
        """Count anew: the next sign of progress comes within so many seconds, by the supervisor's count."""
        now, seconds = time.monotonic(), seconds + TIMER_MARGIN_SECONDS
        if now > self._until:
            with suppress(OSError):
                os.write(self._file, f"Timeout (woke {now - self._until:.1f} s too late)!\n".encode())
            os._exit(1)
        self._until = now + seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)


def _log_that_never_blocks() -> int:
    """Where stacks go. With the reader of the log frozen and its pipe full, a write would keep us alive."""
    try:
        return os.open("/proc/self/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError:  # no Linux, or a socket
        return 2
