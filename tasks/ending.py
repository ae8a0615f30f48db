"""How a training process ended, told so that a person knows what to look at next."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from training.errors import KINDS, Preempted, RetomaError, Unavailable
from training.ports import Done, Failed

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
TIMER_LINE = "Timeout ("  # how faulthandler begins when its timer has run out


@dataclass(frozen=True)
class Ending:
    """What is known after a training process has ended.

    Attributes:
        pid, returncode: as `subprocess` says it: a negative code is the signal that killed it.
        done: its last word when all went well.
        failed: its last word when it knew what went wrong.
        regroup: why a group asked to be started again with other nodes; it has committed.
        killed_because: why we killed it; None if we did not.
        silent_seconds: between its last sign of progress and our verdict, if silence was the reason.
        stack: the newest calls of its main thread, if it hung; of a group, what it has reported of its ranks.
        oom_kills: processes that the kernel killed for memory in our control group meanwhile.
        tail: the last lines that it printed.
    """

    pid: int
    returncode: int
    done: Done | None = None
    failed: Failed | None = None
    regroup: str | None = None
    killed_because: str | None = None
    silent_seconds: float | None = None
    stack: str | None = None
    oom_kills: int = 0
    tail: tuple[str, ...] = ()

    def error(self) -> RetomaError | None:
        """What to raise; None when the range is done.

        A range that is done stays done when the interpreter crashes on its way out: the checkpoint is committed.
        """
        if self.done is not None:
            return None
        if self.failed is not None:
            return self._told(self.failed)
        message = f"training process {self.pid} {self.cause()}{self._stack()}{self._last_words()}"
        if self.returncode == -signal.SIGTERM:
            return Preempted(message)
        return Unavailable(message, hint=self._hint())

    def cause(self) -> str:
        """One clause: `was killed by SIGKILL (...)`, `ended with exit code 3`."""
        if self.killed_because is not None:
            return f"{self.killed_because} and was killed"
        if self.returncode >= 0:
            if any(line.startswith(TIMER_LINE) for line in self.tail):
                return "made no progress and was ended by its own timer"
            word = " without saying that it is done" if self.returncode == 0 else ""
            return f"ended with exit code {self.returncode}{word}"
        name = signal_name(-self.returncode)
        if self._out_of_memory():
            return f"was killed by {name}: out of memory"
        return f"was killed by {name}"

    def _out_of_memory(self) -> bool:
        return self.returncode == -signal.SIGKILL and self.killed_because is None and self.oom_kills > 0

    def _told(self, failed: Failed) -> RetomaError:
        if failed.error in KINDS:
            return failed.exception()
        return RetomaError(f"{failed.error}: {failed.message}{self._last_words()}", hint=failed.hint)

    def _stack(self) -> str:
        return f"\nits stack, the newest call first:\n{indent(self.stack, '  ')}" if self.stack else ""

    def _last_words(self) -> str:
        return "\nits last lines:\n  " + "\n  ".join(self.tail) if self.tail else ""

    def _hint(self) -> str | None:
        if self._out_of_memory():
            return "give the node more memory, or lower batch_size, loader_workers or checkpoint.encode_threads"
        if self.silent_seconds is not None:
            return "if it is honest work that takes so long, raise the limit in the supervisor section of the job"
        if self.returncode == -signal.SIGKILL:
            return "somebody, or the kernel for want of memory (see `dmesg`), killed it"
        return None


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 99` for what has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def oom_kill_files(own: Path = OWN_CGROUP, top: Path = CGROUPS) -> list[Path]:
    """Files of our control group that count kills for want of memory (versions 2 and 1); empty elsewhere."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    files = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files.append(top / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            files.append(top / "memory" / path.lstrip("/") / "memory.oom_control")
    # inside a container the group's own folder is often mounted as the top
    files += [top / "memory.events", top / "memory" / "memory.oom_control"]
    return [file for file in dict.fromkeys(files) if file.is_file()]


def count_oom_kills(files: Sequence[Path]) -> int:
    """How often the kernel has killed for want of memory so far, by the first file that says it."""
    for file in files:
        try:
            fields = dict(line.split(maxsplit=1) for line in file.read_text().splitlines() if " " in line)
            return int(fields["oom_kill"])
        except (OSError, KeyError, ValueError):
            continue
    return 0
