"""A training process must not outlive its supervisor: whatever survives is fenced, but it also holds a GPU."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1


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


def exit_at_end_of(lifeline: int) -> None:
    """End this process as soon as the other side of a pipe closes, whatever else it is doing.

    Args:
        lifeline: file descriptor of the reading end. Read without a buffer: a buffer's lock, held by a thread
            that waits, makes the interpreter abort when it shuts down.
    """

    def watch() -> None:
        while os.read(lifeline, 4096):
            pass
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=watch, name="retoma-lifeline", daemon=True).start()
