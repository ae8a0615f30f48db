"""A range from its parent's side, against an orchestrator in memory and a real store."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import pytest

from infra.beat import Progress, Reporter
from infra.facts import from_metadata, to_metadata
from infra.prefect_runs import FlowRunInfo
from tasks.attempts import (
    DEPLOYMENT,
    RangeFollower,
    Superseded,
    attempt_key,
    cancel_ranges,
    error_from,
    outcome_of,
    run_tag,
)
from tasks.budget import GaveUp
from tasks.follow import is_gone
from tasks.milestones import Milestone, Sizes
from tasks.order import RangeOrder
from tests.support.stores import RunBuilder
from training.checkpoint.end import read_ends
from training.checkpoint.store import MemoryStore
from training.config import JobConfig
from training.errors import Diverged, Fenced, Invalid, Preempted, RetomaError, Unavailable

CONFIG = JobConfig(job="some.module:Job", epochs=2, attempts_per_range=3)
ORDER = RangeOrder(
    run="run-1", start=0, stop=2, attempt=1, config=CONFIG, requested="sha256:0", store_url="memory://"
)
PARENT = "parent"
# What an attempt does while the parent waits: work on the store, then end in a state with a message.
Deed = Callable[["World"], tuple[str, str]]


class World:
    """A server, a clock and a store. Each new attempt takes the next deed."""

    def __init__(self, *deeds: Deed) -> None:
        self.store = MemoryStore()
        self.builder = RunBuilder(self.store, "run-1")
        self.deeds = list(deeds)
        self.children: dict[str, FlowRunInfo] = {}
        self.pending: dict[str, Deed] = {}
        self.started: list[str] = []
        self.cancelled: list[str] = []
        self.current = ""  # the attempt whose deed is being done
        self.own_state = "RUNNING"
        self.now = 0.0
        self.reported: Progress | None = None
        self.shown: list[str] = []

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def find_by_key(self, keys: Iterable[str]) -> dict[str, FlowRunInfo]:
        return {key: self.children[key] for key in keys if key in self.children}

    def start(
        self, deployment: str, parameters: dict[str, Any], *, name: str, key: str, tags: Iterable[str]
    ) -> FlowRunInfo:
        assert deployment == DEPLOYMENT
        assert parameters["order"]["attempt"] == int(key.rpartition("a")[2])
        self.started.append(key)
        self.pending[key] = self.deeds.pop(0)
        return self.put(key, "SCHEDULED")

    def read(self, flow_run_id: str) -> FlowRunInfo:
        if flow_run_id == PARENT:
            return FlowRunInfo(id=PARENT, name=PARENT, state=self.own_state)
        if flow_run_id in self.pending:
            self.current = flow_run_id
            self.put(flow_run_id, "RUNNING")
            state, message = self.pending[flow_run_id](self)
            if state != "RUNNING":
                del self.pending[flow_run_id]
            self.put(flow_run_id, state, message)
        return self.children[flow_run_id]

    def live_with_tag(self, tag: str) -> list[FlowRunInfo]:
        assert tag == run_tag("run-1")
        return [child for child in self.children.values() if child.live]

    def cancel(self, flow_run_id: str) -> None:
        self.cancelled.append(flow_run_id)

    def progress(self, run: str) -> Progress | None:
        return self.reported

    def put_artifact(self, key: str, kind: str, data: str, *, flow_run_id: str) -> None:
        assert (key, kind, flow_run_id) == ("attempts-run-1", "markdown", PARENT)
        self.shown.append(data)

    def put(self, key: str, state: str, message: str = "") -> FlowRunInfo:
        self.children[key] = FlowRunInfo(id=key, name=key, state=state, message=message, parameters={"order": {}})
        return self.children[key]

    def follow(self) -> None:
        RangeFollower(
            ORDER,
            runs=self,
            store=self.store,
            logger=logging.getLogger("test"),
            parent=PARENT,
            sleep=self.sleep,
            clock=lambda: self.now,
        ).follow()


def completes(world: World) -> tuple[str, str]:
    world.builder.commit(world.builder.attempt(0, 2), 20)
    return "COMPLETED", ""


def crashes(world: World) -> tuple[str, str]:
    world.builder.claim(0, 2, flow_run_id=world.current)
    return "CRASHED", "killed"


def saves_and_crashes(world: World) -> tuple[str, str]:
    step = world.builder.head.manifest.position.step + 1 if world.builder.head else 1
    world.builder.commit(world.builder.attempt(0, 2, flow_run_id=world.current), step)
    return "CRASHED", "killed"


def key(attempt: int) -> str:
    return attempt_key(ORDER, attempt)


def test_a_crashed_attempt_is_followed_by_another_with_a_new_number() -> None:
    world = World(crashes, completes)
    world.follow()
    assert world.started == [key(1), key(2)]


def test_a_finished_range_starts_nothing() -> None:
    world = World()
    completes(world)
    world.follow()
    assert world.started == []


def test_a_new_parent_walks_past_the_dead_and_attaches_to_the_living() -> None:
    world = World()
    world.put(key(1), "CRASHED")
    world.put(key(2), "FAILED", "Invalid: of an earlier start, cured meanwhile")
    world.put(key(3), "RUNNING")
    world.pending[key(3)] = completes
    world.follow()
    assert world.started == []


def test_many_dead_attempts_are_walked_past() -> None:
    world = World(completes)
    for number in range(1, 121):
        world.put(key(number), "CRASHED")
    world.follow()
    assert world.started == [key(121)]


@pytest.mark.parametrize("state", ["CRASHED", "CANCELLED", "CANCELLING"])
def test_every_way_of_dying_is_answered_with_another_attempt(state: str) -> None:
    world = World(lambda _: (state, ""), completes)
    world.follow()
    assert len(world.started) == 2


@pytest.mark.parametrize("kind", [Invalid, Diverged, RetomaError])
def test_a_failed_attempt_is_final_and_keeps_kind_and_hint(kind: type[RetomaError]) -> None:
    state, message = outcome_of(kind("the loss is nan", hint="lower it"))
    world = World(lambda _: (state, message))
    with pytest.raises(kind, match="the loss is nan") as caught:
        world.follow()
    assert type(caught.value) is kind
    assert len(world.started) == 1


def test_tries_in_a_row_that_commit_nothing_end() -> None:
    world = World(*[crashes] * 10)
    with pytest.raises(GaveUp, match="3 tries") as caught:
        world.follow()
    assert len(world.started) == 3
    assert caught.value.kind == "Unavailable"


def test_restarts_in_place_and_attempts_count_into_one_budget() -> None:
    def crashes_twice(world: World) -> tuple[str, str]:
        crashes(world)
        return crashes(world)

    world = World(*[crashes_twice] * 10)
    with pytest.raises(GaveUp, match="4 tries"):
        world.follow()
    assert len(world.started) == 2


def test_an_attempt_that_died_before_its_claim_counts_too() -> None:
    world = World(*[lambda _: ("CRASHED", "no such image")] * 10)
    with pytest.raises(GaveUp):
        world.follow()
    assert len(world.started) == 3


def test_new_checkpoints_refill_the_budget() -> None:
    world = World(*[saves_and_crashes] * 8, completes)
    world.follow()
    assert len(world.started) == 9


def test_the_word_of_a_completed_attempt_is_not_enough() -> None:
    world = World(lambda _: ("COMPLETED", ""), completes)
    world.follow()
    assert len(world.started) == 2


def test_the_store_is_enough_even_if_the_attempt_died_at_its_end() -> None:
    def finishes_and_dies(world: World) -> tuple[str, str]:
        completes(world)
        return "CRASHED", "killed after its last commit"

    world = World(finishes_and_dies)
    world.follow()
    assert len(world.started) == 1


def test_a_fenced_attempt_whose_follower_is_known_is_walked_past() -> None:
    def fenced(world: World) -> tuple[str, str]:
        world.put(key(2), "RUNNING")
        world.pending[key(2)] = completes
        return outcome_of(Fenced("token 2 was claimed"))

    world = World(fenced)
    world.follow()
    assert world.started == [key(1)]


def test_an_attempt_fenced_from_outside_ends_the_range_instead_of_fighting() -> None:
    world = World(lambda _: outcome_of(Fenced("token 2 was claimed")))
    with pytest.raises(Fenced):
        world.follow()
    assert len(world.started) == 1


def test_an_attempt_that_is_given_up_has_an_end_that_names_what_the_server_said() -> None:
    def cancelled(world: World) -> tuple[str, str]:
        crashes(world)
        world.reported = progress(flow_run_id=world.current, token=1, epoch=1, step=17)
        return "CANCELLING", "no progress for 15 s"

    world = World(cancelled, completes)
    world.follow()
    ends = read_ends(world.store)
    assert list(ends) == [1]
    assert (ends[1].by, ends[1].kind, ends[1].step, ends[1].epoch) == ("parent", "Unavailable", 17, 1)
    assert "no progress for 15 s" in ends[1].reason


def test_an_attempt_that_was_preempted_again_and_again_is_not_given_up() -> None:
    def preempted(world: World) -> tuple[str, str]:
        return outcome_of(Preempted("the node goes"))

    world = World(*[preempted] * 9, completes)
    world.follow()
    assert len(world.started) == 10


@pytest.mark.parametrize("state", ["CRASHED", "CANCELLING", "CANCELLED", "COMPLETED"])
def test_a_parent_that_the_server_does_not_count_any_more_starts_nothing_and_leaves(state: str) -> None:
    def freezes(world: World) -> tuple[str, str]:
        world.own_state = state
        return crashes(world)

    world = World(freezes, completes)
    with pytest.raises(Superseded):
        world.follow()
    assert world.started == [key(1)]


def test_a_parent_notices_within_seconds_that_it_is_not_wanted_while_its_range_trains() -> None:
    def trains(world: World) -> tuple[str, str]:
        world.own_state = "CANCELLED" if world.now > 100 else "RUNNING"
        return "RUNNING", ""

    world = World(trains)
    with pytest.raises(Superseded):
        world.follow()
    assert world.now < 110
    assert world.cancelled == [key(1)], "whoever started it"


def test_of_a_cancelled_run_the_living_ranges_are_cancelled_once() -> None:
    world = World()
    for number, state in enumerate(("CRASHED", "CANCELLING", "RUNNING", "SCHEDULED"), start=1):
        world.put(key(number), state)
    cancel_ranges(world, "run-1")
    assert world.cancelled == [key(3), key(4)]


def test_a_living_process_is_not_gone_and_a_recycled_number_is() -> None:
    assert not is_gone(progress())
    assert is_gone(progress(pid_started=psutil.Process().create_time() - 100))
    assert not is_gone(progress(pid_started=1.0, host="another"))


@pytest.mark.parametrize("error", [Unavailable("x: y", hint="h"), Preempted("z"), Fenced("f"), Invalid("i")])
def test_an_error_survives_the_message_of_a_state(error: RetomaError) -> None:
    found = error_from(outcome_of(error)[1])
    assert (type(found), found.message, found.hint) == (type(error), error.message, error.hint)


def test_facts_survive_a_server_that_cuts_long_values() -> None:
    long = progress(error="x" * 5000, loss=0.5, restored="000001/00000002")
    metadata = to_metadata(long)
    assert max(len(text) for text in metadata.values()) < 500
    assert from_metadata(Progress, metadata) == long.model_copy(update={"error": "x" * 240})
    milestone = Milestone(
        run="r",
        phase="done",
        host="h",
        pid=1,
        pid_started=1.0,
        flow_run_id="f",
        metrics={"val.loss": 0.25, **{f"metric_{number}": 1.0 for number in range(50)}},
        sizes=Sizes(
            checkpoints=1,
            deltas=0,
            attempts=1,
            state_bytes=2,
            written_bytes=3,
            delta_bytes=None,
            delta_percent=None,
        ),
    )
    assert from_metadata(Milestone, to_metadata(milestone)) == milestone
    assert from_metadata(Milestone, {"other": "1"}) is None


def test_a_server_that_is_away_does_not_hold_up_reporting(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> Any:
        raise ConnectionError("refused")

    events: list[dict[str, Any]] = []
    reporter = Reporter("0" * 32, send_seconds=0.01, connect=refuse, emit=lambda **event: events.append(event))
    for beats in range(200):
        reporter.report(progress(beats=beats))
    reporter.close(timeout_seconds=60)  # it may import Prefect first
    assert events[-1]["payload"]["beats"] == 199, "the newest is what is sent"
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1


def progress(**changes: Any) -> Progress:
    values = {
        "run": "run-1",
        "start": 0,
        "stop": 2,
        "epochs": 2,
        "attempt": 1,
        "flow_run_id": "f",
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "pid_started": psutil.Process().create_time(),
    }
    return Progress.model_validate({**values, **changes})
