"""The command: what it lists and refuses, and that a check that does not hold is exit code 1."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tasks.drill import run
from tasks.drill.recording import Recording
from tasks.drill.report import Drill
from tests.unit.drill.histories import killed
from tests.unit.test_cli import ROOT, run_command


@pytest.fixture
def drilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Recording], None]:
    """Makes the command see this recording instead of running anything."""
    monkeypatch.setenv("RETOMA_HOME", str(ROOT))
    monkeypatch.setenv("RETOMA_STATE_DIR", str(tmp_path))

    def replace(recording: Recording) -> None:
        def fake(*_: object, each: Callable[[Recording], None], **__: Any) -> Drill:
            each(recording)
            return Drill(datetime(2026, 1, 2, tzinfo=UTC), {"store": "none"}, [recording])

        monkeypatch.setattr(run, "run_drill", fake)

    return replace


def test_a_drill_that_passes_ends_with_0_and_leaves_a_report(
    drilled: Callable[[Recording], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drilled(killed())
    code, text, _ = run_command(capsys, "drill", "kill-train", "--seed", "5")
    assert code == 0
    assert "seed 5" in text
    assert "verdict 0.1 s by supervisor, first step 3.0 s, 5 steps lost" in text
    assert list((tmp_path / "drills").glob("*/drill.html"))


def test_a_drill_that_fails_ends_with_1_and_says_why(
    drilled: Callable[[Recording], None], capsys: pytest.CaptureFixture[str]
) -> None:
    drilled(killed(digest="xxh3:other"))
    code, text, _ = run_command(capsys, "drill", "kill-train")
    assert code == 1
    assert "bit for bit the straight run: xxh3:other" in text


def test_the_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = run_command(capsys, "drill", "--list")
    assert code == 0
    assert "partition-both" in text
    assert "hang-gil" in text


def test_what_makes_no_sense_is_refused_before_anything_starts(
    drilled: Callable[[Recording], None], capsys: pytest.CaptureFixture[str]
) -> None:
    drilled(killed())
    code, _, error = run_command(capsys, "drill", "kil-train")
    assert code == 2
    assert "no scenario kil-train" in error
    code, _, error = run_command(capsys, "drill", "--set", "epochs=2")
    assert code == 2
    assert "--job" in error
