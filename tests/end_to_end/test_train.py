"""The main job with everything real: a Prefect server, workers, MLflow, one command, and SIGKILL in the middle."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
import pytest

from infra.settings import Settings
from tasks.runs import find_run
from tasks.tracking import registry_of
from tests.conftest import JOB, SMALL, STEPS_PER_EPOCH
from training.checkpoint.history import Lineage
from training.checkpoint.manifest import Committed

pytestmark = pytest.mark.timeout(280)

T = TypeVar("T")


class Command:
    """One `retoma train` in the background."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self.process, self.output = process, output

    def ends(self, code: int = 0) -> str:
        """Wait for its end. Returns what it printed."""
        self.process.wait(200)
        text = self.output.read_text()
        assert self.process.returncode == code, text
        return text


@contextmanager
def retoma_train(stack: Settings, folder: Path, run: str, **changes: object) -> Iterator[Command]:
    """Without a terminal, as a script would call it."""
    values = {**SMALL, **changes}
    arguments = [argument for key, value in values.items() for argument in ("--set", f"{key}={value}")]
    output = folder / f"output-{time.monotonic_ns()}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "train", JOB, "--run", run, *arguments],
            cwd=stack.home,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Command(process, output)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(20)


@pytest.mark.soak  # the drill kills a training process in every run of the tests
def test_a_killed_training_process_is_restarted_in_place_and_changes_nothing(
    stack: Settings, tmp_path: Path, straight_digest: str
) -> None:
    run = "killed-training"
    with retoma_train(stack, tmp_path, run) as command:
        supervisor = in_the_middle_of_epoch(stack, run, 1, command)
        training = training_process_of(supervisor)
        training.send_signal(signal.SIGKILL)
        text = command.ends()
    lineage = assert_same_as_straight(stack, run, straight_digest, text)
    assert [who(lineage, token)["try"] for token in (1, 2, 3)] == [1, 1, 2]
    assert who(lineage, 2)["flow_run_id"] == who(lineage, 3)["flow_run_id"]
    assert_lineage_in_mlflow(stack, run, lineage, killed=2)
    assert_told_what_it_cost(stack, run, killed=2)
    assert_no_orphans(stack)


def test_a_killed_flow_process_of_a_range_is_replaced_by_another_attempt(
    stack: Settings, tmp_path: Path, straight_digest: str
) -> None:
    run = "killed-flow"
    with retoma_train(stack, tmp_path, run) as command:
        supervisor = in_the_middle_of_epoch(stack, run, 1, command)
        training = training_process_of(supervisor)
        supervisor.send_signal(signal.SIGKILL)
        assert dies_within(training, 2.0), "a training process outlived its supervisor"
        text = command.ends()
    lineage = assert_same_as_straight(stack, run, straight_digest, text)
    assert [who(lineage, token)["attempt"] for token in (1, 2, 3)] == [1, 1, 2]
    assert_lineage_in_mlflow(stack, run, lineage, killed=2)
    assert_told_what_it_cost(stack, run, killed=2)
    assert_no_orphans(stack)


def test_a_killed_parent_is_started_again_by_the_server_and_attaches_to_its_range(
    stack: Settings, tmp_path: Path, straight_digest: str
) -> None:
    run = "killed-parent"
    with retoma_train(stack, tmp_path, run) as command:
        in_the_middle_of_epoch(stack, run, 1, command)
        parent_process(stack, run).send_signal(signal.SIGKILL)
        text = command.ends()
    assert "another one goes on" in text
    lineage = assert_same_as_straight(stack, run, straight_digest, text)
    assert len(lineage.attempts) == 2, "a finished range and a living child cost no second attempt"
    assert_lineage_in_mlflow(stack, run, lineage, killed=None)
    assert_no_orphans(stack)


def in_the_middle_of_epoch(stack: Settings, run: str, epoch: int, command: Command) -> psutil.Process:
    """Wait until a checkpoint inside the epoch is committed. Returns the range's flow process, frozen no more."""

    def look() -> psutil.Process | None:
        assert command.process.poll() is None, command.output.read_text()
        if not (Path(stack.run_url(run)) / "retoma.json").exists():
            return None
        _, lineage = find_run(stack, run)
        position = lineage.head.manifest.position if lineage.head else None
        if position is None or position.epoch < epoch or position.step <= epoch * STEPS_PER_EPOCH:
            return None
        assert position.epoch == epoch, "too late: the epoch is over already"
        return psutil.Process(who(lineage, lineage.attempts[-1].token)["pid"])

    return wait_for(look)


def training_process_of(supervisor: psutil.Process) -> psutil.Process:
    found = [child for child in supervisor.children() if "training.process" in " ".join(child.cmdline())]
    assert len(found) == 1
    return found[0]


