"""Numbers of ranks over time, from the checkpoints that lasted."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.drill.checks import judge
from tasks.drill.measures import trials
from tasks.drill.recording import CommitSeen, Injected, Recording
from tasks.drill.worlds import in_words, numbers, segments
from tests.unit.drill.histories import START, killed
from training.straight import Segment


def commit(sequence: int, step: int, ranks: int, at: float = 0.0, void: bool = False) -> CommitSeen:
    return CommitSeen(
        token=1, sequence=sequence, step=step, kind="delta", at=START + at, save_seconds=0.0, void=void, ranks=ranks
    )


def test_the_steps_are_cut_where_the_number_of_ranks_changes() -> None:
    commits = [commit(0, 5, 2), commit(1, 10, 2), commit(2, 15, 1), commit(3, 17, 1), commit(4, 20, 2)]
    assert segments(commits) == (Segment(2, 10), Segment(1, 17), Segment(2, 20))
    assert segments(reversed(commits)) == segments(commits)
    assert segments([]) == ()


def test_a_checkpoint_that_did_not_last_and_a_step_that_was_only_evaluated_again_are_no_segments() -> None:
    kept = [commit(0, 5, 2), commit(2, 10, 1)]
    assert segments([*kept, commit(1, 8, 2, void=True)]) == segments(kept)
    again = [commit(0, 5, 2), commit(1, 5, 1), commit(2, 10, 2)]
    assert segments(again) == (Segment(2, 10),)


def test_numbers_are_told_as_people_read_them() -> None:
    grown = lost_node()
    assert numbers(grown) == (2, 1, 2)
    assert in_words(grown) == "2, 1, 2 ranks"
    assert in_words(killed()) == ""


def lost_node(grows: bool = True, reason: str = "node vm, process 21 was lost", **changes: Any) -> Recording:
    """A node of two is lost after step 25; one rank goes on from step 20, and both from step 30."""
    first, second = killed().tokens
    third = second.model_copy(update={"token": 3, "claimed": START + 8, "start_step": 30, "pid": 13})
    fault = killed().injected[0]
    of_node = {"fault": "shrink-grow", "ranks": 2, "named": (21, 22), "grows": grows, "until": START + 7.6}
    early, later, smaller, whole = killed().commits
    fields: dict[str, Any] = {
        "injected": (fault.model_copy(update=of_node),),
        "tokens": (first.model_copy(update={"reason": reason}), second, third),
        "commits": (
            early.model_copy(update={"ranks": 2}),
            later.model_copy(update={"ranks": 2}),
            smaller,
            whole.model_copy(update={"ranks": 2, "token": 3, "at": START + 9.6}),
        ),
        "steps": {**killed().steps, 13: (START + 9.0,)},
    }
    return killed(**(fields | changes))


def failing(recording: Recording) -> list[str]:
    return [check.name for check in judge(recording) if not check.passed]


def test_a_group_that_shrank_and_grew_passes_and_says_how_long_it_took() -> None:
    assert failing(lost_node()) == []
    (compared,) = (check.detail for check in judge(lost_node()) if check.name == "bit for bit the straight run")
    assert compared.endswith("made its steps with 2, 1, 2 ranks")
    (trial,) = trials(lost_node())
    assert trial.whole_seconds == pytest.approx(2.0)
    assert {check.name for check in judge(lost_node())} - {check.name for check in judge(killed())} == {
        "the node was named",
        "the group's size",
    }


def test_a_group_that_did_not_shrink_or_did_not_grow_fails() -> None:
    early, later, smaller, whole = lost_node().commits
    never = (early, later, smaller.model_copy(update={"ranks": 2}), whole)
    assert failing(lost_node(commits=never)) == ["the group's size"]
    stayed = (early, later, smaller, whole.model_copy(update={"ranks": 1}))
    assert failing(lost_node(commits=stayed)) == ["the group's size"]
    assert failing(lost_node(commits=stayed, grows=False)) == [], "it was lost for good"


@pytest.mark.parametrize("reason", ["", "rank 0 (pid 11) was killed by SIGKILL", "node vm, process 213 was lost"])
def test_a_verdict_that_names_another_or_nobody_fails(reason: str) -> None:
    assert failing(lost_node(reason=reason)) == ["the node was named"]


def test_a_rank_of_the_node_is_as_good_a_name() -> None:
    assert failing(lost_node(reason="rank 1 (pid 22) was killed by SIGKILL (node vm, process 9)")) == []


def test_a_later_fault_does_not_answer_for_an_earlier_one() -> None:
    first = Injected(fault="lose-node", at=START + 2.5, token=1, pid=11, ranks=2, named=(21,))
    both = lost_node(injected=(first, *lost_node().injected))
    sizes = next(check for check in judge(both) if check.name == "the group's size")
    assert "lose-node: no checkpoint of fewer than 2 ranks" in sizes.detail
