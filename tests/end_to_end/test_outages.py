"""Servers that are away or mute: no step waits for them, and everything is told in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from infra.processes import ProcessTable
from infra.settings import Settings
from infra.stack import up
from tasks.runs import find_run
from tests.end_to_end.test_train import (
    assert_lineage_in_mlflow,
    assert_no_orphans,
    assert_same_as_straight,
    in_the_middle_of_epoch,
    retoma_train,
    wait_for,
)

pytestmark = [pytest.mark.timeout(280), pytest.mark.xdist_group("net")]


def server(stack: Settings, name: str) -> psutil.Process:
    found = ProcessTable(stack.state_dir).find(name)
    assert found is not None
    return found[1]


@contextmanager
def mute(process: psutil.Process) -> Iterator[None]:
    """It accepts connections and answers nothing."""
    tree = [process, *process.children(recursive=True)]
    for member in tree:
        member.suspend()
    try:
        yield
    finally:
        for member in tree:
            member.resume()


def reached(stack: Settings, run: str, step: int) -> bool | None:
    head = find_run(stack, run)[1].head
    return True if head is not None and head.manifest.position.step >= step else None


def test_a_mute_mlflow_delays_no_step_and_gets_everything_when_it_answers(
    stack: Settings, tmp_path: Path, straight_digest: str
) -> None:
    run = "mute-mlflow"
    with retoma_train(stack, tmp_path, run) as command:
        in_the_middle_of_epoch(stack, run, 0, command)
        with mute(server(stack, "mlflow")):
            wait_for(lambda: reached(stack, run, 32), 30)  # the rest of the range, its last commit included
        text = command.ends()
    lineage = assert_same_as_straight(stack, run, straight_digest, text)
    assert len(lineage.attempts) == 2, "nobody was declared dead"
    assert_lineage_in_mlflow(stack, run, lineage, killed=None)
    assert_no_orphans(stack)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seconds", [25, 300])
def test_a_prefect_server_that_is_away_stops_no_step(stack: Settings, tmp_path: Path, seconds: int) -> None:
    run = f"away-{seconds}"
    with retoma_train(stack, tmp_path, run, epochs=40 + seconds, epochs_per_range=40 + seconds) as command:
        in_the_middle_of_epoch(stack, run, 0, command)
        server(stack, "prefect").kill()
        before = find_run(stack, run)[1].head
        assert before is not None
        time.sleep(seconds)
        head = find_run(stack, run)[1].head
        assert head is not None
        assert head.manifest.position.step > before.manifest.position.step + 10 * seconds, "training went on"
        assert head.manifest.token == before.manifest.token, "in the same attempt"
        up(stack)
        text = command.ends()
    _, lineage = find_run(stack, run)
    assert lineage.head is not None
    assert lineage.head.manifest.state_digest in text
    assert not lineage.problems
    assert {c.ref for c in lineage.chain} >= {before.ref, head.ref}, "nothing acknowledged is lost"
    assert_no_orphans(stack)
