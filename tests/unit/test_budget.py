"""How often a run may be tried, counted in its store: against a count that remembers everything."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.budget import GaveUp, check_budget, may_roll_back, refill
from tasks.order import RangeOrder
from tests.support.stores import RunBuilder
from training.checkpoint.end import End, end_key, end_numbers, put_end, read_end, read_ends
from training.checkpoint.quarantine import Incident, put_incident
from training.checkpoint.store import MemoryStore
from training.checkpoint.token import Skipped
from training.config import JobConfig, parse_config
from training.errors import Corrupt, Diverged, Invalid, Unavailable

RUN = "run-1"


def order(attempts: int = 5, same_step: int = 3, **health: object) -> RangeOrder:
    config = parse_config(
        {
            "job": "some.module:Job",
            "attempts_per_range": attempts,
            "supervisor": {"same_step_failures": same_step},
            "health": health,
        }
    )
    return RangeOrder(
        run=RUN, start=0, stop=2, attempt=1, config=config, requested="sha256:0", store_url="memory://"
    )


class Runs:
    """A run's store, filled token by token."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.builder = RunBuilder(self.store, RUN)

    def end(self, kind: str, step: int = 0, reason: str = "", saves: int | None = None) -> int:
        """A token that trained, perhaps saved at a step, and ended."""
        token = self.builder.attempt(0, 2)
        if saves is not None:
            self.builder.commit(token, saves)
        put_end(self.store, End(run=RUN, token=token, kind=kind, reason=reason, by="supervisor", step=step))
        return token

    def vanish(self) -> None:
        """A token about which nobody said a word, and that never came to train."""
        self.builder.claim(0, 2)


def test_a_new_run_may_be_tried() -> None:
    check_budget(Runs().store, order())


def test_too_many_tries_without_a_checkpoint_stop_and_say_why_each_ended() -> None:
    runs = Runs()
    runs.end("Unavailable", 10, "was killed", saves=10)
    for step in (11, 12, 13):
        runs.end("Unavailable", step, f"was killed at {step}\nwith details")
        check_budget(runs.store, order(attempts=4))
    runs.vanish()
    with pytest.raises(GaveUp, match="4 tries in a row without a new checkpoint") as raised:
        check_budget(runs.store, order(attempts=4))
    text = str(raised.value)
    for words in ("token 2: Unavailable, was killed at 11\n", "token 5: nobody said", "retoma show run-1"):
        assert words in text
    assert "goes on from 000001/00000000" in text
    assert raised.value.kind == Unavailable.__name__


def test_a_new_checkpoint_refills_the_budget() -> None:
    runs = Runs()
    for step in range(1, 20):
        runs.end("Unavailable", step, saves=step if step % 3 == 0 else None)
        check_budget(runs.store, order(attempts=4))


def test_attempts_that_died_before_they_claimed_are_counted_by_whoever_saw_them() -> None:
    runs = Runs()
    runs.end("Unavailable", 1)
    check_budget(runs.store, order(attempts=3), unclaimed=1)
    with pytest.raises(GaveUp, match="3 tries"):
        check_budget(runs.store, order(attempts=3), unclaimed=2)


def test_the_same_step_failing_again_and_again_stops_with_its_number_and_all_reasons() -> None:
    runs = Runs()
    runs.end("Unavailable", 73, "killed by SIGKILL", saves=70)
    runs.end("KeyError", 73, "no such word")
    check_budget(runs.store, order())
    runs.end("Unavailable", 73, "killed by SIGSEGV")
    with pytest.raises(GaveUp, match="3 tries in a row ended at step 73") as raised:
        check_budget(runs.store, order())
    for words in ("token 1: Unavailable, killed by SIGKILL", "token 2: KeyError", "token 3", "goes on from 000001"):
        assert words in str(raised.value)


def test_a_step_that_was_committed_counts_though_it_was_not_heard_of() -> None:
    runs = Runs()
    runs.end("Unavailable", 68, saves=70)
    for _ in range(2):
        check_budget(runs.store, order())
        runs.end("Unavailable", 70)
    with pytest.raises(GaveUp, match="3 tries in a row ended at step 70"):
        check_budget(runs.store, order())


def test_other_steps_or_a_checkpoint_in_between_are_no_such_repetition() -> None:
    runs = Runs()
    for step in (73, 73, 74, 73, 73):
        runs.end("Unavailable", step)
        check_budget(runs.store, order(attempts=9))
    runs = Runs()
    for saves in (None, 72, None, 74, None):
        runs.end("Unavailable", 73, saves=saves)
        check_budget(runs.store, order(attempts=9))


def test_a_node_on_which_nothing_starts_fails_at_no_step() -> None:
    runs = Runs()
    for _ in range(4):
        runs.vanish()
        check_budget(runs.store, order(attempts=9))


