"""F19: the machine is gone, its run shows Running for ever, and its slot is held.

That a frozen tree is replaced: end_to_end/test_net.py; that it changes nothing when it wakes: test_unwanted.py.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from infra.processes import ProcessTable
from infra.settings import Settings
from infra.stack import up
from tests.end_to_end.test_net import flow_runs
from tests.end_to_end.test_train import (
    assert_no_orphans,
    assert_same_as_straight,
    in_the_middle_of_epoch,
    retoma_train,
    training_process_of,
    wait_for,
    who,
)
from training.checkpoint.end import read_ends
from training.checkpoint.store import open_store

pytestmark = [pytest.mark.timeout(280), pytest.mark.xdist_group("net")]

VERDICT_MARGIN_SECONDS = 8.0  # a beat, the trigger's second, and a machine that is busy


def test_a_machine_that_is_gone_with_its_worker_is_given_up_by_others_and_another_goes_on(
    stack: Settings, tmp_path: Path, straight_digest: str
) -> None:
    run = "lost-machine"
    with retoma_train(stack, tmp_path, run) as command:
        supervisor = in_the_middle_of_epoch(stack, run, 1, command)
        worker = ProcessTable(stack.state_dir).find("worker-gpu")
        assert worker is not None
        for process in (worker[1], supervisor, training_process_of(supervisor)):
            process.kill()
        lost = time.monotonic()
        given_up = wait_for(
            lambda: next(
                (r for r in flow_runs(stack, run, "train-range")[1:] if r["state_type"] != "RUNNING"), None
            )
        )
        assert time.monotonic() - lost < stack.progress_within_seconds + VERDICT_MARGIN_SECONDS
        assert given_up["state_type"] in ("CANCELLING", "CANCELLED", "CRASHED")
        up(stack)  # another machine
        text = command.ends()
    lineage = assert_same_as_straight(stack, run, straight_digest, text)
    assert [who(lineage, token)["attempt"] for token in (1, 2, 3)] == [1, 1, 2]
    assert lineage.attempts[2].seal is not None
    assert lineage.attempts[2].seal.head is not None
    assert lineage.attempts[2].seal.head.token == 2, "it goes on from what the lost one had committed"
    assert read_ends(open_store(stack.run_url(run)))[2].by != "supervisor"
    assert_no_orphans(stack)
