"""A training process: started, listened to, killed when it is silent, and never outlived by itself.

It speaks `training.ports` messages over a pipe of its own; what it prints is only log. Three things end it with
us: we kill its process group, the end of its standard input (which it watches), and the kernel's parent-death
signal. The last follows the *thread* that started it, so call `Child.run` from the main thread.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

import psutil
from pydantic import ValidationError

from tasks.ending import Ending, count_oom_kills, oom_kill_files
from tasks.relay import LineSplitter, Relay
from tasks.silence import Silence
from tasks.stack import main_stack
from training.config import SupervisorConfig
from training.errors import Unavailable
from training.guard import STOP_WORD
from training.ports import Done, Failed, Message, Regroup, decode_message

TRAINING_COMMAND = (sys.executable, "-m", "training.process")
GROUP_COMMAND = (sys.executable, "-m", "training.group")
TICK_SECONDS = 0.1
VOUCH_SECONDS = 2.0
STACK_SECONDS = 0.5
STACK_LINES = 300
KILL_SECONDS = 10.0
READ_BYTES = 1 << 16


class Child:
    """One training process.

    Args:
        command: what to start; `--messages FD` is added.
        request: one line of JSON for its standard input, which stays open as long as we live.
        on_message: called for each message, in the thread of `run`. Must be quick.
        show: receives a line of its output, at a bounded rate.
        limits: the silences that it is allowed. Lines that it prints do not count.
        vouch: called every few seconds with what it has announced, if anything, while it is within its limits.
        clock: seconds, monotonic.

    Attributes:
        ending: how it ended, also when `run` raises.
    """

    def __init__(
        self,
        command: Sequence[str],
        request: str,
        *,
        on_message: Callable[[Message], None],
        show: Callable[[str], None],
        limits: SupervisorConfig,
        vouch: Callable[[str | None], None] = lambda _: None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = command
        self._request = request
        self._on_message = on_message
        self._limits, self._vouch = limits, vouch
        self._silence = Silence(limits, clock)
        self._cwd, self._environment = cwd, environment
        self._clock = clock
        self._relay = Relay(show, clock=clock)
        self._show = show
        self._done: Done | None = None
        self._failed: Failed | None = None
        self._regroup: str | None = None
        self._garbage_lines = 0
        self._oom_files = oom_kill_files()
        self._silent_seconds: float | None = None
        self._stack: list[str] | None = None  # what it prints is its stack
        self.ending: Ending | None = None
        self._group: int | None = None  # only as long as the number cannot belong to another
        self._because: str | None = None

    def kill(self, why: str) -> None:
        """Kill it and all that it started, from any thread. Nothing happens where it has ended."""
        group = self._group
        if group is not None:
            self._because = self._because or why
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def run(self) -> Ending:
        """Start it and return how it ended. Whatever is raised here, a signal included, it is dead afterwards."""
        with self._started() as process:
            try:
                self._supervise(process)
            except BaseException:
                self._stop(process)
                raise
        assert self.ending is not None  # noqa: S101 - it is told when the process has ended
        return self.ending

    def _supervise(self, process: subprocess.Popen[bytes]) -> None:
        """Listen until it ends, or until its silence is longer than it may be."""
        known = psutil.Process(process.pid)
        self._silence = Silence(self._limits, self._clock)
        vouched = self._clock()
        while not has_exited(process.pid):
            self._pump(TICK_SECONDS)
            status = _status_of(known)
            if verdict := self._silence.verdict(status):
                self._silent_seconds, self._because = self._silence.seconds, self._because or verdict
                if status != psutil.STATUS_STOPPED and self._silence.has_spoken:
                    self._ask_for_stack(process)
                return
            if self._silence.has_spoken and self._clock() - vouched >= VOUCH_SECONDS:
                vouched = self._clock()
                self._vouch(self._silence.pause)

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        self._oom_kills = -count_oom_kills(self._oom_files)
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                [*self._command, "--messages", str(writing)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=[writing],
                process_group=0,  # so that loader workers can be killed with it
                cwd=self._cwd,
                env=self._environment,
            )
            self._group = process.pid
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        with ExitStack() as pipes:
            messages = pipes.enter_context(os.fdopen(reading, "rb"))
            for pipe in (process.stdin, process.stdout):
                pipes.enter_context(pipe or nullcontext())
            self._selector = pipes.enter_context(selectors.DefaultSelector())
            try:
                self._listen(messages, self._take_message)
                self._listen(process.stdout, self._take_line)
                self._send(process)
                yield process
            finally:
                self._end(process)

    def _send(self, process: subprocess.Popen[bytes]) -> None:
        rest = memoryview(self._request.encode() + b"\n")
        with suppress(BrokenPipeError):  # dead already: the ending says why
            while rest and process.stdin:
                rest = rest[os.write(process.stdin.fileno(), rest) :]

    def _listen(self, pipe: IO[bytes] | None, take: Callable[[bytes], None]) -> None:
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe.fileno(), selectors.EVENT_READ, (LineSplitter(), take))

    def _pump(self, timeout_seconds: float) -> bool:
        """Take in what the pipes hold. False: nothing came in time."""
        ready = self._selector.select(timeout_seconds) if self._selector.get_map() else []
        if not ready and not self._selector.get_map():
            time.sleep(timeout_seconds)
        for key, _ in ready:
            splitter, take = key.data
            data = os.read(key.fd, READ_BYTES)
            for line in splitter.feed(data) if data else splitter.flush():
                take(line)
            if not data:
                self._selector.unregister(key.fd)
        return bool(ready)

    def _take_message(self, line: bytes) -> None:
        try:
            message = decode_message(line)
        except ValidationError:
            self._garbage_lines += 1
            if self._garbage_lines == 1:
                self._show(f"ignored a line that is no message: {line[:200]!r}")
            return
        self._silence.hear(message)
        if isinstance(message, Done):
            self._done = message
        elif isinstance(message, Failed):
            self._failed = message
        elif isinstance(message, Regroup):
            self._regroup = message.reason
        self._on_message(message)

    def _ask_for_stack(self, process: subprocess.Popen[bytes]) -> None:
        """Take what it prints at the signal for its stack. That comes at once, or, out of the kernel, never."""
        self._stack = []
        process.send_signal(signal.SIGUSR2)
        deadline = self._clock() + STACK_SECONDS
        while self._clock() < deadline and (self._pump(TICK_SECONDS) or not self._stack):
            pass

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ask it to leave, and listen while it does: it may commit what it has."""
        with suppress(OSError):
            if process.stdin:  # where no shell in between swallows the wish, as it would a signal
                os.write(process.stdin.fileno(), STOP_WORD + b"\n")
        deadline = self._clock() + self._limits.grace_seconds
        while not has_exited(process.pid) and self._clock() < deadline:
            self._pump(TICK_SECONDS)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # Before it is reaped, its number cannot belong to another group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._group = None
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise Unavailable(
                f"training process {process.pid} does not even end by SIGKILL",
                hint="a disk or a device of this node does not answer: take the node out of the pool",
            ) from error
        while self._pump(0):
            pass
        self._relay.close()
        self._oom_kills += count_oom_kills(self._oom_files)
        self.ending = Ending(
            pid=process.pid,
            returncode=process.returncode,
            done=self._done,
            failed=self._failed,
            regroup=self._regroup,
            killed_because=self._because,
            silent_seconds=self._silent_seconds,
            stack=main_stack(self._stack or ()) or (self._failed.report if self._failed else None),
            oom_kills=self._oom_kills,
            tail=self._relay.tail,
        )

    def _take_line(self, line: bytes) -> None:
        if self._stack is None:
            self._relay.line(line)
        else:  # the report holds the main thread's part, the log all
            self._stack.append(line.decode("utf-8", "replace"))
            if len(self._stack) <= STACK_LINES:
                self._show(self._stack[-1])


def _status_of(process: psutil.Process) -> str | None:
    try:
        return str(process.status())
    except psutil.Error:
        return None


def has_exited(pid: int) -> bool:
    """Whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
