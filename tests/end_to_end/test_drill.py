"""`retoma drill` itself: real faults on a real stack, a report, and an exit code that can be believed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from infra.processes import ProcessTable
from infra.settings import Settings
from tasks.drill.measures import trials
from tasks.drill.recording import Recording
from tasks.drill.worlds import numbers

pytestmark = [pytest.mark.timeout(280), pytest.mark.xdist_group("drill")]  # a stack of its own
# Each process trains on other numbers, so that whatever is resumed differs from the straight run.
UNSTEADY = """
import os
from training.jobs.mnist_cnn import MnistCnn

class Unsteady(MnistCnn):
    def loss(self, model, batch):
        return super().loss(model, batch) * (1 + os.getpid() % 1000 / 1e6)
"""


def drill(home: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "flows.cli", "drill", *arguments],
        cwd=home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_killed_and_a_frozen_training_pass_the_drill_and_the_report_is_where_people_look(
    stack: Settings, tmp_path: Path
) -> None:
    name = "kill-train+freeze-train"
    text = drill(stack.home, name, "--here", "--seed", "1", "--out", str(tmp_path))
    assert "passed" in text
    recording = Recording.model_validate_json((tmp_path / f"{name}.json").read_text())
    assert recording.digest == recording.straight_digest
    killed, frozen = trials(recording)
    assert (killed.by, frozen.by) == ("supervisor", "supervisor")
    assert killed.verdict_seconds is not None
    assert killed.verdict_seconds < 2.0
    assert frozen.verdict_seconds is not None
    assert frozen.verdict_seconds > 2.0, "silence was noticed, not a death"
    assert [trial.next_token for trial in (killed, frozen)] == [2, 3]
    assert "<svg" in (tmp_path / "drill.html").read_text()
    answer = httpx.post(
        f"{stack.prefect_url()}/artifacts/filter", json={"artifacts": {"key": {"any_": ["drill"]}}}, trust_env=False
    )
    assert "kill-train+freeze-train: pass" in answer.json()[0]["data"]
    assert "MLflow   http" in text


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_job_that_is_not_deterministic_fails_the_drill(stack: Settings, tmp_path: Path) -> None:
    (tmp_path / "unsteady.py").write_text(UNSTEADY)
    (tmp_path / "unsteady.yaml").write_text(
        "job: unsteady:Unsteady\ndata: data/mnist\nepochs: 8\ncheckpoint:\n  every_steps: 8\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        text = drill(
            stack.home, "kill-train", "--job", str(tmp_path / "unsteady.yaml"), "--out", str(tmp_path), code=1
        )
    assert "failed" in text
    assert "bit for bit the straight run" in text


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_group_loses_a_node_and_grows_again_and_ends_as_the_straight_run_of_as_many_ranks(
    tmp_path: Path, stack_settings: Settings
) -> None:
    text = drill(stack_settings.home, "shrink-grow", "--seed", "1", "--out", str(tmp_path))
    assert "  2, 1, 2 ranks" in text
    recording = Recording.model_validate_json((tmp_path / "shrink-grow.json").read_text())
    assert recording.digest == recording.straight_digest
    assert numbers(recording) == (2, 1, 2)
    (trial,) = trials(recording)
    assert trial.by == "supervisor"
    assert trial.whole_seconds is not None
    (lost,) = (seen.reason for seen in recording.tokens if seen.token == trial.token)
    assert "node" in lost
    assert "by 2, 1, 2 ranks" in (tmp_path / "drill.html").read_text()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("store", [[], ["--s3"]], ids=["folder", "seaweed"])
def test_every_scenario_passes(tmp_path: Path, stack_settings: Settings, store: list[str]) -> None:
    text = drill(stack_settings.home, "all", *store, "--out", str(tmp_path))
    assert "passed" in text


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_drill_of_its_own_touches_neither_stack_nor_environment(stack: Settings, tmp_path: Path) -> None:
    before = {name: ProcessTable(stack.state_dir).find(name) for name in ("prefect", "mlflow", "worker-gpu")}
    ports = json.loads(stack.stack_file.read_text())
    drill(stack.home, "kill-node", "--out", str(tmp_path))
    after = {name: ProcessTable(stack.state_dir).find(name) for name in before}
    assert {n: f and f[1].pid for n, f in before.items()} == {n: f and f[1].pid for n, f in after.items()}
    assert json.loads(stack.stack_file.read_text()) == ports
