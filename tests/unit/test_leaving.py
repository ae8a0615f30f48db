"""Real supervisors with a real training process, without Prefect: what the watch ends is over, wherever it was."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tasks.order import RangeResult
from tests.unit.test_supervise import Bench, gone_within, wait_for
from training.checkpoint.end import read_ends
from training.checkpoint.token import claim
from training.errors import Fenced, Preempted, Unavailable

ROOT = Path(__file__).parents[2]
ENDS_SECONDS = 2.0  # no orphan lives for longer

# As the flow does it. Files in the folder say what the server tells, and whether the store answers.
DRIVER = """
import logging, pathlib, sys, time
sys.path.insert(0, {root!r})
from contextlib import nullcontext
from tasks.departure import Departure
from tasks.order import RangeOrder
from tasks.range import RangeSupervisor
from tasks.watch import Watch
from tests.unit.test_supervise import Notes
from training.checkpoint.store.faulty import Fault, FaultyStore
from training.errors import RetomaError, Unavailable

folder = pathlib.Path(sys.argv[1])
class Server:
    def state(self):
        try:
            return (folder / "state").read_text()
        except FileNotFoundError:
            raise Unavailable("no route") from None
departure = Departure()
departure.listen()
def hear(progress):
    while progress.phase == "training" and (folder / "stuck").exists():
        time.sleep(1000)
supervisor = RangeSupervisor(order=RangeOrder.model_validate_json(sys.argv[2]), root=folder, flow_run_id="f",
    registry=None, publisher=Notes(), on_progress=hear, logger=logging.getLogger(), command=sys.argv[3:])
class Cut:
    def exists(self, key):
        if (folder / "cut").exists():
            raise Unavailable("no route")
        return supervisor.store.exists(key)
watch = Watch(supervisor, store=Cut(), flow_run=lambda: nullcontext(Server()), departure=departure,
    lease_seconds=4.0, notice_file=folder / "notice")
watch.start()
try:
    result = supervisor.run_until_asked(departure)
except RetomaError as error:
    watch.last_look()
    print(error)
    sys.exit(error.exit_code)
watch.last_look()
print(result.model_dump_json())
"""


class Driven:
    """A supervisor in a process of its own."""

    def __init__(self, bench: Bench, *steps: str) -> None:
        self.bench, self.folder = bench, bench.folder
        self._pid_file = self.folder / "training"
        self.tell("RUNNING")
        command = bench.command(["restored", "save 50", f"pid {self._pid_file}", *steps])
        code = DRIVER.format(root=str(ROOT))
        arguments = [str(self.folder), bench.order().model_dump_json(), *command]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def tell(self, state: str) -> None:
        (self.folder / "state").write_text(state)

    def training(self) -> int:
        return wait_for(lambda: int(self._pid_file.read_text()) if self._pid_file.exists() else None)

    def ends(self, seconds: float = 20.0) -> tuple[int, str]:
        """Its exit code and what it printed."""
        output, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, output.decode()


@pytest.fixture
def driven(tmp_path: Path) -> Iterator[list[Driven]]:
    started: list[Driven] = []
    yield started
    for each in started:
        each.process.kill()
        each.process.communicate()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_without_store_and_orchestrator_everything_ends_after_the_lease(bench: Bench, driven: list[Driven]) -> None:
    one = Driven(bench, "sleep 60")
    driven.append(one)
    training = one.training()
    (one.folder / "cut").touch()
    time.sleep(5)  # longer than the lease
    assert one.process.poll() is None, "the orchestrator still answers"
    (one.folder / "state").unlink()
    code, output = one.ends()
    assert code == Unavailable.exit_code, output
    assert "neither the store nor the orchestrator" in output
    assert gone_within(training, ENDS_SECONDS)


def test_a_main_thread_that_is_stuck_keeps_nobody(bench: Bench, driven: list[Driven]) -> None:
    (bench.folder / "stuck").touch()
    one = Driven(bench, "sleep 60")
    driven.append(one)
    training = one.training()
    one.tell("CRASHED")
    code, output = one.ends(4.0)
    assert code == Fenced.exit_code, output
    assert gone_within(training, ENDS_SECONDS)
    end = read_ends(bench.store)[1]
    assert (end.kind, end.by) == ("Fenced", "supervisor")


@pytest.mark.parametrize("first", ["supervisor", "training"])
def test_whoever_wakes_first_both_end_within_two_seconds(bench: Bench, driven: list[Driven], first: str) -> None:
    one = Driven(bench, "sleep 60")
    driven.append(one)
    processes = {"training": psutil.Process(one.training()), "supervisor": psutil.Process(one.process.pid)}
    for process in processes.values():
        process.suspend()
    one.tell("CANCELLED")
    claim(bench.store, "r", {"test": "the replacement"})
    time.sleep(2.5)
    processes.pop(first).resume()
    time.sleep(0.1)
    with suppress(psutil.NoSuchProcess):  # killed already by whoever woke first
        processes.popitem()[1].resume()
    assert one.ends(2.0)[0] == Fenced.exit_code
    assert gone_within(one.training(), ENDS_SECONDS)
    assert one.process.wait() == Fenced.exit_code


def test_a_notice_of_the_cloud_ends_as_preempted_with_what_is_committed(bench: Bench, driven: list[Driven]) -> None:
    one = Driven(bench, "sleep 60")
    driven.append(one)
    one.training()
    (one.folder / "notice").touch()
    code, output = one.ends()
    assert code == Preempted.exit_code, output
    assert "taken away" in output
    assert "000001/00000000" in output, "the checkpoint that is committed"
    assert read_ends(bench.store)[1].kind == "Preempted"


def test_sigterm_after_the_last_commit_loses_nothing(bench: Bench, driven: list[Driven]) -> None:
    one = Driven(bench, "save 100", "pid " + str(bench.folder / "saved"), "sleep 60")
    driven.append(one)
    wait_for(lambda: 1 if (bench.folder / "saved").exists() else None)
    one.process.send_signal(signal.SIGTERM)
    code, output = one.ends()
    assert code == 0, output
    assert RangeResult.model_validate_json(output.splitlines()[-1]).position.epoch == 2
