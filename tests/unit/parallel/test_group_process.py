"""A real group of ranks under its launcher: killed, frozen, hung, asked to leave; and the same run to the bit."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cuts import gpt_config, write_corpus
from tests.support.launched import Launched, wait_until_gone
from training.checkpoint.history import read_lineage
from training.config import JobConfig
from training.ports import Beat, Done, Failed

pytestmark = pytest.mark.xdist_group("ranks")  # each of them needs more processes than there are cores
STEPS = 6  # of all three epochs
PATIENCE_SECONDS = (
    15.0  # far less than torch's own 30 s for a process that does not hear; figures are measured elsewhere
)


class Scene:
    """Groups that train the same job, which does what files say."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, write_corpus(folder / "corpus")
        self.orders = folder / "orders"
        self.orders.mkdir()
        self._launched: list[Launched] = []

    def tell(self, name: str, text: object) -> None:
        (self.orders / name).write_text(str(text))

    def quick(self) -> None:
        (self.orders / "slow").unlink()

    def config(self, world: int, **changes: Any) -> JobConfig:
        params = {**gpt_config().params, "n_layer": 3, "folder": str(self.orders)}
        parallel = {"world": world, **changes.pop("parallel", {})}
        return gpt_config(job="tests.support.slow_gpt:SlowGpt", params=params, parallel=parallel, **changes)

    def start(self, world: int = 2, name: str = "run", **changes: Any) -> Launched:
        self._launched.append(Launched(self.config(world, **changes), self.folder / name, self.data))
        return self._launched[-1]

    def straight(self, world: int = 2, **changes: Any) -> Done:
        """The same, undisturbed."""
        last = self.start(world, "straight", **changes).end()
        assert isinstance(last, Done)
        return last

    def close(self) -> None:
        for each in self._launched:
            each.close()


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
    assert "stack of rank 2" in group.log.read_text()


@pytest.mark.soak
def test_asked_to_leave_all_ranks_commit_the_same_step(scene: Scene) -> None:
    scene.tell("slow", 0.1)
    group = scene.start()
    group.until_step(2)
    group.process.terminate()
    last = group.end()
    assert isinstance(last, Failed)
    assert last.error == "Preempted"
    head = read_lineage(group.store).head
    assert head is not None
    assert f"step {head.manifest.position.step} is committed" in last.message
    scene.quick()
    again = scene.start().end()
    assert isinstance(again, Done)
    assert again.state_digest == scene.straight().state_digest


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
