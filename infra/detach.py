"""Starts a command as a background process of its own: `python -I -S detach.py LOG COMMAND...` prints its pid.

A script rather than a function, so that the new process is no child of the caller (nothing to reap, nothing
that a closing terminal takes along) and forks from an interpreter without threads. Imports only os, signal, sys.
"""

import os
import signal
import sys


def main(log: str, *command: str) -> None:
    """Fork, print the child's pid, leave; the child becomes `command` in a new session, output to `log`."""
    pid = os.fork()
    if pid:
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        os._exit(0)
    os.setsid()
    # A shell's `&` hands down SIGINT as ignored, and then Prefect's workers ignore SIGTERM as well.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 64)
    os.execv(command[0], command)  # noqa: S606 - no shell is the point


if __name__ == "__main__":
    main(*sys.argv[1:])
