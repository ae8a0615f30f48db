"""Detection, recovery, loss and goodput of recorded histories."""

from __future__ import annotations

import pytest

from tasks.drill.measures import goodput, percentile, steps_at_risk, stretches, trials, useful_steps
from tasks.drill.recording import Injected, StateSeen, TokenSeen
from tests.unit.drill.histories import START, killed, steps


def test_a_kill_is_measured_from_the_fault_to_the_next_trained_step() -> None:
    (trial,) = trials(killed())
    assert trial.by == "supervisor"
    assert trial.verdict_seconds == pytest.approx(0.1)
    assert trial.claim_seconds == pytest.approx(0.55)
    assert trial.restore_seconds == pytest.approx(2.55)
    assert trial.recovery_seconds == pytest.approx(3.05)
    assert trial.next_token == 2
    assert trial.steps_lost == 5


def test_an_attempt_that_died_before_its_first_step_has_recovered_nothing() -> None:
    first, second = killed().tokens
    between = TokenSeen(token=2, claimed=START + 3.8, flow_run_id="a")
    recording = killed(tokens=(first, between, second.model_copy(update={"token": 3})))
    (trial,) = trials(recording)
    assert trial.claim_seconds == pytest.approx(0.35)
    assert trial.next_token == 3
    assert trial.recovery_seconds == pytest.approx(3.05)
    assert trial.steps_lost == 5


def test_the_first_sign_is_the_verdict_whoever_gives_it() -> None:
    first, second = killed().tokens
    silent = first.model_copy(update={"ended": None})
    states = (StateSeen(flow_run_id="a", name="a1", state="CANCELLING", at=START + 3.8),)
    (trial,) = trials(killed(tokens=(silent, second), states=states))
    assert trial.by == "Prefect: cancelling"
    assert trial.verdict_seconds == pytest.approx(0.35)
    (trial,) = trials(killed(tokens=(silent, second), states=()))
    assert trial.by == "next claim"
    assert trial.verdict_seconds == pytest.approx(0.55)


def test_a_fault_that_nobody_took_over_costs_the_longest_time_without_a_step() -> None:
    first = killed().tokens[0]
    recording = killed(
        tokens=(first.model_copy(update={"ended": None}),),
        steps={11: (*steps(START + 1, 25), *steps(START + 9, 15))},
        states=(),
    )
    (trial,) = trials(recording)
    assert trial.recovery_seconds == pytest.approx(9 - 3.4)
    assert trial.steps_lost == 0
    assert trial.verdict_seconds is None


def test_what_never_comes_back_has_no_recovery() -> None:
    recording = killed(tokens=killed().tokens[:1], steps={11: steps(START + 1, 25)})
    (trial,) = trials(recording)
    assert trial.recovery_seconds is None
    assert trial.steps_lost is None


def test_steps_that_a_victim_trains_after_the_takeover_are_not_counted_as_lost() -> None:
    recording = killed(steps={11: steps(START + 1, 90), 12: steps(START + 6.5, 20)})
    (trial,) = trials(recording)
    assert trial.steps_lost == 31 - 20, "those until the next claim"


def test_each_fault_answers_only_until_the_next() -> None:
    second = Injected(fault="kill-flow", at=START + 7.05, token=2, pid=12, flow_run_id="a")
    third = TokenSeen(token=3, claimed=START + 12, sealed=START + 13, start_step=20, pid=13)
    recording = killed(
        injected=(*killed().injected, second),
        tokens=(*killed().tokens, third),
        steps={**killed().steps, 12: steps(START + 6.5, 6), 13: steps(START + 14, 20)},
    )
    kill, flow = trials(recording)
    assert kill.next_token == 2
    assert flow.next_token == 3
    assert flow.recovery_seconds == pytest.approx(6.95)
    assert flow.steps_lost == 6


def test_a_parent_has_recovered_when_another_one_runs() -> None:
    states = (
        StateSeen(flow_run_id="p", name="drill", state="RUNNING", at=START - 5, parent=True),
        StateSeen(flow_run_id="p", name="drill", state="CRASHED", at=START + 4, parent=True),
        StateSeen(flow_run_id="q", name="drill", state="RUNNING", at=START + 8, parent=True),
    )
    fault = Injected(fault="kill-parent", at=START + 3, pid=11, flow_run_id="p")
    (trial,) = trials(killed(injected=(fault,), states=states))
    assert trial.verdict_seconds == pytest.approx(1.0)
    assert trial.recovery_seconds == pytest.approx(5.0)


def test_goodput_is_the_time_of_the_steps_that_lasted() -> None:
    recording = killed()
    assert [useful_steps(recording, seen) for seen in recording.tokens] == [20, 20]
    wall_seconds = (6.5 + 1.9) - 1 + 0.1
    assert goodput(recording) == pytest.approx((2.0 + 2.0) / wall_seconds)
    assert goodput(killed(steps={})) is None


def test_standing_still_while_a_fault_lasts_is_no_goodput() -> None:
    first = killed().tokens[0].model_copy(update={"ended": None})
    times = (*steps(START + 1, 25), *steps(START + 9, 15))
    fault = killed().injected[0].model_copy(update={"answer": "steps", "until": START + 8.9})
    still = killed(injected=(fault,), tokens=(first,), steps={11: times})
    assert stretches(still, 11, times) == [(times[0], times[24]), (times[25], times[39])]
    assert goodput(still) == pytest.approx(4.0 / 9.5)
    quiet = still.model_copy(update={"injected": (fault.model_copy(update={"until": None}),)})
    assert goodput(quiet) == pytest.approx(1.0), "a long evaluation is work"


def test_what_is_hurried_at_the_end_is_not_measured() -> None:
    hurried = goodput(killed(hurried=START + 7.0))
    assert hurried == pytest.approx((2.0 + 0.6) / (6.0 + 0.1), abs=0.02)


def test_a_fault_may_cost_an_interval_and_what_is_trained_while_a_save_is_in_flight() -> None:
    assert steps_at_risk(killed()) == 11
    slow = tuple(commit.model_copy(update={"save_seconds": 0.25}) for commit in killed().commits)
    assert steps_at_risk(killed(commits=slow)) == 13
    stuck = tuple(commit.model_copy(update={"save_seconds": 60.0}) for commit in killed().commits)
    assert steps_at_risk(killed(commits=stuck)) == 20, "the next save waits"
    assert steps_at_risk(killed(), store_away=True) == 20
    assert steps_at_risk(killed(max_lost_steps=7), store_away=True) == 7, "as promised"


def test_a_stand_still_that_ends_after_the_last_fault_was_answered_is_measured() -> None:
    first = killed().tokens[0].model_copy(update={"ended": None})
    fault = killed().injected[0].model_copy(update={"answer": "steps"})
    recording = killed(
        injected=(fault,),
        tokens=(first,),
        steps={11: (*steps(START + 1, 25), *steps(START + 9, 15))},
        hurried=START + 8.9,
    )
    (trial,) = trials(recording)
    assert trial.recovery_seconds == pytest.approx(5.6)


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(number) for number in range(1, 21)]
    assert (percentile(values, 0.95), percentile(values, 0.5), percentile([3.0], 0.95)) == (19.0, 10.0, 3.0)
