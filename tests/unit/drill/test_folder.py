"""What a drill that was killed leaves behind goes with the next one; a drill that lives is left alone."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tasks.drill.folder import drill_folder, sweep

ROOT = Path(__file__).parents[3]

KILLED = """
import os, signal
from infra.processes import ProcessTable
from tasks.drill.folder import NAMESPACES, STACK, drill_folder
from tasks.drill.wires import wires
with drill_folder() as folder:
    (folder / STACK).mkdir()
    made = wires({}, folder / NAMESPACES)
    record = ProcessTable(folder / STACK).start("node-1", ["sleep", "300"], dict(os.environ), folder)
    print(record.pid, getattr(made, "name", ""), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_drill_left_is_removed_and_a_living_drill_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    killed = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, capture_output=True, text=True, check=False)
    pid, _, namespace = killed.stdout.strip().partition(" ")
    left = psutil.Process(int(pid))
    said: list[str] = []
    with drill_folder() as living:
        assert len(list(tmp_path.glob("retoma-drill-*"))) == 2
        sweep(ROOT, said.append)
        assert [*tmp_path.glob("retoma-drill-*")] == [living]
    assert not left.is_running() or left.status() == psutil.STATUS_ZOMBIE
    assert len(said) == 1
    assert not namespace or not Path("/run/netns", namespace).exists()
    assert not list(tmp_path.glob("retoma-drill-*"))


def test_a_folder_that_only_looks_like_one_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "retoma-drill-mine").mkdir()
    sweep(ROOT, lambda _: None)
    assert (tmp_path / "retoma-drill-mine").is_dir()
