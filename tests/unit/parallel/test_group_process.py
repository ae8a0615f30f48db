"""A real group of ranks under its launcher: killed, frozen, hung, asked to leave; and the same run to the bit."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import STEPS, Scene, wait_until_gone
from training.checkpoint.history import read_lineage
from training.ports import Beat, Done, Failed

pytestmark = pytest.mark.xdist_group("ranks")  # each of them needs more processes than there are cores
PATIENCE_SECONDS = (
    15.0  # far less than torch's own 30 s for a process that does not hear; figures are measured elsewhere
)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def test_a_group_that_is_killed_ends_as_the_straight_one(scene: Scene) -> None:
    scene.tell("slow", 0.1)
    cut = scene.start()
    cut.until_step(3)
    ranks = list(cut.ranks().values())
    cut.process.kill()
    cut.process.wait()
    wait_until_gone(ranks, 2)
    scene.quick()
    again = scene.start()
    last = again.end()
    assert isinstance(last, Done)
    assert last.position.step == STEPS
    assert again.restored().checkpoint is not None
    assert last.state_digest == scene.straight().state_digest
    assert {c.manifest.world_size for c in read_lineage(again.store).chain} == {2}
    for rank in (0, 1):
        assert f"rank {rank}: store: " in again.log.read_text(), "whose bytes these are"


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_and_ends_the_group(scene: Scene, rank: int) -> None:
    scene.tell("slow", 0.1)
    group = scene.start()
    group.until_step(2)
    ranks = group.ranks()
    ranks[rank].kill()
    killed = time.monotonic()
    last = group.end()
    assert time.monotonic() - killed < PATIENCE_SECONDS
    assert "Traceback" not in group.log.read_text(), "torch's, which costs a second and says nothing"
    assert isinstance(last, Failed)
    assert last.error == "Unavailable"
    assert f"rank {rank} (pid {ranks[rank].pid}) was killed by SIGKILL" in last.message
    wait_until_gone(list(ranks.values()), 2)


PIPELINE: dict[str, Any] = {"parallel": {"pipeline": 2, "microbatches": 2}}


@pytest.mark.soak
def test_a_pipeline_that_loses_a_rank_ends_as_the_straight_one(scene: Scene) -> None:
    scene.tell("slow", 0.1)
    group = scene.start(**PIPELINE)
    group.until_step(3)
    ranks = group.ranks()
    ranks[1].kill()
    last = group.end()
    assert isinstance(last, Failed)
    assert f"rank 1 (pid {ranks[1].pid}) was killed by SIGKILL" in last.message
    wait_until_gone(list(ranks.values()), 2)
    scene.quick()
    again = scene.start(**PIPELINE)
    done = again.end()
    assert isinstance(done, Done)
    assert again.restored().position.step > 0
    assert done.state_digest == scene.straight(**PIPELINE).state_digest


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_of_a_pipeline_that_hangs_is_named(scene: Scene, rank: int) -> None:
    scene.tell("slow", 0.1)
    parallel = {"pipeline": 3, "microbatches": 4}
    group = scene.start(world=3, parallel=parallel, supervisor={"silence_seconds": 3})
    group.until_step(3)  # not before an evaluation, which may take long
    ranks = group.ranks()
    scene.tell("hang", rank)
    last = group.end()
    assert isinstance(last, Failed)
    assert f"rank {rank} (pid {ranks[rank].pid}) made no step" in last.message


@pytest.mark.soak
def test_a_frozen_rank_is_named(scene: Scene) -> None:
    scene.tell("slow", 0.1)
    group = scene.start(world=3)
    group.until_step(2)
    ranks = group.ranks()
    ranks[1].send_signal(signal.SIGSTOP)
    frozen = time.monotonic()
    last = group.end()
    assert time.monotonic() - frozen < PATIENCE_SECONDS
    assert isinstance(last, Failed)
    assert f"rank 1 (pid {ranks[1].pid}) was frozen" in last.message
    assert last.report is not None
    assert "rank 1: no answer" in last.report
    assert "gloo:all" in last.report, "what the others waited in"
    wait_until_gone(list(ranks.values()), 2)


@pytest.mark.soak
def test_a_rank_that_hangs_is_named_and_not_those_that_wait_for_it(scene: Scene) -> None:
    scene.tell("slow", 0.1)
    group = scene.start(world=3, supervisor={"silence_seconds": 3})
    group.until_step(2)
    ranks = group.ranks()
    scene.tell("hang", 2)
    last = group.end()
    assert isinstance(last, Failed)
    assert f"rank 2 (pid {ranks[2].pid}) made no step" in last.message
    assert "has not come to the collective that others wait in" in last.message
    assert last.report is not None
    blocks = {block.partition(":")[0]: block for block in re.split(r"\n(?=rank)", last.report)}
    assert "support/slow_gpt.py" in blocks["rank 2"], "where it hangs"
    assert "gloo:all_reduce" in blocks["ranks 0, 1"], "the two are at the same place"
    assert "stack of rank 2" in group.log.read_text()


@pytest.mark.soak
def test_an_error_of_the_job_is_told_as_it_is_and_with_its_rank(scene: Scene) -> None:
    scene.tell("fail", 1)
    last = scene.start().end()
    assert isinstance(last, Failed)
    assert (last.error, last.message) == ("ValueError", "rank 1: this batch is bad")


@pytest.mark.soak
def test_another_world_size_goes_on_where_the_first_stopped(scene: Scene) -> None:
    scene.tell("slow", 0.1)
    group = scene.start(world=3)
    group.until_step(3)
    group.process.terminate()
    group.end()
    scene.quick()
    smaller = scene.start(world=2)
    last = smaller.end()
    assert isinstance(last, Done)
    assert smaller.restored().position.step >= 3
    samples = [message.position.sample for message in smaller.heard if isinstance(message, Beat)]
    assert samples == sorted(samples)
    assert last.position.step == STEPS
