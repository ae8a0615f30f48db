"""F22: a crash is never retried, or retried for ever. Real training processes, a real supervisor and its parent."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from infra.beat import Progress
from infra.prefect_runs import FlowRunInfo
from tasks.attempts import RangeFollower, outcome_of
from tasks.budget import GaveUp
from tasks.order import RangeOrder
from tasks.range import RangeSupervisor
from tests.support.cuts import mnist_config, write_digits
from tests.support.faults import ROOT
from training.checkpoint.end import read_ends
from training.checkpoint.history import read_lineage
from training.checkpoint.outcomes import outcomes
from training.checkpoint.store import LocalStore
from training.checkpoint.token import token_numbers
from training.config import digest_of
from training.errors import Diverged, Invalid, RetomaError
from training.session import train_range

PARENT = "parent"


class Silent:
    """A publisher that nobody listens to."""

    def attempt_started(self, token: int, start: int, stop: int, who: Mapping[str, Any]) -> None:
        """Nothing."""

    def attempt_ended(self, token: int, status: str, reason: str) -> None:
        """Nothing."""

    def notify(self) -> None:
        """Nothing."""

    def profiled(self, path: str) -> None:
        """Nothing."""


class Orchestrator:
    """Flow runs in memory; each one is a real supervisor with real training processes, run when it is looked at."""

    def __init__(self, folder: Path, health: dict[str, Any] | None = None, **params: Any) -> None:
        digits = folder / "digits"
        if not digits.is_dir():
            write_digits(digits)
        self.config = mnist_config(
            job="tests.support.mortal_digits:MortalDigits",
            params={"channels": 2, "hidden": 8, "folder": str(digits), **params},
            health=health or {},
        )
        self.order = RangeOrder(
            run="r",
            start=0,
            stop=self.config.epochs,
            attempt=1,
            config=self.config,
            requested=digest_of(self.config.identity()),
            store_url=str(folder / "store"),
        )
        self.store = LocalStore(folder / "store")
        self.orders: dict[str, RangeOrder] = {}
        self.runs: dict[str, FlowRunInfo] = {}
        self.reported: Progress | None = None
        self.table = ""

    def find_by_key(self, keys: Iterable[str]) -> dict[str, FlowRunInfo]:
        return {key: self.runs[key] for key in keys if key in self.runs}

    def start(
        self, deployment: str, parameters: dict[str, Any], *, name: str, key: str, tags: Iterable[str]
    ) -> FlowRunInfo:
        self.orders[key] = RangeOrder.model_validate(parameters["order"])
        return self._put(key, "SCHEDULED")

    def read(self, flow_run_id: str) -> FlowRunInfo:
        if flow_run_id == PARENT:
            return FlowRunInfo(id=PARENT, name=PARENT, state="RUNNING")
        if self.runs[flow_run_id].state == "SCHEDULED":
            self._put(flow_run_id, *self._execute(flow_run_id))
        return self.runs[flow_run_id]

    def live_with_tag(self, tag: str) -> list[FlowRunInfo]:
        return []

    def cancel(self, flow_run_id: str) -> None:
        raise AssertionError("nobody is alive")

    def progress(self, run: str) -> Progress | None:
        return self.reported

    def put_artifact(self, key: str, kind: str, data: str, *, flow_run_id: str) -> None:
        self.table = data

    def follow(self) -> None:
        """A parent that knows nothing but the store and the flow runs."""
        logger = logging.getLogger("test")
        RangeFollower(
            self.order, runs=self, store=self.store, logger=logger, parent=PARENT, sleep=lambda _: None
        ).follow()

    @property
    def tokens(self) -> int:
        return max(token_numbers(self.store)[0], default=0)

    def _execute(self, key: str) -> tuple[str, str]:
        supervisor = RangeSupervisor(
            order=self.orders[key],
            root=ROOT,
            flow_run_id=key,
            registry=None,
            publisher=Silent(),
            on_progress=lambda progress: setattr(self, "reported", progress),
            logger=logging.getLogger("test"),
        )
        try:
            supervisor.run()
        except RetomaError as error:
            return outcome_of(error)
        return "COMPLETED", ""

    def _put(self, key: str, state: str, message: str = "") -> FlowRunInfo:
        parameters: dict[str, Any] = {"order": {}}
        self.runs[key] = FlowRunInfo(id=key, name=key, state=state, message=message, parameters=parameters)
        return self.runs[key]


def test_killed_once_it_is_tried_again_and_what_it_cost_is_told(tmp_path: Path) -> None:
    world = Orchestrator(tmp_path, harm_at_step=5, harmed=str(tmp_path / "harmed"))
    world.follow()
    lineage = read_lineage(world.store)
    assert lineage.head is not None
    assert lineage.head.manifest.position.epoch == world.config.epochs
    assert world.tokens == 2
    assert "token 2 went on from 000001/" in world.table
    first, second = outcomes(lineage).values()
    assert first.end is not None
    assert (first.end.kind, first.end.by) == ("Unavailable", "supervisor")
    assert "SIGKILL" in first.end.reason
    assert first.next_token == 2
    assert first.lost_steps is not None
    assert first.lost_steps <= 1, "there is a save after every step"
    assert second.end is not None
    assert second.end.kind == "Done"


def test_killed_every_time_at_one_step_it_stops_and_says_so_and_no_new_parent_forgets_it(tmp_path: Path) -> None:
    world = Orchestrator(tmp_path, harm_at_step=5)
    with pytest.raises(GaveUp, match=r"3 tries in a row ended at step \d") as raised:
        world.follow()
    assert world.tokens == 3
    text = str(raised.value)
    assert text.count("SIGKILL") == 3
    assert "retoma train JOB.yaml --run r" in text
    for _ in range(2):  # parents that start again
        with pytest.raises(GaveUp):
            world.follow()
    assert world.tokens == 3, "a new parent has tried it once more"


def test_a_configuration_error_is_not_tried_again(tmp_path: Path) -> None:
    world = Orchestrator(tmp_path, harm_at_step=0)
    with pytest.raises(Invalid, match="harm_at_step"):
        world.follow()
    with pytest.raises(Invalid, match="harm_at_step"):
        world.follow()
    assert world.tokens == 1
    assert read_ends(world.store)[1].kind == "Invalid"


def test_a_loss_that_was_nan_once_is_rolled_back_in_place_and_changes_nothing(tmp_path: Path) -> None:
    harm = {"harm": "nan", "harm_at_step": 5, "harmed": str(tmp_path / "harmed")}
    world = Orchestrator(tmp_path, {"on_divergence": "rollback"}, **harm)
    world.follow()
    assert (world.tokens, len(world.runs)) == (2, 1)
    lineage = read_lineage(world.store)
    seal = lineage.attempts[1].seal
    assert seal is not None
    assert seal.rollback is not None
    assert seal.rollback.since_step == 5
    assert read_ends(world.store)[1].kind == "Diverged"
    # The illness is gone: everything that counts is as if it had never been.
    straight = train_range(world.config, str(tmp_path / "straight"), "r")
    assert lineage.head is not None
    assert lineage.head.manifest.state_digest == straight.state_digest


def test_a_loss_that_is_nan_stops_the_run_and_is_not_tried_again(tmp_path: Path) -> None:
    world = Orchestrator(tmp_path, harm="nan", harm_at_step=5)
    for _ in range(2):
        with pytest.raises(Diverged, match="the loss is nan, at step 5"):
            world.follow()
    assert world.tokens == 1
