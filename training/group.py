"""The launcher of the ranks of a node: `python -m training.group --messages FD`. One rank is `training.process`.

To its supervisor it is the training process: the same line on stdin, the same messages, the same lifeline. It forks
its ranks from a server that has imported torch, starts them by torch's own agent, and says who is to blame when one
of them is dead, frozen, or holds up the others. One group, one token: after a failure another process goes on.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from io import FileIO
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import psutil

from training.errors import Fenced, Preempted, Unavailable
from training.guard import die_with_parent, watch_lifeline
from training.parallel.members import Members, Verdict
from training.parallel.wire import LOST
from training.ports import Done, Failed, Message, Pause, RangeSpec, encode_message

PRELOAD = ["training.rank", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
TICK_SECONDS = 0.1
FOLDER_PREFIX = "retoma-group-"
LAST_WORDS_SECONDS = 1.0  # from the end of one rank until the others have said what they know
STACK_SECONDS = 0.3
VICTIMS_SECONDS = 0.3  # after a rank has died the others may say what they know


def main() -> None:
    """Run one group and exit with the code of the error's kind."""
    parser = argparse.ArgumentParser(prog="training.group", description=__doc__)
    parser.add_argument("--messages", type=int, metavar="FD", required=True)
    options = parser.parse_args()
    sys.path.insert(0, str(Path.cwd()))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")
    # a rank looks twice a second whether a message is there, and torch would warn each time that it is not
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["TORCH_MP_PARALLEL_START"] = "1"
    die_with_parent()
    with os.fdopen(options.messages, "wb", buffering=0) as out:
        code = _run(out)
    sys.stderr.flush()
    os._exit(code)  # the interpreter's own end takes a second with torch's threads, and nothing is left to be done


def _run(out: FileIO) -> int:
    with os.fdopen(0, "rb", buffering=0, closefd=False) as stdin:
        line = stdin.readline()
    spec = RangeSpec.model_validate_json(line)
    launcher = Launcher(spec, line.decode(), out)
    signal.signal(signal.SIGTERM, lambda *_: launcher.ask_to_leave())
    watch_lifeline(0)
    launcher.say(Pause(what="starting", allowance_seconds=spec.config.supervisor.start_seconds))
    failed = launcher.run()
    if failed is None:
        return 0
    launcher.say(failed)
    print(f"{failed.error}: {failed.message}", file=sys.stderr, flush=True)  # noqa: T201 - the log
    return failed.exception().exit_code


