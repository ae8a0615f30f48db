"""Other nodes for a range: called, replaced when nobody hears of them, not needed any more."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import pytest

from infra.prefect_runs import FlowRunInfo
from tasks.attempts import cancel_ranges
from tasks.companions import COMING_SECONDS, DEPLOYMENT, LOOK_SECONDS, Company, NodeCall
from tasks.order import RangeOrder
from training.config import JobConfig
from training.errors import Unavailable

CONFIG = JobConfig(job="some.module:Job", parallel={"world": 6, "nodes": 3, "min_nodes": 1})
ORDER = RangeOrder(
    run="run-1", start=0, stop=1, attempt=1, config=CONFIG, requested="sha256:0", store_url="memory://"
)


class Runs:
    """A server in memory."""

    def __init__(self) -> None:
        self.found: dict[str, FlowRunInfo] = {}
        self.cancelled: list[str] = []
        self.away = False

    def live_with_tag(self, tag: str) -> list[FlowRunInfo]:
        if self.away:
            raise Unavailable("no answer")
        return [run for run in self.found.values() if tag in run.tags]

    def start(
        self, deployment: str, parameters: dict[str, Any], *, name: str, key: str, tags: Iterable[str]
    ) -> FlowRunInfo:
        assert deployment == DEPLOYMENT
        made = FlowRunInfo(id=key, name=name, state="SCHEDULED", tags=tuple(tags), parameters=parameters)
        return self.found.setdefault(key, made)

    def cancel(self, flow_run_id: str) -> None:
        self.cancelled.append(flow_run_id)
        self.becomes(flow_run_id, "CANCELLING")

    def close(self) -> None:
        """Nothing is open."""

    def becomes(self, flow_run_id: str, state: str) -> None:
        self.found[flow_run_id] = self.found[flow_run_id].model_copy(update={"state": state})

    def ends(self, flow_run_id: str) -> None:
        del self.found[flow_run_id]


class Scene:
    def __init__(self) -> None:
        self.now, self.runs = 0.0, Runs()
        self.company = Company(
            ORDER, "127.0.0.1", lambda: self.runs, logging.getLogger("test"), clock=lambda: self.now
        )

    def look(self) -> list[str]:
        """Ids of those that are there after a look."""
        self.company.look(self.runs)
        return list(self.runs.found)


def test_as_many_are_called_as_are_missing_and_each_knows_where_to_come() -> None:
    scene = Scene()
    called = scene.look()
    assert len(called) == 2
    assert scene.look() == called
    call = NodeCall.model_validate(scene.runs.found[called[0]].parameters["call"])
    assert call.gathering == scene.company.gathering
    assert call.order == ORDER
    assert call.gathering.ticket not in repr(call)
    scene.runs.ends(called[0])
    assert len(scene.look()) == 2
    assert called[0] not in scene.look()


def test_the_log_names_the_flow_run_of_each_node_that_is_called(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scene = Scene()
    scene.look()
    scene.look()
    names = [run.name for run in scene.runs.found.values()]
    assert caplog.messages == [f"another node was called: flow run {name}" for name in names]


def test_one_that_runs_and_is_not_heard_of_is_given_up_for_another() -> None:
    scene = Scene()
    first, second = scene.look()
    for each in (first, second):
        scene.runs.becomes(each, "RUNNING")
    scene.company.here = (first,)
    scene.look()
    scene.now = COMING_SECONDS + 1
    assert len(scene.look()) == 3
    assert scene.runs.cancelled == [second]
    scene.company.here = ()  # lost: from now on its time runs
    scene.look()
    assert scene.runs.cancelled == [second]
    scene.now *= 3
    scene.look()
    assert scene.runs.cancelled == [second, first]


def test_those_of_an_attempt_that_is_over_are_sent_home_and_a_parent_that_is_cancelled_takes_all_with_it() -> None:
    scene, runs = Scene(), Runs()
    left = scene.look()
    later = Company(ORDER, "127.0.0.1", lambda: scene.runs, logging.getLogger("test"))
    later.look(scene.runs)
    assert scene.runs.cancelled == left
    assert len(scene.runs.found) == 4
    runs.found = scene.runs.found
    cancel_ranges(runs, "run-1")  # type: ignore[arg-type] # what it asks is there
    assert set(runs.cancelled) == set(runs.found) - set(left)


def test_a_server_that_is_away_is_asked_again_and_whoever_has_not_come_is_not_needed_in_the_end() -> None:
    scene = Scene()
    scene.runs.away = True
    scene.company.start()
    time.sleep(0.2)
    scene.runs.away = False
    deadline = time.monotonic() + 10
    while not scene.runs.found:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    scene.company.close(5)
    assert scene.runs.cancelled == list(scene.runs.found)


def test_when_the_range_is_done_nobody_is_called_for_those_that_leave() -> None:
    """It is not over yet: metrics and models are published, while the nodes have been dismissed."""
    scene = Scene()
    first, second = scene.look()
    for run in (first, second):
        scene.runs.becomes(run, "RUNNING")
    scene.company.here = (first, second)
    scene.company.start()
    scene.company.dismiss()
    scene.runs.ends(first)
    time.sleep(LOOK_SECONDS + 0.2)
    scene.company.close(5)
    assert list(scene.runs.found) == [second]
    assert scene.runs.cancelled == []


def test_one_that_has_started_and_was_not_heard_of_is_not_left_to_wait() -> None:
    scene = Scene()
    first, second = scene.look()
    for run in (first, second):
        scene.runs.becomes(run, "RUNNING")
    scene.company.here = (first,)
    scene.company.start()
    scene.company.close(5)
    assert scene.runs.cancelled == [second]
