"""Faults for stores, files and processes: wrappers around the real thing, none of them a stub of it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from training.checkpoint.store import Store
from training.checkpoint.store.wrapper import Request, StoreWrapper

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
Rule = Callable[[str, str], None]


class RuledStore(StoreWrapper):
    """A store before whose every operation a rule is asked; it may wait or raise. Counts what was asked for.

    `FaultyStore` does what it was told beforehand; a rule can look at the test around it.
    """

    def __init__(self, inner: Store, rule: Rule = lambda operation, key: None) -> None:
        super().__init__(inner)
        self.rule = rule
        self.operations: list[tuple[str, str]] = []
        self.written_bytes = 0

    def _call(self, request: Request, ask: Callable[[], T]) -> T:
        self.operations.append((request.operation, request.key))
        self.rule(request.operation, request.key)
        self.written_bytes += request.sent_bytes
        return ask()


class Gate:
    """A rule that holds back matching operations until it is opened."""

    def __init__(self, operation: str, prefix: str) -> None:
        self.operation, self.prefix = operation, prefix
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, operation: str, key: str) -> None:
        if operation == self.operation and key.startswith(self.prefix):
            self.reached.set()
            assert self.opened.wait(60), f"nobody let {operation} {key} through"


def fail_on(operation: str, prefix: str, error: Exception, times: int = 1) -> Rule:
    """A rule that fails the next `times` matching operations."""
    left = [times]

    def rule(asked: str, key: str) -> None:
        if asked == operation and key.startswith(prefix) and left[0] > 0:
            left[0] -= 1
            raise error

    return rule


@contextmanager
def failing_writes(number: int, after_bytes: int) -> Iterator[None]:
    """Within: `os.write` takes `after_bytes` in all and then fails with an errno, as a full disk does."""
    real, left = os.write, [after_bytes]

    def write(descriptor: int, data: Any) -> int:
        if descriptor <= 2:
            return real(descriptor, data)
        allowed = memoryview(data).cast("B")[: left[0]]
        if not allowed:
            raise OSError(number, os.strerror(number))
        left[0] -= len(allowed)
        return real(descriptor, allowed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", write)
        yield


@contextmanager
def failing_fsync(number: int, *, of_folders: bool) -> Iterator[None]:
    """Within: `os.fsync` of files, or of folders, fails with an errno."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir() is of_folders:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield


def no_space(number: int = errno.ENOSPC) -> OSError:
    """What the kernel says when a disk is full, or a quota is (EDQUOT)."""
    return OSError(number, os.strerror(number))


def run_script(
    source: str, *arguments: object, check: bool = True, timeout_seconds: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run Python source in a process of its own, from the project's root, warnings as errors."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", source, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def start_script(source: str, *arguments: object) -> subprocess.Popen[str]:
    """Like `run_script`, but only started; its output is a pipe, and the caller must end it."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", source, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


class PowerCut:
    """Records what reaches the disk, and tells what would be left if the power failed at a given moment.

    Pessimistic, as POSIX allows: bytes that were never fsynced are lost, and so is a name whose folder was not
    fsynced after the name appeared.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.log: list[tuple[str, Path, Path]] = []  # (what, path, source of a link)
        real_fsync, real_link, real_mkdir = os.fsync, os.link, os.mkdir

        def fsync(descriptor: int) -> None:
            real_fsync(descriptor)
            path = Path(f"/proc/self/fd/{descriptor}").readlink()
            self.log.append(("sync", path, path))

        def link(source: Any, target: Any) -> None:
            real_link(source, target)
            self.log.append(("name", Path(target), Path(source)))

        def mkdir(path: Any, *arguments: Any) -> None:
            real_mkdir(path, *arguments)
            self.log.append(("name", Path(path), Path(path)))

        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "link", link)
        patch.setattr(os, "mkdir", mkdir)

    def survives(self, path: Path, moment: int | None = None) -> bool:
        """Whether a linked file would be there, whole, if the power failed after `moment` events."""
        log = self.log[:moment]
        synced = [(place, event[1]) for place, event in enumerate(log) if event[0] == "sync"]
        named = {event[1]: (place, event[2]) for place, event in enumerate(log) if event[0] == "name"}
        if path not in named:
            return False
        place, source = named[path]
        whole = any(at < place and synced_path == source for at, synced_path in synced)
        above = [path, *(parent for parent in path.parents if parent in named)]
        return whole and all(
            any(at > named[step][0] and synced_path == step.parent for at, synced_path in synced) for step in above
        )