def parent_process(stack: Settings, run: str) -> psutil.Process:
    """The flow process of `train`, as it reports itself."""
    code = (
        "import sys; from infra.settings import load_settings; load_settings().export()\n"
        "from infra.prefect_runs import PrefectRuns; from tasks.milestones import read_milestone\n"
        "with PrefectRuns() as runs: print(read_milestone(runs, sys.argv[1]).pid)\n"
    )
    return psutil.Process(int(ask_python(stack, code, run)))


def assert_same_as_straight(stack: Settings, run: str, digest: str, text: str) -> Lineage:
    _, lineage = find_run(stack, run)
    assert lineage.head is not None
    assert lineage.head.manifest.position.epoch == SMALL["epochs"]
    assert lineage.head.manifest.state_digest == digest
    assert digest in text
    assert not lineage.problems
    shown = json.loads(retoma(stack, "show", run, "--json"))
    assert [row["checkpoint"] for row in shown["chain"]] == [str(c.ref) for c in lineage.chain]
    assert any(row["kind"] == "delta" for row in shown["chain"])
    assert re.search(r"runs/flow-run/[0-9a-f-]{36}", text)
    assert "?workflowType=machine_learning" in text
    return lineage


def assert_lineage_in_mlflow(stack: Settings, run: str, lineage: Lineage, killed: int | None) -> None:
    registry = registry_of(stack)
    attempts = registry.runs.attempts(run)
    assert sorted(attempts) == [attempt.token for attempt in lineage.attempts]
    statuses = {token: record.status for token, record in attempts.items()}
    assert statuses == {token: "KILLED" if token == killed else "FINISHED" for token in attempts}
    parent = registry.runs.parent(run)
    assert parent is not None
    assert parent.status == "FINISHED"

    entries = registry.checkpoints.all(run)
    assert set(entries) >= {place(committed) for committed in lineage.chain}
    for attempt in lineage.attempts:
        assert attempt.seal is not None
        head = attempt.seal.head
        expected = [entries[head.token, head.sequence].model_id] if head else []
        inputs = registry.connection.client.get_run(attempts[attempt.token].id).inputs
        assert inputs is not None
        assert [model.model_id for model in inputs.model_inputs] == expected

    history = registry.connection.client.get_metric_history(parent.id, "train/loss")
    every, last = int(SMALL["log_every_steps"]), int(SMALL["epochs"]) * STEPS_PER_EPOCH
    assert sorted(metric.step for metric in history) == list(range(every, last + 1, every))


def assert_told_what_it_cost(stack: Settings, run: str, killed: int) -> None:
    """In `show`, in MLflow, and on the parent's page in Prefect."""
    row = json.loads(retoma(stack, "show", run, "--json"))["attempts"][killed - 1]
    assert (row["token"], row["verdict"], row["next_token"]) == (killed, "Unavailable", killed + 1)
    assert row["next_restored"] is not None
    assert 0 <= row["lost_steps"] <= 2 * int(SMALL["checkpoint.every_steps"])  # one save may have been in flight
    assert 0 < row["away_seconds"] < 120
    tags = registry_of(stack).runs.attempts(run)[killed].tags
    assert (tags["retoma.verdict"], tags["retoma.verdict_by"]) == (row["verdict"], row["verdict_by"])
    assert tags["retoma.lost_steps"] == str(row["lost_steps"])
    answer = httpx.post(
        f"{stack.prefect_url()}/artifacts/latest/filter",
        json={"artifacts": {"key": {"any_": [f"attempts-{run}"]}}},
        trust_env=False,
    )
    assert f"token {killed + 1} went on from {row['next_restored']}" in answer.json()[0]["data"]


def assert_no_orphans(stack: Settings) -> None:
    """No training process, and no flow process, of this stack is left a moment after the end."""

    def left() -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
                ours = "training.process" in line or "prefect.engine" in line
                if ours and process.environ().get("RETOMA_STATE_DIR") == str(stack.state_dir):
                    found.append(f"{process.pid} {line}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    wait_for(lambda: None if left() else True, timeout_seconds=15)


def dies_within(process: psutil.Process, seconds: float) -> bool:
    try:
        process.wait(seconds)
    except psutil.TimeoutExpired:
        return False
    return True


def who(lineage: Lineage, token: int) -> dict[str, Any]:
    claim = lineage.attempts[token - 1].claim
    assert claim is not None
    return claim.who


def place(committed: Committed) -> tuple[int, int]:
    return committed.ref.token, committed.ref.sequence


def wait_for(look: Callable[[], T | None], timeout_seconds: float = 150) -> T:
    deadline = time.monotonic() + timeout_seconds
    while (found := look()) is None:
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.03)
    return found


def retoma(stack: Settings, *arguments: str) -> str:
    return ask_python(stack, "from flows.cli import main; main()", *arguments)


def ask_python(stack: Settings, code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=stack.home,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
