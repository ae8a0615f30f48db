"""Commands that look after what is stored: what they print, and how they end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.settings import Settings
from tests.support.bits import bits
from tests.unit.test_cli import ROOT, run_command
from tests.unit.test_cli_files import a_state
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.care.pins import pinned
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import LocalStore, open_store
from training.checkpoint.token import claim, token_numbers
from training.errors import Corrupt, Invalid, Unavailable


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """The store of run `digits`: four checkpoints in one chain."""
    monkeypatch.setenv("RETOMA_HOME", str(ROOT))
    monkeypatch.setenv("RETOMA_STATE_DIR", str(tmp_path))
    found = open_store(Settings().run_url("digits"))
    assert isinstance(found, LocalStore)
    with IncrementalCheckpointer(found, run="digits", deltas_per_base=8) as checkpointer:
        for seed in range(4):
            checkpointer.save(a_state(seed))
    return found


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    code, text, error = run_command(capsys, *arguments, "--json")
    assert code == 0, error
    return json.loads(text)


def test_an_intact_run_is_verified_and_nothing_is_changed(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    before = store.list("")
    code, text, _ = run_command(capsys, "verify", "digits")
    assert code == 0
    assert "4 of 4 checkpoints are intact" in text
    assert "--data reads every byte" in text
    report = told(capsys, "verify", "digits", "--data")
    assert (report["intact"], report["head"], report["problems"]) == (True, "000001/00000003", [])
    assert report["read_bytes"] > 4 * 10_000
    assert store.list("") == before


def test_a_missing_pack_is_found_by_structure_alone_and_the_code_says_so(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.delete("packs/000001/00000002-r0000-00.pack")
    code, text, error = run_command(capsys, "verify", "digits")
    assert code == Corrupt.exit_code
    assert "2 of 4 checkpoints are intact" in text
    assert "packs/000001/00000002-r0000-00.pack" in text
    assert "a resume would start from 000001/00000001" in error
    code, text, _ = run_command(capsys, "verify", "digits", "--json")
    assert code == Corrupt.exit_code
    assert json.loads(text)["restorable"] == "000001/00000001"


def test_a_flipped_bit_is_found_only_where_bytes_are_read(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store.folder / "packs/000001/00000003-r0000-00.pack"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert run_command(capsys, "verify", "digits")[0] == 0
    code, text, _ = run_command(capsys, "verify", "digits", "--data")
    assert code == Corrupt.exit_code
    assert "packs/000001/00000003-r0000-00.pack" in text


def test_compacting_the_head_leaves_the_state_and_claims_nothing(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    done = told(capsys, "compact", "digits")
    assert (done["checkpoint"], done["written"], done["links"]) == ("000001/00000003", True, 4)
    assert bits(dict(restore_checkpoint(store, 1, 3))) == bits(a_state(3))
    assert token_numbers(store)[0] == {1}
    assert told(capsys, "compact", "digits") == {"written": False}
    code, text, _ = run_command(capsys, "compact", "digits", "--checkpoint", "1/2")
    assert (code, "000001/00000002: 3 checkpoints became one" in text) == (0, True)
    rows = {row["sequence"]: row["rebased"] for row in told(capsys, "show", "digits")["chain"]}
    assert rows == {0: False, 1: False, 2: True, 3: True}


def test_a_pin_holds_until_it_is_taken_away(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "pin", "digits", "1/1", "--reason", "best")["reason"] == "best"
    assert pinned(store) == {(1, 1)}
    assert told(capsys, "show", "digits")["pins"] == ["000001/00000001"]
    assert any(
        "pinned" in line and "00000001" in line for line in run_command(capsys, "show", "digits")[1].splitlines()
    )
    assert told(capsys, "unpin", "digits", "1/1")["was_pinned"] is True
    assert told(capsys, "unpin", "digits", "1/1")["was_pinned"] is False
    assert pinned(store) == set()


def test_what_is_not_there_cannot_be_pinned(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(capsys, "pin", "digits", "1/9")[0] == Corrupt.exit_code
    assert run_command(capsys, "pin", "digits", "newest")[0] == Invalid.exit_code
    assert pinned(store) == set()


def test_show_tells_why_each_checkpoint_is_what_it_is(
    store: LocalStore, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = run_command(capsys, "show", "digits")[1].splitlines()
    assert "the first checkpoint" in next(line for line in lines if "─ base" in line)
    with IncrementalCheckpointer(tmp_path / "lossy", bounded="int8", deltas_per_base=8) as checkpointer:
        smooth = {"w": torch.linspace(0, 1, 20_000)}
        checkpointer.save(smooth)
        checkpointer.save({"w": smooth["w"] + 1e-3})
    rows = told(capsys, "show", str(tmp_path / "lossy"))["chain"]
    assert rows[0]["bound"] is None
    assert rows[1]["bound"] > 0
    assert rows[1]["decision"]["modes"]
    assert "not exact: within" in run_command(capsys, "show", str(tmp_path / "lossy"))[1]


def with_bases(store: LocalStore) -> None:
    """Two attempts more: one base each, with two deltas."""
    for _ in range(2):
        with IncrementalCheckpointer(store, deltas_per_base=8) as checkpointer:
            checkpointer.restore()
            for seed in range(3):
                checkpointer.save(a_state(10 + seed), base=seed == 0)


def test_a_dry_run_tells_what_would_go_and_deletes_nothing(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    with_bases(store)
    before = store.list("")
    code, text, _ = run_command(capsys, "gc", "digits", "--keep", "1", "--grace", "0", "--dry-run")
    assert code == 0
    assert "would go" in text
    assert "000001/00000000" in text
    assert store.list("") == before
    would = told(capsys, "gc", "digits", "--keep", "1", "--grace", "0", "--dry-run")
    does = told(capsys, "gc", "digits", "--keep", "1", "--grace", "0")
    for key in ("kept", "collected", "deleted", "freed_bytes"):
        assert would[key] == does[key]
    assert does["freed_bytes"] > 0


def test_what_is_kept_restores_after_a_collection_and_show_tells_what_is_gone(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    with_bases(store)
    told(capsys, "pin", "digits", "1/1")
    done = told(capsys, "gc", "digits", "--keep", "1", "--grace", "0")
    assert "000001/00000003" in done["collected"]
    kept = {row["checkpoint"]: row["reason"] for row in done["kept"]}
    assert kept["000001/00000001"] == "pinned"
    assert bits(dict(restore_checkpoint(store, 1, 1))) == bits(a_state(1))
    assert run_command(capsys, "verify", "digits", "--data")[0] == 0
    shown = told(capsys, "show", "digits")
    assert shown["collected"] == len(done["collected"])
    assert shown["problems"] == []
    assert f"{shown['collected']} older checkpoints were collected" in run_command(capsys, "show", "digits")[1]


def test_nothing_young_is_collected_by_default(store: LocalStore, capsys: pytest.CaptureFixture[str]) -> None:
    with_bases(store)
    assert told(capsys, "gc", "digits", "--keep", "1")["collected"] == []


def test_a_collection_that_something_stands_against_says_so_by_its_code(
    store: LocalStore, capsys: pytest.CaptureFixture[str]
) -> None:
    with_bases(store)
    claim(store, "digits", {})  # an attempt that has not sealed yet
    before = store.list("")
    code, text, error = run_command(capsys, "gc", "digits", "--keep", "1", "--grace", "0", "--json")
    assert code == Unavailable.exit_code
    assert "nothing was deleted" in error
    assert json.loads(text)["reason"]
    assert store.list("") == before


def test_a_registry_that_does_not_answer_stops_a_collection(
    store: LocalStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions of a registered model have no weights of their own."""
    with_bases(store)
    before = store.list("")
    monkeypatch.setenv("RETOMA_MLFLOW_URL", "http://127.0.0.1:9")
    code, _, error = run_command(capsys, "gc", "digits", "--keep", "1", "--grace", "0")
    assert code == Unavailable.exit_code
    assert "--no-registry" in error
    assert store.list("") == before
    assert told(capsys, "gc", "digits", "--keep", "1", "--grace", "0", "--no-registry")["collected"]


def test_a_store_at_an_address_is_collected_without_a_registry(
    store: LocalStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_bases(store)
    monkeypatch.setenv("RETOMA_MLFLOW_URL", "http://127.0.0.1:9")
    assert told(capsys, "gc", str(store.folder), "--keep", "1", "--grace", "0")["collected"]
