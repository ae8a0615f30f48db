"""A training process: started, listened to, killed when it is silent, and never outlived by itself.

It speaks `training.ports` messages over a pipe of its own; what it prints is only log. Three things end it with
us: we kill its process group, the end of its standard input (which it watches), and the kernel's parent-death
signal. The last follows the *thread* that started it, so call `Child.run` from the main thread.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from tasks.ending import Ending, count_oom_kills, oom_kill_files
from tasks.relay import LineSplitter, Relay
from training.errors import Corrupt, RetomaError, Unavailable
from training.ports import Done, Failed, Message, decode_message

TRAINING_COMMAND = (sys.executable, "-m", "training.process")
TICK_SECONDS = 0.1
# A pause of our own loop that only a frozen machine or process explains; the child's silence then proves nothing.
FROZEN_SECONDS = 5.0
GRACE_SECONDS = 5.0
READ_BYTES = 1 << 16


class Child:
    """One training process.

    Args:
        command: what to start; `--messages FD` is added, unless `answers_on_stdout`.
        request: one line of JSON for its standard input, which stays open as long as we live.
        on_message: called for each message, in the thread of `run`. Must be quick.
        show: receives a line of its output, at a bounded rate.
        silence_seconds: without a message for this long it is killed. Lines that it prints do not count.
        grace_seconds: from SIGTERM to SIGKILL when we are told to stop.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        command: Sequence[str],
        request: str,
        *,
        on_message: Callable[[Message], None],
        show: Callable[[str], None],
        silence_seconds: float,
        grace_seconds: float = GRACE_SECONDS,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._command = command
        self._request = request
        self._on_message = on_message
        self._silence_seconds = silence_seconds
        self._grace_seconds = grace_seconds
        self._cwd, self._environment = cwd, environment
        self._clock = clock
        self._relay = Relay(show, clock=clock)
        self._show = show
        self._done: Done | None = None
        self._failed: Failed | None = None
        self._garbage_lines = 0
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
        files = oom_kill_files()
        kills_before = count_oom_kills(files)
        with self._started() as process:
            try:
                self._last_message = self._last_tick = self._clock()
                while not has_exited(process.pid):
                    self._pump(TICK_SECONDS)
                    if self._is_silent():
                        self._because = f"said nothing for {self._silence_seconds:g} s"
                        break
            except BaseException:
                self._stop(process)
                raise
            finally:
                self._end(process)
        return Ending(
            pid=process.pid,
            returncode=process.returncode,
            done=self._done,
            failed=self._failed,
            killed_because=self._because,
            oom_kills=count_oom_kills(files) - kills_before,
            tail=self._relay.tail,
        )

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
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
        with (
            os.fdopen(reading, "rb") as messages,
            process,
            selectors.DefaultSelector() as self._selector,
        ):
            self._listen(messages, self._take_message)
            self._listen(process.stdout, self._relay.line)
            self._send(process)
            yield process

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
        self._last_message = self._clock()
        if isinstance(message, Done):
            self._done = message
        elif isinstance(message, Failed):
            self._failed = message
        self._on_message(message)

    def _is_silent(self) -> bool:
        now = self._clock()
        if now - self._last_tick > FROZEN_SECONDS + TICK_SECONDS:
            self._last_message = now  # we slept ourselves, perhaps together with it
        self._last_tick = now
        return now - self._last_message > self._silence_seconds

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        """Ask it to leave, and listen while it does: it may commit what it has."""
        process.send_signal(signal.SIGTERM)
        deadline = self._clock() + self._grace_seconds
        while not has_exited(process.pid) and self._clock() < deadline:
            self._pump(TICK_SECONDS)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # Before it is reaped, its number cannot belong to another group.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        self._group = None
        process.wait()
        while self._pump(0):
            pass
        self._relay.close()


def has_exited(pid: int) -> bool:
    """Whether a child has ended, without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None


def ask(
    command: Sequence[str],
    request: Mapping[str, Any],
    *,
    timeout_seconds: float,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Start a process that reads one JSON line, answers with one JSON line on standard output, and ends.

    Raises:
        RetomaError: what the process failed with.
        Unavailable: it died, or did not answer in time.
        Corrupt: the answer is no JSON object.
    """
    try:
        done = subprocess.run(
            list(command),
            input=(json.dumps(request) + "\n").encode(),
            capture_output=True,
            timeout=timeout_seconds,
            cwd=cwd,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"{' '.join(command[1:])} did not answer within {timeout_seconds:g} s",
            hint="raise supervisor.silence_seconds if it really takes so long",
        ) from error
    said = done.stderr.decode("utf-8", "replace").splitlines()
    answers = [line for line in done.stdout.splitlines() if line.strip()]
    answer = answers[-1] if answers else b""
    if failure := _failure(answer, done.returncode, said):
        raise failure
    if done.returncode != 0:
        cause = Ending(pid=0, returncode=done.returncode).cause()
        raise Unavailable(f"{' '.join(command[1:])} {cause}:\n" + "\n".join(said[-15:]))
    try:
        value = json.loads(answer)
    except ValueError as error:
        raise Corrupt(f"{' '.join(command[1:])} answered {answer[:200]!r}") from error
    if not isinstance(value, dict):
        raise Corrupt(f"{' '.join(command[1:])} answered {answer[:200]!r}")
    return value


def _failure(answer: bytes, returncode: int, said: list[str]) -> RetomaError | None:
    with suppress(ValidationError):
        message = decode_message(answer)
        if isinstance(message, Failed):
            return Ending(pid=0, returncode=returncode, failed=message, tail=tuple(said[-15:])).error()
    return None
