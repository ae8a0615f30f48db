"""Background processes of one state folder: start detached, find again, stop with everything they started.

Each process carries its folder and name in its environment, and so do all its descendants. They are found by
that mark and not by pid alone: a pid is reused, and children outlive their parents.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil
from pydantic import ValidationError

from training.config import Frozen
from training.errors import Unavailable

FOLDER_MARK = "_RETOMA_STACK_FOLDER"
PROCESS_MARK = "_RETOMA_STACK_PROCESS"
LOG_LIMIT_BYTES = 32 * 2**20
POLL_SECONDS = 0.02
KILL_SECONDS = 5.0
EXEC_LOOKS, EXEC_SECONDS = 50, 0.005


class Record(Frozen):
    """The pid file of one background process."""

    name: str
    pid: int
    mark: str
    started_seconds: float  # since the epoch
    log_offset_bytes: int  # where this process's output begins in the log


class ProcessTable:
    """The background processes whose pid files and logs live in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()

    def log(self, name: str) -> Path:
        """Log file of a process; grows over restarts."""
        return self._folder / "logs" / f"{name}.log"

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> Record:
        """Start `command` in a session of its own and write its pid file.

        Raises:
            Unavailable: the launcher failed.
        """
        log = self._open_log(name)
        mark = f"{name}:{secrets.token_hex(8)}"
        offset = log.stat().st_size
        launcher = [sys.executable, "-I", "-S", str(Path(__file__).with_name("detach.py"))]
        launched = subprocess.run(
            [*launcher, str(log), *command],
            env={**environment, FOLDER_MARK: str(self._folder), PROCESS_MARK: mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if launched.returncode:
            raise Unavailable(f"could not start {name}: {launched.stderr.strip()}")
        record = Record(
            name=name,
            pid=int(launched.stdout),
            mark=mark,
            started_seconds=time.time(),
            log_offset_bytes=offset,
        )
        pid_file = self._pid_file(name)
        pid_file.parent.mkdir(parents=True, exist_ok=True)
        pid_file.write_text(record.model_dump_json())
        return record

    def find(self, name: str) -> tuple[Record, psutil.Process] | None:
        """The living process `name` and its record; None when it is dead, a zombie, or was never started."""
        try:
            record = Record.model_validate_json(self._pid_file(name).read_text())
            process = psutil.Process(record.pid)
            marked = _environment(process).get(PROCESS_MARK) == record.mark
        except (FileNotFoundError, ValidationError, psutil.Error):
            return None
        return (record, process) if marked else None

    def members(self, name: str | None = None) -> list[psutil.Process]:
        """Every living process of this folder, or of `name` and its descendants. Never our own process."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = _environment(process)
                if environment.get(FOLDER_MARK) != str(self._folder) or process.pid == os.getpid():
                    continue
                if name is None or environment.get(PROCESS_MARK, "").partition(":")[0] == name:
                    found.append(process)
        return found

    def forget(self, name: str) -> None:
        """Remove the pid file of a stopped process."""
        self._pid_file(name).unlink(missing_ok=True)

    def tail(self, name: str, lines: int = 15) -> str:
        """Last lines that the newest process of that name wrote."""
        try:
            text = self.log(name).read_bytes()
            record = Record.model_validate_json(self._pid_file(name).read_text())
        except (FileNotFoundError, ValidationError):
            return ""
        own = text[record.log_offset_bytes :].decode(errors="replace").strip()
        return "\n".join(own.splitlines()[-lines:])

    def _pid_file(self, name: str) -> Path:
        return self._folder / "pids" / f"{name}.json"

    def _open_log(self, name: str) -> Path:
        log = self.log(name)
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LOG_LIMIT_BYTES:
            log.replace(log.with_suffix(".old.log"))
        log.touch()
        return log


def stop(processes: Iterable[psutil.Process], grace_seconds: float) -> list[psutil.Process]:
    """SIGTERM, wait up to `grace_seconds`, SIGKILL. Returns what is still alive (normally nothing)."""
    targets = list(processes)
    for process in targets:
        with contextlib.suppress(psutil.Error):
            process.terminate()
            process.resume()  # a frozen process takes SIGTERM only when it goes on
    alive = _wait_for_end(targets, grace_seconds)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return _wait_for_end(alive, KILL_SECONDS)


def is_frozen(process: psutil.Process) -> bool:
    """Whether the process was stopped by a signal (SIGSTOP, SIGTSTP)."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs. A zombie does not: it only waits for init, which may take its time."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _environment(process: psutil.Process) -> dict[str, str]:
    """Its environment. Empty for a moment while it becomes another program (execve): look again."""
    for _ in range(EXEC_LOOKS):
        environment = process.environ()
        if environment or not process.memory_info().vms:  # a kernel thread has none
            break
        time.sleep(EXEC_SECONDS)
    return environment


def _wait_for_end(processes: list[psutil.Process], timeout_seconds: float) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_seconds
    while alive := [process for process in processes if is_alive(process)]:
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    return alive
