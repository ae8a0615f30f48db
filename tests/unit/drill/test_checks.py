"""The verdict on a drill. Each check is shown to fail."""

from __future__ import annotations

import pytest

from tasks.drill.checks import judge
from tasks.drill.recording import CommitSeen, Injected, Recording
from tests.unit.drill.histories import START, killed, steps


def failing(recording: Recording) -> list[str]:
    return [check.name for check in judge(recording) if not check.passed]


def test_a_training_that_came_through_passes_every_check() -> None:
    assert failing(killed()) == []
    assert len(judge(killed())) >= 7


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"digest": "xxh3:other"}, "bit for bit the straight run"),
        ({"digest": None}, "bit for bit the straight run"),
        ({"outcome": "FAILED"}, "run completed"),
        ({"orphans": ("training process 7",)}, "nothing left"),
        ({"failures": ("it woke",)}, "drill"),
        ({"problems": ("manifests/1: gone",)}, "history is sound"),
        ({"unregistered": ("000001/00000001",)}, "MLflow has every checkpoint"),
        ({"injected": ()}, "each fault was felt"),
        ({"steps": {11: steps(START + 1, 25)}}, "training went on after each fault"),
        ({"steps": {11: steps(START + 1, 25), 12: ()}}, "training went on after each fault"),
    ],
)
def test_what_must_hold_and_does_not_is_named(changes: dict[str, object], name: str) -> None:
    assert failing(killed(**changes)) == [name]


def test_losing_more_than_an_interval_fails() -> None:
    first, second = killed().tokens
    recording = killed(tokens=(first, second.model_copy(update={"start_step": 10})))
    assert failing(recording) == ["steps lost"]


def test_a_commit_after_the_takeover_fails_unless_it_is_void() -> None:
    late = CommitSeen(token=1, sequence=2, step=30, kind="delta", at=START + 9, save_seconds=0.05)
    assert failing(killed(commits=(*killed().commits, late))) == ["no commit after a takeover"]
    void = late.model_copy(update={"void": True})
    assert failing(killed(commits=(*killed().commits, void))) == []


def test_damage_that_the_drill_has_done_must_be_named_and_may_cost_more() -> None:
    first, second = killed().tokens
    fell_back = second.model_copy(update={"start_step": 10})
    fault = Injected(fault="corrupt-object", at=START + 3.45, token=1, pid=11, flow_run_id="a")
    recording = killed(injected=(fault,), tokens=(first, fell_back))
    assert failing(recording) == ["damage was found and named"]
    named = fell_back.model_copy(update={"skipped": ("packs/x: digest differs",)})
    assert failing(killed(injected=(fault,), tokens=(first, named))) == []


def test_a_fault_that_changed_nothing_proves_nothing() -> None:
    def with_fault(name: str) -> Recording:
        fault = Injected(fault=name, at=START + 1, until=START + 3.2, answer="steps", token=1, pid=11)
        return killed(injected=(fault,))

    assert failing(with_fault("full-disk")) == ["each fault was felt"]
    assert failing(with_fault("slow-disk")) == ["each fault was felt"]
    assert failing(with_fault("restart-mlflow")) == []


def test_the_attempt_that_was_hit_must_be_replaced_where_that_is_the_answer() -> None:
    first = killed().tokens[0].model_copy(update={"ended": None})
    alone = {"tokens": (first,), "steps": {11: steps(START + 1, 40)}}
    assert failing(killed(**alone)) == ["training went on after each fault"]
    fault = killed().injected[0].model_copy(update={"answer": "steps"})
    assert failing(killed(injected=(fault,), **alone)) == []
