"""How long a group stands still when one of its ranks is frozen, or one of its nodes is lost.

Real processes under the real supervisor of a range; a fault at a random moment, again and again in one training.
torch's own launcher with a plain DDP loop stands beside.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from infra.beat import Progress
from infra.mlflow_runs import RunStatus
from tasks.drill.job import DRILLED
from tasks.order import RangeOrder
from tasks.range import RangeSupervisor
from training.config import JobConfig, parse_config
from training.errors import Preempted
from training.ports import Gathering

HOME = Path(__file__).parents[1]
STEP_SECONDS = 0.1
SETTLE_STEPS = 12  # before a fault: a checkpoint lies behind them
LIMIT_SECONDS = 120.0
LOOK_SECONDS = 0.02
TORCH_TIMEOUT_SECONDS = 5.0  # of collectives: with torch's own 30 minutes nobody would wait for the end
GPT = {"n_layer": 1, "d_model": 64, "context": 32, "n_head": 2}
PARALLEL: dict[str, dict[str, Any]] = {
    "freeze-rank": {"world": 4},
    "kill-rank": {"world": 4},
    "lose-node": {"world": 4, "nodes": 2, "min_nodes": 1},
}


@dataclass
class Trial:
    """One fault. Seconds from it until somebody named what it hit, and until the group made its next step."""

    named_seconds: float | None = None
    recovery_seconds: float | None = None
    grown_seconds: float | None = None  # from the start of another node until the larger group made a step


class Quiet:
    """Nobody is told."""

    def attempt_started(self, token: int, start: int, stop: int, who: Mapping[str, Any]) -> None:
        """See `tasks.order.Publisher`."""

    def attempt_ended(self, token: int, status: RunStatus, reason: str) -> None:
        """See `tasks.order.Publisher`."""

    def notify(self) -> None:
        """See `tasks.order.Publisher`."""

    def profiled(self, path: str) -> None:
        """See `tasks.order.Publisher`."""


class RankLog(logging.Handler):
    """Reads in the log which process is which rank now."""

    def __init__(self) -> None:
        super().__init__()
        self.pids: dict[int, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        if found := re.search(r"rank (\d+) is process (\d+)", record.getMessage()):
            self.pids[int(found[1])] = int(found[2])


@dataclass
class FixedCompany:
    """Other nodes come by themselves."""

    gathering: Gathering
    here: tuple[str, ...] = ()


@dataclass
class Steps:
    """The steps that processes have written down, one file each."""

    folder: Path
    known: set[str] = field(default_factory=set)

    def forget(self) -> None:
        """From here on only processes count that have made no step yet."""
        self.known = {file.name for file in self.folder.glob("*")}

    def fresh(self) -> list[float]:
        """Times of the steps of the process that counts and began first."""
        files = [file for file in self.folder.glob("*") if file.name not in self.known]
        times = [
            [float(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
            for file in files
        ]
        return min((each for each in times if each), default=[], key=lambda each: each[0])


def measure_ours(fault: str, count: int, corpus: Path, scratch: Path, seed: int) -> list[Trial]:
    """Faults in one training under a `RangeSupervisor`, in the main thread of this process."""
    scratch.mkdir(parents=True)
    config = _config(fault, scratch)
    order = RangeOrder(
        run="bench",
        start=0,
        stop=config.epochs,
        attempt=1,
        config=config,
        requested="",
        store_url=str(scratch / "store"),
    )
    heard: list[tuple[float, Progress]] = []
    company: Any = None
    if config.parallel.nodes > 1:
        company = FixedCompany(Gathering(host="127.0.0.1", port=_free_port(), ticket=secrets.token_hex(8)))
    ranks, logger = RankLog(), logging.getLogger("benchmarks.ranks")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(ranks)
    supervisor = _Supervisor(
        order=order,
        root=HOME,
        flow_run_id="benchmark",
        registry=None,
        publisher=Quiet(),
        on_progress=lambda progress: heard.append((time.time(), progress)),
        logger=logger,
        company=company,
    )
    supervisor.corpus = corpus
    steps, rng = Steps(scratch / "drill" / "steps"), random.Random(seed)
    scene = _Scene(fault, supervisor, heard, steps, ranks, rng, company, corpus)
    thread = threading.Thread(target=scene.play, args=(count,), daemon=True)
    thread.start()
    with contextlib.suppress(Preempted):
        supervisor.run()
    thread.join(LIMIT_SECONDS)
    if scene.error is not None:
        raise scene.error
    return scene.trials


class _Supervisor(RangeSupervisor):
    """The real one, on data that was made here and is no version of anything."""

    corpus: Path

    def _verify_data(self) -> Path:
        return self.corpus


@dataclass
class _Scene:
    fault: str
    supervisor: RangeSupervisor
    heard: list[tuple[float, Progress]]
    steps: Steps
    ranks: RankLog
    rng: random.Random
    company: FixedCompany | None
    corpus: Path
    trials: list[Trial] = field(default_factory=list)
    error: BaseException | None = None
    _node: subprocess.Popen[bytes] | None = None

    def play(self, count: int) -> None:
        try:
            if self.company is not None:
                self._node = self._lend()
            for number in range(count):
                self.trials.append(self._trial())
                print(f"{self.fault} {number + 1}: {self.trials[-1]}", flush=True)
        except BaseException as error:  # noqa: BLE001 - raised in the main thread
            self.error = error
        finally:
            self.supervisor.give_up(Preempted("the benchmark is over"))
            if self._node is not None:
                _kill_group(self._node)

    def _trial(self) -> Trial:
        self._wait(lambda: len(self.steps.fresh()) >= SETTLE_STEPS, "steps")
        time.sleep(self.rng.uniform(0, 0.5))
        self.steps.forget()
        told, trial = len(self.heard), Trial()
        word = self._make()
        at = time.time()
        verdict = self._wait(lambda: self._verdict(told, word), f"a verdict that says {word!r}")
        trial.named_seconds = verdict - at
        trial.recovery_seconds = self._wait(lambda: next(iter(self.steps.fresh()), None), "a step") - at
        if self.company is not None:
            self._wait(lambda: len(self.steps.fresh()) >= SETTLE_STEPS, "steps of the smaller group")
            self.steps.forget()
            at = time.time()
            self._node = self._lend()
            trial.grown_seconds = self._wait(lambda: next(iter(self.steps.fresh()), None), "a larger group") - at
        return trial

    def _make(self) -> str:
        """Make the fault. Returns what a verdict must name."""
        if self._node is not None:
            _kill_group(self._node)
            return f"process {self._node.pid} was lost"
        rank = self.rng.choice(sorted(self.ranks.pids))
        os.kill(self.ranks.pids[rank], signal.SIGKILL if self.fault == "kill-rank" else signal.SIGSTOP)
        return (
            f"rank {rank} (pid {self.ranks.pids[rank]}) was {'killed' if self.fault == 'kill-rank' else 'frozen'}"
        )

    def _verdict(self, told: int, word: str) -> float | None:
        return next((at for at, p in self.heard[told:] if p.error is not None and word in p.error), None)

    def _lend(self) -> subprocess.Popen[bytes]:
        assert self.company is not None
        gathering = self.company.gathering
        command = [sys.executable, "-m", "training.node", "--join", f"{gathering.host}:{gathering.port}"]
        node = subprocess.Popen(
            [*command, "--data", str(self.corpus)],
            cwd=HOME,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        assert node.stdin is not None
        node.stdin.write(gathering.ticket.encode() + b"\n")
        node.stdin.flush()
        return node

    def _wait(self, look: Callable[[], Any], what: str) -> Any:
        return wait_for(look, f"{self.fault}: {what}")


def measure_torch(fault: str, count: int, scratch: Path) -> list[Trial]:
    """The same faults, under torchrun with its defaults but for the time that a collective may take."""
    return [_torch_trial(fault, scratch / str(number)) for number in range(count)]


def _torch_trial(fault: str, folder: Path) -> Trial:
    folder.mkdir(parents=True)
    steps = Steps(folder)
    with contextlib.ExitStack() as agents:
        if fault == "lose-node":
            port = _free_port()
            options = ["--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
            options += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "bench"]
            agents.enter_context(_torchrun(options, folder))
            time.sleep(3)  # it hosts the rendezvous
            lost = agents.enter_context(_torchrun(options, folder))
            wait_for(
                lambda: len(list(folder.glob("*"))) >= 4 and len(steps.fresh()) > SETTLE_STEPS, "torch's steps"
            )
            steps.forget()
            at = time.time()
            _kill_group(lost)
        else:
            agents.enter_context(_torchrun(["--standalone", "--nproc-per-node", "4"], folder))
            wait_for(
                lambda: len(list(folder.glob("*"))) >= 4 and len(steps.fresh()) > SETTLE_STEPS, "torch's steps"
            )
            pid = int(sorted(file.name for file in folder.glob("*"))[1])
            steps.forget()
            at = time.time()
            os.kill(pid, signal.SIGKILL if fault == "kill-rank" else signal.SIGSTOP)
        first = wait_for(lambda: next(iter(steps.fresh()), None), f"{fault}: torch trains again")
    return Trial(recovery_seconds=first - at)


@contextlib.contextmanager
def _torchrun(options: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--max-restarts", "3"]
    agent = subprocess.Popen(
        [*command, "-m", "benchmarks.torch_ranks", str(folder), str(TORCH_TIMEOUT_SECONDS)],
        cwd=HOME,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        yield agent
    finally:
        _kill_group(agent)


def wait_for(look: Callable[[], Any], what: str) -> Any:
    """Look until there is something. Raises `TimeoutError`."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT_SECONDS:g} s")
        time.sleep(LOOK_SECONDS)
    return found


def _config(fault: str, scratch: Path) -> JobConfig:
    inside = {"job": "training.jobs.char_gpt:CharGpt", "params": GPT}
    return parse_config(
        {
            "job": DRILLED,
            "name": "bench",
            "epochs": 10_000,
            "epochs_per_range": 10_000,
            "batch_size": 16,
            "params": {**inside, "folder": str(scratch / "drill"), "step_seconds": STEP_SECONDS},
            "checkpoint": {"every_steps": 5, "max_lost_steps": 10},
            "parallel": PARALLEL[fault],
        }
    )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started, also what has made a process group of its own."""
    children = []
    with contextlib.suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.Error):
            child.kill()
    process.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