@pytest.mark.parametrize("kind", [Invalid, Diverged])
def test_what_would_end_the_same_way_again_is_raised_again_also_for_a_parent_that_forgot(
    kind: type[Exception],
) -> None:
    runs = Runs()
    runs.end(kind.__name__, 5, "wrong in itself", saves=5)
    with pytest.raises(kind, match="wrong in itself"):
        check_budget(runs.store, order())
    refill(runs.store, RUN)
    check_budget(runs.store, order())


@pytest.mark.parametrize("kind", ["Preempted", "Fenced", "Done"])
def test_what_is_no_failure_costs_nothing(kind: str) -> None:
    runs = Runs()
    for _ in range(9):
        runs.end(kind, 7)
        check_budget(runs.store, order())


def test_a_person_who_starts_the_run_again_refills_the_budget_and_a_parent_does_not() -> None:
    runs = Runs()
    for step in range(5):
        runs.end("Unavailable", step)
    for _ in range(2):  # another parent asks
        with pytest.raises(GaveUp):
            check_budget(runs.store, order())
    refill(runs.store, RUN)
    refill(runs.store, RUN)
    check_budget(runs.store, order())
    for step in range(4):
        runs.end("Unavailable", step)
        check_budget(runs.store, order())
    runs.end("Unavailable", 9)
    with pytest.raises(GaveUp):
        check_budget(runs.store, order())


def test_a_divergence_is_tried_again_as_long_as_it_is_rolled_back() -> None:
    runs = Runs()
    wish = order(on_divergence="rollback", rollbacks=1)
    token = runs.end("Diverged", 12, "the loss is nan", saves=10)
    with pytest.raises(Diverged):
        check_budget(runs.store, wish)  # nothing says what there is to roll back
    put_incident(runs.store, Incident(run=RUN, token=token, sequence=1, name="loss", reason="nan", since_step=12))
    assert may_roll_back(runs.store, wish.config.health)
    check_budget(runs.store, wish)
    assert not may_roll_back(runs.store, order().config.health)
    with pytest.raises(Diverged):
        check_budget(runs.store, order())


def test_the_first_who_tells_an_end_is_believed() -> None:
    store = MemoryStore()
    first = End(run=RUN, token=3, kind="Unavailable", reason="first", by="supervisor", silent_seconds=5.0)
    assert put_end(store, first) == first
    assert put_end(store, first.model_copy(update={"reason": "second", "by": "parent"})) == first
    assert read_ends(store) == {3: first}


def test_a_damaged_end_is_none_and_is_told() -> None:
    store = MemoryStore()
    end = End(run=RUN, token=1, kind="Done", by="supervisor")
    put_end(store, end)
    store.put(end_key(2), [store.get(end_key(1))])
    store.put(end_key(3), [b"x"])
    notes: list[Skipped] = []
    assert read_ends(store, notes) == {1: end}
    assert [note.key for note in notes] == [end_key(2), end_key(3)]
    assert end_numbers(store) == [1, 2, 3]
    with pytest.raises(Corrupt):
        read_end(store, 2)


@dataclass
class Oracle:
    """Counts as it happens, and forgets nothing."""

    config: JobConfig
    fruitless: int = 0
    same: int = 0
    step: int | None = None

    def failed(self, step: int | None, saved: bool) -> None:
        self.fruitless = 0 if saved else self.fruitless + 1
        if saved:
            self.same, self.step = 0, None
        if step is not None:
            self.same = self.same + 1 if step == self.step else 1
            self.step = step

    def no_failure(self, saved: bool) -> None:
        if saved:
            self.fruitless, self.same, self.step = 0, 0, None

    @property
    def gives_up(self) -> bool:
        return (
            self.fruitless >= self.config.attempts_per_range
            or self.same >= self.config.supervisor.same_step_failures
        )


happenings = st.lists(
    st.tuples(
        st.sampled_from(["Unavailable", "KeyError", "Preempted", "Fenced", "vanish", "refill"]),
        st.integers(100, 102),
        st.booleans(),
    ),
    max_size=14,
)


@settings(max_examples=300, deadline=None)
@given(happenings, st.integers(1, 5), st.integers(1, 4))
def test_the_store_tells_the_same_as_somebody_who_was_there(
    history: list[tuple[str, int, bool]], attempts: int, same_step: int
) -> None:
    """Checkpoints lie below all steps that fail, so that a step is never hidden by what was restored."""
    runs, wish = Runs(), order(attempts, same_step)
    oracle, saved_step = Oracle(wish.config), 0
    for kind, step, saves in history:
        if kind == "refill":
            refill(runs.store, RUN)
            oracle = Oracle(wish.config)
        elif kind == "vanish":
            runs.vanish()
            oracle.failed(None, saved=False)
        else:
            saved_step += saves
            runs.end(kind, step, saves=saved_step if saves else None)
            if kind in ("Preempted", "Fenced"):
                oracle.no_failure(saves)
            else:
                oracle.failed(step, saves)
        if oracle.gives_up:
            with pytest.raises(GaveUp):
                check_budget(runs.store, wish)
        else:
            check_budget(runs.store, wish)
