"""The ranks of one node: started by torch's own agent, heard over a socket, ended together."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import psutil

from training.parallel.members import Members
from training.parallel.wire import STOP
from training.ports import Message, RangeSpec

PRELOAD = ["training.rank", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
MONITOR_SECONDS = 0.1
# Of threads that nobody has told otherwise, such as those of a process group. A product of matrices has other last
# bits with another number, so that this is not left to the environment; the training's own thread has `threads`.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
FOLDER_PREFIX = "retoma-group-"
VICTIMS_SECONDS = 0.3  # after a rank has died the others may say what they know
LAST_WORDS_SECONDS = 1.0  # from the end of one rank until the others have said what they know


@contextmanager
def launching(pipelines: bool = False) -> Iterator[Path]:
    """A process that forks ranks: its environment, its fork server that imports torch, and a folder of its own.

    Args:
        pipelines: whether the ranks will be stages of one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.update(ONE_THREAD)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")
    # a rank looks twice a second whether a message is there, and torch would warn each time that it is not
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["TORCH_MP_PARALLEL_START"] = "1"
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{os.getpid()}-"))
    tempfile.tempdir = str(folder)  # of this process: multiprocessing and torch leave files
    context = get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, "torch.distributed.pipelining"] if pipelines else PRELOAD)
    forkserver.ensure_running()  # it imports torch while this process does
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of launchers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


class LocalRanks:
    """The ranks of this node in one generation of a group.

    Args:
        spec: what to train, with the group as it is.
        folder: of this process.
        hear: receives what the lowest of the ranks says of the training.
        relay: receives every line of a rank, and which rank.

    Attributes:
        members: who is heard.
    """

    def __init__(
        self,
        spec: RangeSpec,
        folder: Path,
        hear: Callable[[Message], None],
        relay: Callable[[int, bytes], None] = lambda _rank, _line: None,
    ) -> None:
        self._spec = spec
        self._folder = folder / str(spec.token)
        self._folder.mkdir()
        self.members = Members(self._folder / "ranks", spec.config.supervisor, hear, relay)
        self._agent: _Agent | None = None

    @property
    def ended(self) -> bool:
        """Whether torch's agent has ended them."""
        return self._agent is not None and self._agent.ended.is_set()

    @property
    def failure(self) -> tuple[int | None, str] | None:
        """The first rank that ended badly, as the agent saw it, and how; None: all ended well."""
        assert self._agent is not None  # noqa: S101 - they have ended
        return None if self._agent.succeeded else (self._agent.rank, self._agent.reason)

    def start(self, meeting: Any) -> None:
        """Start them where `meeting` says; see `training.parallel.meeting`."""
        self._agent = _Agent(self._spec, self._folder, meeting)

    def pump(self, seconds: float) -> None:
        """Listen for so long. When one has died, the others have a moment to say what they know."""
        self.members.pump(seconds)
        if self.members.dead_seconds() > VICTIMS_SECONDS:
            self.members.kill()  # torch's agent would ask them to end, and wait for 30 s

    def hear_last_words(self) -> None:
        """After the end: what is still to be read."""
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < deadline and not self.members.have_ended():
            self.members.pump(MONITOR_SECONDS)

    def have_all_come(self) -> bool:
        """Whether each rank of this node has said who it is."""
        here = sum(member.process is not None for member in self.members.members.values())
        return here == self._spec.config.parallel.ranks_per_node

    def stop(self) -> None:
        """Ask them to leave, after the step at which all ranks of the group know of it."""
        self.members.send(STOP)

    def write_stack(self, rank: int) -> None:
        """Have one of them write its stack to the log. It may be unable to tell it, with its interpreter held."""
        member = self.members.members[rank]
        if member.process is not None:
            print(f"stack of rank {rank}:", file=sys.stderr, flush=True)  # noqa: T201 - the log
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGUSR2)

    def close(self) -> None:
        """None of them is left."""
        self.members.kill()
        self.members.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Agent:
    """torch's agent, in a thread: it starts the ranks, and ends all when one has ended badly.

    Attributes:
        ended: set at its end.
        succeeded, rank, reason: how; of the first that ended badly.
    """

    def __init__(self, spec: RangeSpec, folder: Path, meeting: Any) -> None:
        self.ended = threading.Event()
        self.succeeded, self.rank, self.reason = False, None, ""
        self._spec, self._folder, self._meeting = spec, folder, meeting
        threading.Thread(target=self._run, name="retoma-agent", daemon=True).start()

    def _run(self) -> None:
        try:
            self._launch()
        except BaseException as error:  # noqa: BLE001 - told in the main thread
            self.reason = f"the ranks could not be started: {type(error).__name__}: {error}"
        finally:
            self.ended.set()

    def _launch(self) -> None:
        from torch.distributed.elastic.agent.server.api import WorkerSpec
        from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

        from training.rank import Place
        from training.rank import main as train_as_rank

        # of a dead rank it prints a traceback of its own, which takes a second; `reason` says the same
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
        place = Place(str(self._folder / "ranks"), self._meeting.host, self._meeting.port, self._spec.token)
        agent = LocalElasticAgent(
            WorkerSpec(
                role="rank",
                local_world_size=self._spec.config.parallel.ranks_per_node,
                entrypoint=train_as_rank,
                args=(self._spec.model_dump_json(), place),
                rdzv_handler=self._meeting,
                max_restarts=0,
                monitor_interval=MONITOR_SECONDS,
            ),
            DefaultLogsSpecs(log_dir=str(self._folder / "logs")),
            start_method="forkserver",
            exit_barrier_timeout=10,
            shutdown_timeout=1,
        )
        result: Any = agent.run()
        self.succeeded = not result.is_failed()
        for rank, failure in sorted(result.failures.items()):
            self.rank, self.reason = rank, f"rank {rank} (pid {failure.pid}) {_how(failure.exitcode)}"
            break


def _how(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
