"""What became of each attempt: told in the store, in `show`, in MLflow's tags and in the orchestrator's table."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from infra.mlflow_lineage_page import lineage_page
from infra.mlflow_text import attempt_tags
from tasks.runs import attempt_rows, attempts_text
from tasks.verdict import outcome, status_of
from tests.support.stores import START, RunBuilder
from training.checkpoint.end import End, put_end
from training.checkpoint.history import read_lineage
from training.checkpoint.outcomes import Outcome, outcomes
from training.checkpoint.store import MemoryStore

# RunBuilder's clock: each document is a second younger than the one before.


def an_end(token: int, kind: str, second: float, **fields: Any) -> End:
    created = (START + timedelta(seconds=second)).isoformat()
    return End(run="run-1", token=token, kind=kind, created=created, **{"by": "supervisor", **fields})


def a_history() -> MemoryStore:
    """Killed at step 17 of 20, then one that never restored, then done; then a range that is still on."""
    store = MemoryStore()
    builder = RunBuilder(store)
    first = builder.attempt(0, 2, attempt=1)  # seconds 1 and 2
    builder.commit(first, 15, "base")  # 3
    reason, stack = "said nothing for 5 s and was killed\nits last lines: ...", "File x, line 1"
    end = an_end(first, "Unavailable", 8, reason=reason, step=17, epoch=1, silent_seconds=5.5, stack=stack)
    put_end(store, end)
    builder.claim(0, 2, attempt=1)  # 4
    third = builder.attempt(0, 2, attempt=2)  # 5 and 6
    builder.commit(third, 20)  # 7
    put_end(store, an_end(third, "Done", 8, step=20, epoch=2))
    builder.attempt(2, 4)
    return store


def told(store: MemoryStore) -> dict[int, Outcome]:
    return outcomes(read_lineage(store))


def test_lost_steps_and_the_time_away_are_counted_to_the_attempt_that_went_on() -> None:
    first, second, third, fourth = told(a_history()).values()
    assert (first.next_token, str(first.restored), first.restored_step) == (3, "000001/00000000", 15)
    assert (first.step, first.lost_steps) == (17, 2)
    assert first.away_seconds == 3.5  # alive until 8 - 5.5; sealed again at 6
    assert (second.end, second.step, second.lost_steps, second.next_token) == (None, None, None, 3)
    assert (third.lost_steps, third.next_token) == (0, 4)
    assert (fourth.end, fourth.next_token) == (None, None)


def test_the_words_say_who_saw_what_and_what_followed() -> None:
    first, second, _, fourth = told(a_history()).values()
    assert first.verdict == (
        "Unavailable at step 17, said the supervisor, silent for 5.5 s: said nothing for 5 s and was killed"
    )
    assert first.aftermath == "token 3 went on from 000001/00000000, step 15: 2 steps lost, away for 3.5 s"
    assert second.verdict == "nobody has said how it ended"
    assert (fourth.verdict, fourth.aftermath) == ("nobody has said that it ended", "")


def test_a_step_that_was_restored_counts_when_nothing_was_heard() -> None:
    store = MemoryStore()
    builder = RunBuilder(store)
    builder.commit(builder.attempt(0, 2), 10, "base")
    second = builder.attempt(0, 2)
    put_end(store, an_end(second, "Unavailable", 9))
    builder.attempt(0, 2)
    found = told(store)[2]
    assert (found.step, found.lost_steps) == (10, 0)


def test_the_successor_knows_no_last_sign_of_life_and_the_store_does() -> None:
    store = MemoryStore()
    builder = RunBuilder(store)
    builder.commit(builder.attempt(0, 2), 10, "base")  # 1, 2, 3
    put_end(store, an_end(1, "Unavailable", 99, by="successor"))
    builder.attempt(0, 2)  # 4, 5
    found = told(store)[1]
    assert found.away_seconds == 2.0
    assert (found.step, found.lost_steps) == (None, None)
    assert found.verdict == "Unavailable, said the successor"


def test_from_the_beginning_again() -> None:
    store = MemoryStore()
    builder = RunBuilder(store)
    first = builder.attempt(0, 2)
    put_end(store, an_end(first, "Unavailable", 9, step=4))
    builder.attempt(0, 2)
    found = told(store)[1]
    assert (found.restored, found.restored_step, found.lost_steps) == (None, 0, 4)
    assert found.aftermath.startswith("token 2 went on from the beginning: 4 steps lost")


def test_rows_tags_page_and_table_tell_it() -> None:
    lineage = read_lineage(a_history())
    row = attempt_rows(lineage)[0]
    assert (row["verdict"], row["verdict_by"], row["silent_seconds"]) == ("Unavailable", "supervisor", 5.5)
    assert (row["last_step"], row["lost_steps"], row["next_restored"]) == (17, 2, "000001/00000000")
    tags = attempt_tags(lineage.attempts[0], outcomes(lineage)[1])
    assert {key: tags[f"retoma.{key}"] for key in ("verdict", "verdict_by", "silent_seconds", "lost_steps")} == {
        "verdict": "Unavailable",
        "verdict_by": "supervisor",
        "silent_seconds": "5.5",
        "lost_steps": "2",
    }
    assert "File x, line 1" in tags["mlflow.note.content"]
    assert "2 steps lost" in tags["mlflow.note.content"]
    assert "2 steps lost" in lineage_page("run-1", "memory://", lineage)
    table = attempts_text(lineage).splitlines()
    assert len(table) == 6
    assert "| 1 | 1.1 | the beginning | Unavailable at step 17" in table[2]
    assert "died before it restored" in table[3]


def test_mlflow_gets_the_status_that_the_end_tells() -> None:
    first, *_ = read_lineage(a_history()).attempts
    ended = outcome(first, {}, superseded=True)
    assert (ended.status, ended.reason.splitlines()[0]) == ("KILLED", "said nothing for 5 s and was killed")
    assert ended.at_milliseconds == int((START.timestamp() + 8) * 1000)
    statuses = {
        kind: status_of(kind) for kind in ("Done", "Fenced", "Preempted", "Unavailable", "Diverged", "Boom")
    }
    assert list(statuses.values()) == ["FINISHED", "KILLED", "KILLED", "KILLED", "FAILED", "FAILED"]
