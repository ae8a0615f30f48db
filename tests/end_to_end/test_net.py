"""The net under dead processes: automations, successors of parents, cancelling, and a server that restarts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.automations import PREFIX, wanted
from infra.deploy import deploy
from infra.processes import ProcessTable, is_alive
from infra.servers import ask
from infra.settings import Settings
from infra.stack import up
from tests.end_to_end.test_train import (
    assert_no_orphans,
    assert_same_as_straight,
    in_the_middle_of_epoch,
    parent_process,
    retoma_train,
    training_process_of,
    wait_for,
    who,
)
from training.checkpoint.end import read_ends
from training.checkpoint.store import open_store

pytestmark = [pytest.mark.timeout(280), pytest.mark.xdist_group("net")]


def api(stack: Settings, method: str, path: str, body: Any = None) -> Any:
    ports = stack.ports()
    assert ports
    return ask(ports.prefect, method, f"/api/{path}", body)


def flow_runs(stack: Settings, run: str, flow: str) -> list[dict[str, Any]]:
    """Flow runs of a flow that belong to a run, oldest first."""
    wanted_runs = {"flows": {"name": {"any_": [flow]}}, "sort": "EXPECTED_START_TIME_ASC"}
    found = api(stack, "POST", "flow_runs/filter", wanted_runs)
    return [each for each in found if run in (each["parameters"].get("run"), order_of(each).get("run"))]


def order_of(flow_run: dict[str, Any]) -> dict[str, Any]:
    return dict(flow_run["parameters"].get("order", {}))


def set_state(stack: Settings, flow_run_id: str, state: str) -> None:
    body = {"state": {"type": state, "message": "by the test"}, "force": False}
    assert api(stack, "POST", f"flow_runs/{flow_run_id}/set_state", body)["status"] == "ACCEPT"


def states(stack: Settings, run: str, flow: str) -> list[str]:
    return [each["state_type"] for each in flow_runs(stack, run, flow)]


@contextmanager
def gpu_slots(stack: Settings, count: int) -> Iterator[None]:
    """Another worker for pool gpu, with more slots; the next test gets the usual one."""
    stop_worker(stack)
    up(stack.model_copy(update={"gpu_limit": count}))
    try:
        yield
    finally:
        stop_worker(stack)


def stop_worker(stack: Settings) -> None:
    """SIGKILL: what it has started goes on."""
    found = ProcessTable(stack.state_dir).find("worker-gpu")
    if found:
        found[1].kill()
        wait_for(lambda: True if ProcessTable(stack.state_dir).find("worker-gpu") is None else None, 10)


def test_automations_are_written_once_updated_by_name_and_never_twice(stack: Settings) -> None:
    def there() -> dict[str, dict[str, Any]]:
        found = [each for each in api(stack, "POST", "automations/filter") if each["name"].startswith(PREFIX)]
        assert len({each["name"] for each in found}) == len(found)
        return {each["name"]: each for each in found}

    deploy(stack)
    first = there()
    assert set(first) == {document["name"] for document in wanted(stack)}
    assert not deploy(stack)
    deploy(stack, force=True)
    assert there() == first, "what is the same is not written"

    lost = first[f"{PREFIX}progress lost"]
    twin = {key: lost[key] for key in ("name", "trigger", "actions")}
    api(stack, "POST", "automations/", {**twin, "enabled": True})
    api(stack, "POST", "automations/", {**twin, "enabled": True, "name": f"{PREFIX}of an older version"})
    api(stack, "PATCH", f"automations/{first[f'{PREFIX}parent silent']['id']}", {"enabled": False})
    assert deploy(stack.model_copy(update={"progress_within_seconds": 77.0}))
    second = there()
    assert set(second) == set(first)
    assert second[lost["name"]]["trigger"]["within"] == 77.0
    assert not second[f"{PREFIX}parent silent"]["enabled"], "what a person switched off stays off"

    api(stack, "PATCH", f"automations/{second[f'{PREFIX}parent silent']['id']}", {"enabled": True})
    assert deploy(stack)
    assert not deploy(stack)


@pytest.mark.soak
def test_a_range_whose_whole_tree_is_frozen_is_replaced_on_a_free_slot(
    stack: Settings, tmp_path: Path, straight_digest: str
) -> None:
    run = "frozen-tree"
    with gpu_slots(stack, 2), retoma_train(stack, tmp_path, run) as command:
        supervisor = in_the_middle_of_epoch(stack, run, 1, command)
        tree = [supervisor, training_process_of(supervisor)]
        for process in tree:
            process.suspend()
        try:
            text = command.ends()
        finally:
            for process in tree:
                if is_alive(process):
                    process.kill()
    lineage = assert_same_as_straight(stack, run, straight_digest, text)
    assert [who(lineage, token)["attempt"] for token in (1, 2, 3)] == [1, 1, 2]
    end = read_ends(open_store(stack.run_url(run)))[2]
    assert "no progress for" in end.reason
    assert_no_orphans(stack)


@pytest.mark.soak
def test_a_range_that_a_worker_took_and_never_started_is_tried_again(
    stack: Settings, tmp_path: Path, straight_digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = "stuck-pending"
    monkeypatch.setenv("RETOMA_PENDING_WITHIN_SECONDS", "12")
    with retoma_train(stack, tmp_path, run) as command:
        wait_for(lambda: flow_runs(stack, run, "train") or None)
        stop_worker(stack)
        first = wait_for(lambda: next(iter(flow_runs(stack, run, "train-range")), None))
        set_state(stack, first["id"], "PENDING")  # as a worker does that dies before the process is there
        up(stack)
        text = command.ends()
    lineage = assert_same_as_straight(stack, run, straight_digest, text)
    assert [who(lineage, token)["attempt"] for token in (1, 2)] == [2, 1]
    monkeypatch.undo()
    deploy(stack)


@pytest.mark.soak
def test_a_healthy_range_that_is_declared_dead_costs_an_attempt_and_nothing_else(
    stack: Settings, tmp_path: Path, straight_digest: str
) -> None:
    run = "false-verdict"
    with retoma_train(stack, tmp_path, run) as command:
        in_the_middle_of_epoch(stack, run, 1, command)
        set_state(stack, flow_runs(stack, run, "train-range")[-1]["id"], "CANCELLING")
        text = command.ends()
    lineage = assert_same_as_straight(stack, run, straight_digest, text)
    assert len(lineage.attempts) == 3
    wait_for(lambda: True if states(stack, run, "train-range")[1] == "CANCELLED" else None, 15)
    assert_no_orphans(stack)


def test_what_a_person_cancelled_stays_cancelled_with_ranges_of_every_generation(
    stack: Settings, tmp_path: Path
) -> None:
    run = "cancelled"
    with retoma_train(stack, tmp_path, run, epochs=500, epochs_per_range=500) as command:
        in_the_middle_of_epoch(stack, run, 0, command)
        parent_process(stack, run).kill()
        second = wait_for(lambda: next(iter(flow_runs(stack, run, "train")[1:]), None), 20)
        assert ":after:" not in second["idempotency_key"], "made by the server, not by the command that waits"
        wait_for(lambda: True if states(stack, run, "train")[1] == "RUNNING" else None, 30)
        prefect(stack, "flow-run", "cancel", second["id"])
        command.process.wait(60)
    assert command.process.returncode != 0
    wait_for(lambda: True if states(stack, run, "train") == ["CRASHED", "CANCELLED"] else None, 30)
    wait_for(lambda: True if set(states(stack, run, "train-range")) == {"CANCELLED"} else None, 60)
    time.sleep(5)  # longer than a successor takes
    assert states(stack, run, "train") == ["CRASHED", "CANCELLED"]
    assert_no_orphans(stack)


@pytest.mark.soak
def test_a_prefect_server_that_is_killed_and_started_again_changes_nothing(
    stack: Settings, tmp_path: Path, straight_digest: str
) -> None:
    run = "restarted-server"
    workers = [ProcessTable(stack.state_dir).find(name) for name in ("worker-cpu", "worker-gpu")]
    with retoma_train(stack, tmp_path, run) as command:
        in_the_middle_of_epoch(stack, run, 0, command)
        server = ProcessTable(stack.state_dir).find("prefect")
        assert server
        server[1].kill()
        up(stack)
        text = command.ends()
    assert_same_as_straight(stack, run, straight_digest, text)
    assert [ProcessTable(stack.state_dir).find(name) for name in ("worker-cpu", "worker-gpu")] == workers
    assert_no_orphans(stack)


@pytest.mark.soak
def test_a_frozen_parent_is_replaced_and_leaves_when_it_wakes(
    stack: Settings, tmp_path: Path, straight_digest: str
) -> None:
    run = "frozen-parent"
    with retoma_train(stack, tmp_path, run) as command:
        in_the_middle_of_epoch(stack, run, 0, command)
        parent = parent_process(stack, run)
        parent.suspend()
        text = command.ends()
    before = states(stack, run, "train")
    parent.resume()
    parent.wait(10)
    assert_same_as_straight(stack, run, straight_digest, text)
    assert states(stack, run, "train") == before == ["CRASHED", "COMPLETED"]


def prefect(stack: Settings, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        cwd=stack.home,
        env=stack.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=60,
    )
