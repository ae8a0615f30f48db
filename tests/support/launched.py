"""A group of ranks as its supervisor starts it, without a supervisor."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from training.checkpoint.store import LocalStore
from training.checkpoint.token import claim, mark_run
from training.config import JobConfig
from training.ports import Beat, Done, Failed, Message, RangeSpec, Restored, decode_message

ROOT = Path(__file__).parents[2]


class Launched:
    """`python -m training.group` (or `.process`) on one attempt at all epochs of a run."""

    def __init__(
        self,
        config: JobConfig,
        store: Path,
        data: Path,
        module: str = "training.group",
        profile_folder: Path | None = None,
    ) -> None:
        self.config, self.store = config, LocalStore(store)
        mark_run(self.store, "r")
        self.token = claim(self.store, "r", {})
        spec = RangeSpec(
            run="r",
            start=0,
            stop=config.epochs,
            token=self.token,
            store_url=self.store.url,
            config=config,
            data_folder=str(data),
            profile_folder=str(profile_folder) if profile_folder else None,
        )
        reading, writing = os.pipe()
        self.log = store.with_suffix(f".{self.token}.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["nice", "-n", "15", sys.executable, "-m", module, "--messages", str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                process_group=0,
                cwd=ROOT,
            )
        os.close(writing)
        self._messages = os.fdopen(reading, "rb")
        assert self.process.stdin is not None
        self.process.stdin.write(spec.model_dump_json().encode() + b"\n")
        self.process.stdin.flush()
        self.heard: list[Message] = []

    def messages(self) -> Iterator[Message]:
        for line in self._messages:
            message = decode_message(line)
            self.heard.append(message)
            yield message

    def until_step(self, step: int) -> None:
        """Wait until it has trained so far."""
        for message in self.messages():
            if isinstance(message, Beat) and message.position.step >= step:
                return
        raise AssertionError(f"it ended before step {step}: {self.log.read_text()[-3000:]}")

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of the ranks, by number."""
        found = re.findall(r"rank (\d+) is process (\d+)", self.log.read_text())
        return {int(rank): psutil.Process(int(pid)) for rank, pid in found}

    def end(self, seconds: float = 60) -> Done | Failed:
        """Its last word."""
        last: Any = None
        for message in self.messages():
            last = message
        self.process.wait(seconds)
        assert isinstance(last, Done | Failed), f"{last}: {self.log.read_text()[-3000:]}"
        return last

    def restored(self) -> Restored:
        """What it started from."""
        return next(message for message in self.heard if isinstance(message, Restored))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._messages.close()
        if self.process.stdin is not None:
            self.process.stdin.close()


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> None:
    """None of them runs after so long."""
    deadline = time.monotonic() + seconds
    while left := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
