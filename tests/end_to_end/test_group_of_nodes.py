"""A range on two nodes with everything real: one is killed, the group goes on smaller, and grows again."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from infra.processes import ProcessTable
from infra.settings import Settings
from infra.stack import down, up
from tasks.runs import find_run
from tests.conftest import JOB, ROOT, SMALL, STEPS_PER_EPOCH
from training.checkpoint.history import Lineage

pytestmark = [pytest.mark.soak, pytest.mark.timeout(500)]
EPOCHS = 40
RUN = "nodes"
T = TypeVar("T")


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Settings]:
    """A stack whose `gpu` worker takes the range, a node for it, and another one."""
    settings = Settings(home=ROOT, state_dir=tmp_path / "retoma", gpu_limit=3)
    for name, value in (("HOME", settings.home), ("STATE_DIR", settings.state_dir), ("GPU_LIMIT", 3)):
        monkeypatch.setenv(f"RETOMA_{name}", str(value))
    try:
        up(settings)
        yield settings
    finally:
        down(settings)
        assert not ProcessTable(settings.state_dir).members()


def test_a_node_is_killed_the_group_shrinks_and_grows_and_ends(two_nodes: Settings) -> None:
    changes = {
        **SMALL,
        "epochs": EPOCHS,
        "epochs_per_range": EPOCHS,
        "parallel.world": 2,
        "parallel.nodes": 2,
        "parallel.min_nodes": 1,
    }
    arguments = [argument for key, value in changes.items() for argument in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "flows.cli", "train", JOB, "--run", RUN, *arguments]
    training = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: worlds(two_nodes)[-1:] == [2])
        (node,) = wait_for(nodes)
        for process in [*node.children(recursive=True), *node.parents()[:1]]:  # its ranks, and its flow process
            process.kill()
        node.kill()
        wait_for(lambda: worlds(two_nodes)[-1:] == [1])
        wait_for(lambda: worlds(two_nodes)[-1:] == [2])
        text, _ = training.communicate(timeout=200)
    finally:
        training.kill()
    assert training.returncode == 0, text
    lineage = lineage_of(two_nodes)
    assert lineage is not None
    assert lineage.head is not None
    assert lineage.head.manifest.position.step == EPOCHS * STEPS_PER_EPOCH
    found = [world for world, _ in itertools.groupby(worlds(two_nodes))]
    assert found[-3:] == [2, 1, 2]
    wait_for(lambda: not nodes())


def nodes() -> list[psutil.Process]:
    """The processes that are other nodes of a group."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "training.node" in line and "--name" in line:
            found.append(process)
    return found


def lineage_of(settings: Settings) -> Lineage | None:
    if not (Path(settings.run_url(RUN)) / "retoma.json").exists():
        return None
    return find_run(settings, RUN)[1]


def worlds(settings: Settings) -> list[int]:
    """Ranks that wrote each checkpoint, in order."""
    lineage = lineage_of(settings)
    return [committed.manifest.world_size for committed in lineage.chain] if lineage else []


def wait_for(look: Callable[[], T], seconds: float = 90) -> T:
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found
