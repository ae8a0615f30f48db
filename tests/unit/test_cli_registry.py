"""A collection keeps what a real MLflow server has registered: versions have no weights of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.settings import load_settings
from tasks.register import register_final
from tasks.tracking import registry_of
from tests.end_to_end.test_mlflow import server
from tests.support.bits import bits
from tests.unit.test_cli import ROOT, run_command
from tests.unit.test_cli_files import a_state
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import open_store
from training.errors import Corrupt

__all__ = ["server"]

pytestmark = [pytest.mark.end_to_end, pytest.mark.xdist_group("mlflow")]
JOB = {"name": "mnist-cnn", "identity": {"job": "training.jobs.mnist_cnn:MnistCnn", "params": {}}}


def test_what_a_registered_version_stands_for_is_not_collected(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RETOMA_HOME", str(ROOT))
    monkeypatch.setenv("RETOMA_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("RETOMA_MLFLOW_URL", server)
    monkeypatch.setenv("RETOMA_MLFLOW_EXPERIMENT", "collected")
    settings = load_settings()
    store = open_store(settings.run_url("digits"))
    with IncrementalCheckpointer(store, run="digits", job=JOB) as checkpointer:
        for seed in range(2):
            checkpointer.save(a_state(seed), base=True)
    register_final(settings.run_url("digits"), registry_of(settings), "digits", "any-name", {"accuracy": 0.5})
    with IncrementalCheckpointer(store, run="digits", job=JOB) as checkpointer:
        checkpointer.restore()
        for seed in range(2, 5):
            checkpointer.save(a_state(seed), base=True)
    code, text, error = run_command(capsys, "gc", "digits", "--keep", "1", "--grace", "0", "--json")
    assert code == 0, error
    done = json.loads(text)
    assert {row["checkpoint"]: row["reason"] for row in done["kept"]}["000001/00000001"] == "has an alias"
    assert done["collected"] == ["000002/00000002", "000001/00000000"]
    assert bits(dict(restore_checkpoint(store, 1, 1))) == bits(a_state(1))
    code, _, error = run_command(capsys, "gc", "digits", "--keep", "1", "--grace", "0", "--no-registry")
    assert code == 0, error
    with pytest.raises(Corrupt):
        restore_checkpoint(store, 1, 1)
