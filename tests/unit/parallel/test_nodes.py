"""A group over several nodes: gathered, smaller when one is lost, larger when one comes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launched import STEPS, Scene, wait_until_gone
from training.checkpoint.history import read_lineage
from training.config import parse_config
from training.errors import Invalid
from training.ports import Beat, Done, Failed, Message, Pause, Present, Regroup

pytestmark = pytest.mark.xdist_group("ranks")  # each of them needs more processes than there are cores
TWO: dict[str, Any] = {"nodes": 2, "gather_seconds": 30}
ELASTIC: dict[str, Any] = {**TWO, "min_nodes": 1}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.close()


def heard(messages: list[Message], kind: type[Message]) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


def test_two_nodes_train_what_one_trains_with_as_many_ranks(scene: Scene) -> None:
    node = scene.lend()
    group = scene.start(parallel=TWO)
    last = group.end()
    assert isinstance(last, Done)
    assert last.state_digest == scene.straight().state_digest
    assert "rank 1 is process" in node.log.read_text()
    assert heard(group.heard, Present)[0].names == (node.log.stem,)
    assert node.process.wait(5) == 0  # dismissed


@pytest.mark.soak
def test_a_lost_node_is_named_and_the_group_goes_on_without_it_and_grows_when_it_is_back(scene: Scene) -> None:
    scene.tell("slow", 0.2)
    node = scene.lend()
    group = scene.start(parallel=ELASTIC)
    group.until_step(2)
    node.signal(signal.SIGKILL)
    lost = time.monotonic()
    last = group.end()
    assert isinstance(last, Failed)
    assert time.monotonic() - lost < 5
    assert f"process {node.process.pid} was lost" in last.message or "was killed by SIGKILL" in last.message
    scene.tell("slow", 1.0)  # it is not done before the other node is up
    smaller = scene.start(parallel=ELASTIC)
    smaller.until_step(smaller_step(smaller) + 1)
    back = scene.lend()
    last = smaller.end()
    assert isinstance(last, Failed)
    assert last.error == "Preempted"
    (regroup,) = heard(smaller.heard, Regroup)
    assert f"process {back.process.pid} has come" in regroup.reason
    scene.quick()
    whole = scene.start(parallel=ELASTIC)
    done = whole.end()
    assert isinstance(done, Done)
    assert done.position.step == STEPS
    sizes = [committed.manifest.world_size for committed in read_lineage(whole.store).chain]
    assert sorted(set(sizes)) == [1, 2]
    assert sizes[-1] == 2


def smaller_step(group: Any) -> int:
    """The step that a group starts from."""
    for message in group.messages():
        if message.kind == "restored":
            return int(message.position.step)
    raise AssertionError(group.log.read_text()[-3000:])


@pytest.mark.soak
def test_a_frozen_node_is_lost_and_holds_no_rank_when_it_wakes(scene: Scene) -> None:
    scene.tell("slow", 0.2)
    node = scene.lend()
    group = scene.start(parallel=TWO)
    group.until_step(2)
    ranks = list(node.ranks().values())
    assert ranks
    node.signal(signal.SIGSTOP)
    frozen = time.monotonic()
    last = group.end()
    assert isinstance(last, Failed)
    assert time.monotonic() - frozen < 6
    assert f"process {node.process.pid} was lost" in last.message
    node.signal(signal.SIGCONT)
    wait_until_gone(ranks, 2)
    scene.quick()
    again = scene.start(parallel=TWO)  # it takes part again
    done = again.end()
    assert isinstance(done, Done)
    assert done.state_digest == scene.straight().state_digest


@pytest.mark.soak
def test_a_rank_of_another_node_that_is_frozen_is_named(scene: Scene) -> None:
    scene.tell("slow", 0.2)
    node = scene.lend()
    group = scene.start(parallel=TWO)
    group.until_step(2)
    ((rank, process),) = node.ranks().items()
    process.send_signal(signal.SIGSTOP)
    last = group.end()
    assert isinstance(last, Failed)
    assert f"rank {rank} (node" in last.message
    assert f"pid {process.pid}) was frozen" in last.message
    assert node.process.poll() is None  # the node itself stays


@pytest.mark.soak
def test_a_node_that_is_asked_to_leave_lets_the_group_commit_and_is_done(scene: Scene) -> None:
    scene.tell("slow", 0.2)
    node = scene.lend()
    group = scene.start(parallel=ELASTIC)
    group.until_step(2)
    node.process.terminate()
    last = group.end()
    assert isinstance(last, Failed)
    assert (last.error, len(heard(group.heard, Regroup))) == ("Preempted", 1)
    head = read_lineage(group.store).head
    assert head is not None
    assert head.manifest.position.step >= 2
    assert node.process.wait(5) == 0
    scene.quick()
    assert isinstance(scene.start(parallel=ELASTIC).end(), Done)


@pytest.mark.soak
def test_too_few_nodes_are_named_and_a_stranger_is_none(scene: Scene) -> None:
    stranger = scene.lend(ticket="another", lease_seconds=2)
    group = scene.start(parallel={**TWO, "gather_seconds": 6})
    last = group.end()
    assert isinstance(last, Failed)
    assert "1 of 2 nodes came within 6 s, and 2 are needed" in last.message
    assert heard(group.heard, Pause)
    assert not heard(group.heard, Beat)
    assert stranger.process.wait(10) == 3


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        ({"world": 3, "nodes": 2}, "nodes 2 must share world 3 evenly"),
        ({"world": 4, "nodes": 4, "tensor": 2, "data": "fsdp"}, "each hold whole tensor groups of 2"),
        ({"world": 4, "nodes": 2, "min_nodes": 3}, "min_nodes 3 is more than nodes 2"),
        (
            {"world": 4, "nodes": 2, "min_nodes": 1, "data": "hsdp", "replicas": 2},
            "min_nodes 1, but with 1 nodes: hsdp needs replicas >= 2",
        ),
    ],
)
def test_nodes_that_make_no_group_are_refused_by_name(parallel: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        parse_config({"job": "a:B", "parallel": parallel})