class Launcher:
    """One group of ranks, from their start to the end of all of them.

    Args:
        spec: what to train, and its line as it goes to each rank.
        line: the same.
        out: the pipe to the supervisor.
    """

    def __init__(self, spec: RangeSpec, line: str, out: FileIO) -> None:
        self._spec, self._line, self._out = spec, line, out
        self._asked = self._told = False
        self._verdict: Verdict | None = None
        self._done: Done | None = None
        sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{os.getpid()}-")
        tempfile.tempdir = self._folder.name  # of this process: multiprocessing and torch leave files
        self._members = Members(Path(self._folder.name) / "ranks", spec.config.supervisor, self._hear)

    def say(self, message: Message) -> None:
        """Tell the supervisor."""
        self._out.write(encode_message(message))

    def ask_to_leave(self) -> None:
        """From the signal handler."""
        self._asked = True

    def run(self) -> Failed | None:
        """Start the ranks and wait for their end. Returns what went wrong."""
        context = get_context("forkserver")
        pipes = self._spec.config.parallel.pipeline > 1
        context.set_forkserver_preload([*PRELOAD, "torch.distributed.pipelining"] if pipes else PRELOAD)
        forkserver.ensure_running()  # it imports torch while this process does
        agent = _Agent(self._spec, self._line, self._folder.name)
        try:
            while not agent.ended.is_set():
                self._members.pump(TICK_SECONDS)
                self._look()
            self._hear_last_words()
            return self._failed(agent)
        finally:
            self._members.kill()
            self._members.close()
            shutil.rmtree(self._folder.name, ignore_errors=True)

    def _look(self) -> None:
        if self._asked and not self._told and len(self._members.members) == self._spec.config.parallel.world:
            self._told = True
            self._members.stop()
        if self._verdict is None and (verdict := self._members.verdict()):
            self._verdict = verdict
            self._write_stacks()
            self._members.kill()
        elif self._members.dead_seconds() > VICTIMS_SECONDS:
            self._members.kill()  # torch's agent would ask them to end, and wait for 30 s

    def _write_stacks(self) -> None:
        """All ranks write the stack of their main thread to the log, as far as they run."""
        for member in self._members.members.values():
            print(f"stack of rank {member.rank}:", file=sys.stderr, flush=True)  # noqa: T201 - the log
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGUSR2)
        time.sleep(STACK_SECONDS)

    def _hear(self, message: Message) -> None:
        if isinstance(message, Done):
            self._done = message  # told when all ranks have ended well
        else:
            self.say(message)

    def _hear_last_words(self) -> None:
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while time.monotonic() < deadline and not self._members.have_ended():
            self._members.pump(TICK_SECONDS)

    def _failed(self, agent: _Agent) -> Failed | None:
        """What the supervisor is told, unless all is done."""
        if self._verdict is not None:
            verdict = self._verdict
            return _lost(f"rank {verdict.rank} (pid {verdict.pid}) {verdict.reason}, and was killed")
        if agent.succeeded and self._done is not None:
            self.say(self._done)
            return None
        told = self._members.failures()
        causes = {rank: failed for rank, failed in told.items() if not failed.message.startswith(LOST)}
        for failed in causes.values():
            if failed.error in (Fenced.__name__, Preempted.__name__):  # of one rank is of all
                return failed
        for rank, failed in causes.items():
            return failed.model_copy(update={"message": f"rank {rank}: {failed.message}"})
        if agent.reason:
            return _lost(agent.reason)
        return next(iter(told.values()), _lost("the ranks ended without a word"))


def _lost(message: str) -> Failed:
    """Another attempt may do better."""
    return Failed(error=Unavailable.__name__, message=message)


def sweep() -> None:
    """Remove the folders of launchers that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*-*"):
        pid = folder.name.removeprefix(FOLDER_PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


class _Agent:
    """torch's agent, in a thread: it starts the ranks, and ends all when one has ended badly.

    Attributes:
        ended: set at its end.
        succeeded, reason: how.
    """

    def __init__(self, spec: RangeSpec, line: str, folder: str) -> None:
        self.ended = threading.Event()
        self.succeeded, self.reason = False, ""
        self._spec, self._line, self._folder = spec, line, folder
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

        from training.parallel.meeting import OneNode
        from training.rank import Place
        from training.rank import main as train_as_rank

        meeting = OneNode(f"{self._spec.run}-{self._spec.token}")
        place = Place(f"{self._folder}/ranks", meeting.host, meeting.port, self._spec.token)
        agent = LocalElasticAgent(
            WorkerSpec(
                role="rank",
                local_world_size=self._spec.config.parallel.world,
                entrypoint=train_as_rank,
                args=(self._line, place),
                rdzv_handler=meeting,
                max_restarts=0,
                monitor_interval=TICK_SECONDS,
            ),
            DefaultLogsSpecs(log_dir=f"{self._folder}/logs"),
            start_method="forkserver",
            exit_barrier_timeout=10,
            shutdown_timeout=1,
        )
        result: Any = agent.run()
        self.succeeded = not result.is_failed()
        for rank, failure in sorted(result.failures.items()):
            self.reason = f"rank {rank} (pid {failure.pid}) {_how(failure.exitcode)}"
            break


def _how(code: int) -> str:
    if code < 0:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


if __name__ == "__main__":
    main()
