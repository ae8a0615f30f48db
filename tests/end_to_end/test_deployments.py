"""The deployments, started with Prefect's own command as the README says, on real servers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.deploy import deploy
from infra.mlflow_text import RUN
from infra.settings import Settings
from tasks.champion import DATA_DIGEST, champion_checkpoint
from tasks.register import CHAMPION
from tasks.runs import find_run
from tasks.tracking import registry_of
from training.checkpoint.restore import restore_checkpoint

pytestmark = pytest.mark.timeout(280)

JOB = "training/jobs/mnist_cnn.yaml"
MODEL = "deployed-digits"
SMALL = ["epochs=1", "epochs_per_range=1", "batch_size=500", "checkpoint.every_steps=0", f"name={MODEL}"]


def prefect_run(stack: Settings, deployment: str, **parameters: object) -> str:
    """`prefect deployment run`, in a shell that was set up with `retoma env`."""
    arguments = " ".join(f"-p '{name}={json.dumps(value)}'" for name, value in parameters.items())
    binaries = Path(sys.executable).parent
    script = f"""
        set -e; eval "$({binaries}/retoma env)"
        {binaries}/prefect deployment run {deployment} {arguments} --watch --watch-interval 1
    """
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=stack.home,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    return " ".join(text.split())


def test_train_retrain_and_maintain_run_as_documented(stack: Settings) -> None:
    deploy(stack)
    prefect_run(stack, "train/cpu", job=JOB, run="by-prefect", overrides=SMALL)
    _, lineage = find_run(stack, "by-prefect")
    assert lineage.head is not None
    assert lineage.head.manifest.position.epoch == 1
    registry = registry_of(stack)
    champion = registry.models.with_alias(MODEL, CHAMPION)
    assert champion is not None
    assert champion.tags[RUN] == "by-prefect"

    text = prefect_run(stack, "retrain/weekly", job=JOB, run="again", overrides=SMALL)
    assert "Completed" in text
    assert not Path(stack.run_url("again")).exists(), "the data is the same: nothing was trained"

    client = registry.connection.client
    client.set_model_version_tag(MODEL, str(champion.number), DATA_DIGEST, "md5:of-last-week.dir")
    prefect_run(stack, "retrain/weekly", job=JOB, run="again", overrides=SMALL)
    store, lineage = find_run(stack, "again")
    assert lineage.head is not None
    source = champion_checkpoint(champion.tags, MODEL)
    assert lineage.head.manifest.job["identity"]["init_from"] == source.model_dump(mode="json")
    assert restore_checkpoint(store, lineage.head.ref.token, lineage.head.ref.sequence, "again")

    prefect_run(stack, "maintain/cpu", runs=["by-prefect"], keep=1, grace_hours=0)
    store, lineage = find_run(stack, "by-prefect")
    assert lineage.head is not None
    assert lineage.problems == []
    assert restore_checkpoint(store, lineage.head.ref.token, lineage.head.ref.sequence, "by-prefect")
