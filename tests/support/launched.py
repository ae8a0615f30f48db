"""A group of ranks as its supervisor starts it, on one node or several, without a supervisor."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.support.cuts import gpt_config, write_corpus
from training.checkpoint.store import LocalStore
from training.checkpoint.token import claim, mark_run
from training.config import JobConfig
from training.ports import Beat, Done, Failed, Gathering, Message, RangeSpec, Restored, decode_message

ROOT = Path(__file__).parents[2]
STEPS = 6  # of all three epochs
TICKET = "a-ticket"


class Launched:
    """`python -m training.group` (or `.process`) on one attempt at all epochs of a run."""

    def __init__(
        self,
        config: JobConfig,
        store: Path,
        data: Path,
        module: str = "training.group",
        gathering: Gathering | None = None,
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
            gathering=gathering,
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


class LentNode:
    """`python -m training.node`."""

    def __init__(self, gathering: Gathering, ticket: str, log: Path, lease_seconds: float = 60) -> None:
        self.log = log
        place = f"{gathering.host}:{gathering.port}"
        command = ["nice", "-n", "15", sys.executable, "-m", "training.node", "--join", place, "--name", log.stem]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, "--lease-seconds", str(lease_seconds)],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                process_group=0,
                cwd=ROOT,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(ticket.encode() + b"\n")
        self.process.stdin.flush()

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of its ranks that live, by number."""
        found = re.findall(r"rank (\d+) is process (\d+)", self.log.read_text())
        return {int(rank): psutil.Process(int(pid)) for rank, pid in found if psutil.pid_exists(int(pid))}

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes, as a machine that is frozen or lost."""
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


class Scene:
    """Groups that train the same job, which does what files say."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, write_corpus(folder / "corpus")
        self.orders = folder / "orders"
        self.orders.mkdir()
        self._launched: list[Launched] = []
        self._nodes: list[LentNode] = []
        self.gathering = Gathering(host="127.0.0.1", port=free_port(), ticket=TICKET)

    def tell(self, name: str, text: object) -> None:
        (self.orders / name).write_text(str(text))

    def quick(self) -> None:
        (self.orders / "slow").unlink()

    def config(self, world: int, parallel: dict[str, Any] | None = None, **changes: Any) -> JobConfig:
        params = {**gpt_config().params, "n_layer": 3, "folder": str(self.orders)}
        job = "tests.support.slow_gpt:SlowGpt"
        return gpt_config(job=job, params=params, parallel={"world": world, **(parallel or {})}, **changes)

    def start(self, world: int = 2, name: str = "run", **changes: Any) -> Launched:
        config = self.config(world, **changes)
        gathering = self.gathering if config.parallel.nodes > 1 else None
        self._launched.append(Launched(config, self.folder / name, self.data, gathering=gathering))
        return self._launched[-1]

    def lend(self, ticket: str = TICKET, **options: Any) -> LentNode:
        """One more node."""
        log = self.folder / f"node{len(self._nodes)}.log"
        self._nodes.append(LentNode(self.gathering, ticket, log, **options))
        return self._nodes[-1]

    def straight(self, world: int = 2, **changes: Any) -> Done:
        """The same, undisturbed."""
        last = self.start(world, "straight", **changes).end()
        assert isinstance(last, Done)
        return last

    def close(self) -> None:
        for group in self._launched:
            group.close()
        for node in self._nodes:
            node.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def wait_until_gone(processes: list[psutil.Process], seconds: float) -> None:
    """None of them runs after so long."""
    deadline = time.monotonic() + seconds
    while left := [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
