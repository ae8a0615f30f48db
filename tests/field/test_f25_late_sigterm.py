"""F25: a late SIGTERM turns Completed into Crashed. The range is done all the same, and costs nothing more.

That a worker which dies between Pending and Running does not hold a slot for ever: tests/end_to_end/test_net.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from infra.deploy import deploy
from infra.settings import Settings
from tests.support.ranges import Range, end_all, wait_for
from training.checkpoint.history import read_lineage


@pytest.fixture
def epoch(stack: Settings, tmp_path: Path) -> Iterator[Range]:
    deploy(stack)
    found = Range(stack, tmp_path, epochs=1)
    yield found
    end_all(found)


@pytest.mark.xdist_group("net")
def test_sigterm_after_the_last_commit_does_not_lose_the_range(epoch: Range) -> None:
    epoch.start()
    supervisor, _ = epoch.processes(token=1)
    wait_for(lambda: ((head := read_lineage(epoch.store).head) and head.manifest.position.epoch == 1) or None)
    while supervisor.is_running() and supervisor.status() != psutil.STATUS_ZOMBIE:
        supervisor.terminate()
        time.sleep(0.02)
    state = wait_for(epoch.ended, 15)
    assert state["type"] == "COMPLETED"

    head = read_lineage(epoch.store).head
    epoch.start(attempt=2)
    assert wait_for(epoch.ended)["type"] == "COMPLETED"
    lineage = read_lineage(epoch.store)
    assert lineage.head == head
    assert len(lineage.attempts) == 1, "it claimed no token"
