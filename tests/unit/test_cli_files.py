"""Commands between a run and files: by name and by address, thin, and nothing is left behind by an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.settings import Settings
from tests.support.bits import bits, random_bits
from tests.support.s3_servers import BUCKET, S3Server
from tests.unit.test_cli import ROOT, run_command
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.adapters.importing import read_foreign
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import open_store
from training.errors import Corrupt, Invalid

pytest_plugins = ["tests.support.s3_fixtures"]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("RETOMA_HOME", str(ROOT))
    monkeypatch.setenv("RETOMA_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return Settings()


def a_state(seed: int = 0) -> dict[str, Any]:
    return {"model": {"w": random_bits((200, 30), torch.float32, seed)}, "lr": 0.1, "step": seed}


def a_run(url: str | Path, run: str = "digits", count: int = 3) -> None:
    with IncrementalCheckpointer(url, run=run) as checkpointer:
        for seed in range(count):
            checkpointer.save(a_state(seed), position=Position(epoch=seed, step=10 * seed, sample=100 * seed))


def test_a_checkpoint_goes_to_a_file_and_comes_back_as_another_run(
    settings: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a_run(settings.run_url("digits"))
    code, text, _ = run_command(
        capsys, "restore", "digits", "--to", "out.safetensors", "--checkpoint", "1/1", "--json"
    )
    assert code == 0
    told = json.loads(text)
    assert (told["checkpoint"], told["path"]) == ("000001/00000001", str(tmp_path / "out.safetensors"))
    assert bits(read_foreign(tmp_path / "out.safetensors").state) == bits(a_state(1))

    code, text, _ = run_command(
        capsys, "import", "copy", "out.safetensors", "--epoch", "4", "--step", "40", "--json"
    )
    assert code == 0
    told = json.loads(text)
    assert (told["run"], told["position"]) == ("copy", {"epoch": 4, "step": 40, "sample": 0})
    assert bits(dict(restore_checkpoint(open_store(settings.run_url("copy")), 1, 0))) == bits(a_state(1))


def test_a_store_is_named_by_its_folder_too(
    settings: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a_run(tmp_path / "alone", "default")
    code, text, _ = run_command(capsys, "restore", "./alone", "--to", "out.pt")
    assert code == 0
    assert "1 tensors" in text
    assert "torch" in text
    assert "000001/00000002" in text
    assert bits(torch.load(tmp_path / "out.pt", weights_only=True)) == bits(a_state(2))
    for name in ("alone", "./alone", str(tmp_path / "alone"), (tmp_path / "alone").as_uri()):
        code, text, _ = run_command(capsys, "show", name, "--json")
        assert code == 0
        assert len(json.loads(text)["chain"]) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["restore", "digitz", "--to", "out"], "did you mean digits?"),
        (["restore", "./no/such", "--to", "out"], "retoma.json"),
        (["restore", "digits", "--to", "out", "--checkpoint", "last"], "TOKEN/SEQUENCE"),
        (["import", "digits", "no-such-file"], "does not exist"),
        (["import", "Bad Name", "there"], "run name"),
    ],
)
def test_a_mistake_is_told_before_a_process_is_started(
    settings: Settings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    words: str,
) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("a process was started")

    (tmp_path / "there").touch()
    a_run(settings.run_url("digits"), count=1)
    monkeypatch.setattr("flows.cli_files.ask", forbidden)
    code, _, error = run_command(capsys, *arguments)
    assert code == Invalid.exit_code
    assert words in error


def test_errors_of_the_child_keep_their_kind_and_hint(
    settings: Settings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    a_run(settings.run_url("digits"))
    for pack in Path(settings.run_url("digits")).glob("packs/*/*"):
        pack.unlink()
    code, _, error = run_command(capsys, "restore", "digits", "--to", "new")
    assert code == Corrupt.exit_code
    assert "none of the run's checkpoints is intact" in error
    assert not (tmp_path / "new").exists()


@pytest.mark.xdist_group("s3")
def test_a_store_in_a_bucket_is_named_by_its_url_and_the_settings_say_where(
    settings: Settings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    moto: S3Server,
    tmp_path: Path,
) -> None:
    url = f"s3://{BUCKET}/runs/of-the-command"
    a_run(url)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("RETOMA_S3_ENDPOINT_URL", moto.url)
    code, text, _ = run_command(capsys, "restore", url, "--to", "out", "--json")
    assert code == 0
    assert json.loads(text)["run"] == "digits"
    assert bits(read_foreign(tmp_path / "out").state) == bits(a_state(2))
    monkeypatch.setenv("RETOMA_CHECKPOINTS_URL", f"s3://{BUCKET}/runs")
    code, text, _ = run_command(capsys, "show", "of-the-command", "--json")
    assert (code, len(json.loads(text)["chain"])) == (0, 3)
