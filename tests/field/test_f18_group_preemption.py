"""F18 on many ranks: a group that is asked to leave commits one step of all its ranks, and says "preempted"."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launched import Scene, wait_until_gone
from training.checkpoint.history import read_lineage
from training.errors import Preempted
from training.ports import Done, Failed

pytestmark = [pytest.mark.soak, pytest.mark.xdist_group("ranks")]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


@pytest.mark.parametrize("times", [1, 3])
def test_asked_to_leave_all_ranks_commit_the_same_step(scene: Scene, times: int) -> None:
    scene.tell("slow", 0.1)
    group = scene.start()
    group.until_step(2)
    for _ in range(times):
        group.process.terminate()
        time.sleep(0.05)
    last = group.end()
    assert isinstance(last, Failed)
    assert last.error == "Preempted"
    assert group.process.returncode == Preempted.exit_code
    head = read_lineage(group.store).head
    assert head is not None
    assert f"step {head.manifest.position.step} is committed" in last.message
    scene.quick()
    again = scene.start().end()
    assert isinstance(again, Done)
    assert again.state_digest == scene.straight().state_digest


def test_one_rank_that_is_told_alone_takes_the_others_with_it(scene: Scene) -> None:
    """As when a cloud, or a shell, signals a process and not its group."""
    scene.tell("slow", 0.1)
    group = scene.start()
    group.until_step(2)
    group.ranks()[1].send_signal(signal.SIGTERM)
    last = group.end()
    assert isinstance(last, Failed)
    assert last.error == "Preempted"
    head = read_lineage(group.store).head
    assert head is not None
    assert f"step {head.manifest.position.step} is committed" in last.message


def test_sigkill_in_the_middle_of_it_leaves_the_last_checkpoint(scene: Scene) -> None:
    scene.tell("slow", 0.5)
    group = scene.start()
    group.until_step(2)
    before = read_lineage(group.store).head
    ranks = list(group.ranks().values())
    group.process.terminate()
    time.sleep(0.2)
    group.process.kill()
    group.process.wait()
    wait_until_gone(ranks, 2)
    head = read_lineage(group.store).head
    assert head is not None
    assert before is not None
    assert head.manifest.position.step >= before.manifest.position.step
    scene.quick()
    again = scene.start().end()
    assert isinstance(again, Done)
    assert again.state_digest == scene.straight().state_digest
