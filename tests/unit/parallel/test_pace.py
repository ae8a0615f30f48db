"""Who works, who waits, and who holds up the others, from the ranks' own times."""

from __future__ import annotations

import pytest

from training.parallel.pace import SLOW_SECONDS, WINDOW_SECONDS, Episode, Pace, Shares


class Group:
    """Ranks that make steps at a clock's pace."""

    def __init__(self) -> None:
        self.now, self.at = 0.0, 0
        self.pace = Pace(lambda: self.now)
        self.told: list[Episode] = []

    def train(self, seconds: float, *own_seconds: float, transfer_seconds: float = 0.01) -> None:
        end = self.now + seconds
        while self.now < end:
            self.step(*own_seconds, transfer_seconds=transfer_seconds)

    def step(self, *own_seconds: float, transfer_seconds: float = 0.01) -> None:
        step_seconds = max(own_seconds) + transfer_seconds
        self.now += step_seconds
        self.at += 1
        self.pace.step(step_seconds, own_seconds)
        if (episode := self.pace.look(self.at)) is not None:
            self.told.append(episode)

    def take(self) -> Shares:
        shares = self.pace.take()
        assert shares is not None
        return shares


@pytest.fixture
def group() -> Group:
    return Group()


def test_what_a_rank_has_less_of_its_own_it_has_waited_and_the_rest_is_communication(group: Group) -> None:
    for _ in range(10):
        group.step(0.04, 0.09, 0.05, transfer_seconds=0.01)
    shares = group.take()
    assert shares.steps == 10
    assert shares.step_seconds == pytest.approx(0.1)
    assert shares.own_seconds == pytest.approx((0.04, 0.09, 0.05))
    assert shares.waiting_shares == pytest.approx((0.5, 0.0, 0.4))
    assert shares.communication_share == pytest.approx(0.1)


def test_ranks_that_are_slow_in_turns_wait_for_each_other_and_it_is_no_communication(group: Group) -> None:
    for _ in range(10):
        group.step(0.09, 0.04)
        group.step(0.04, 0.09)
    shares = group.take()
    assert shares.waiting_shares == pytest.approx((0.25, 0.25))
    assert shares.communication_share == pytest.approx(0.1)
    assert shares.slow_rank is None


def test_shares_are_of_the_steps_since_they_were_taken_last(group: Group) -> None:
    group.step(0.1, 0.2)
    group.take()
    group.step(0.2, 0.1)
    assert group.take().own_seconds == pytest.approx((0.2, 0.1))
    assert group.pace.take() is None


def test_a_slow_rank_is_told_once_when_it_has_been_slow_for_long_and_once_when_it_is_over(group: Group) -> None:
    group.train(5, 0.05, 0.05, 0.05)
    first = group.at
    group.train(SLOW_SECONDS - WINDOW_SECONDS, 0.05, 0.05, 0.15)
    assert not group.told
    group.train(3 * SLOW_SECONDS, 0.05, 0.05, 0.15)
    (begun,) = group.told
    assert (begun.rank, begun.until_step) == (2, None)
    assert abs(begun.since_step - first) <= WINDOW_SECONDS / 0.06
    assert begun.excess_seconds == pytest.approx(0.1)
    last = group.at
    group.train(2 * SLOW_SECONDS, 0.05, 0.05, 0.05)
    _, over = group.told
    assert (over.rank, over.since_step) == (2, begun.since_step)
    assert over.until_step is not None
    assert abs(over.until_step - last) <= WINDOW_SECONDS / 0.06
    assert group.pace.episodes == [over]


def test_a_hiccup_is_no_episode_and_does_not_end_one(group: Group) -> None:
    group.train(SLOW_SECONDS / 2, 0.05, 0.15)
    group.train(2 * WINDOW_SECONDS, 0.05, 0.05)
    group.train(SLOW_SECONDS / 2, 0.05, 0.15)
    assert not group.told
    group.train(2 * SLOW_SECONDS, 0.05, 0.15)
    group.train(SLOW_SECONDS / 2, 0.05, 0.05)
    group.train(SLOW_SECONDS, 0.05, 0.15)
    assert len(group.told) == 1


def test_when_another_rank_becomes_the_slow_one_both_are_told(group: Group) -> None:
    group.train(2 * SLOW_SECONDS, 0.05, 0.05, 0.15)
    group.train(3 * SLOW_SECONDS, 0.15, 0.05, 0.05)
    assert [(episode.rank, episode.until_step is None) for episode in group.told] == [
        (2, True),
        (2, False),
        (0, True),
    ]


def test_a_rank_whose_more_is_little_beside_the_step_is_not_slow(group: Group) -> None:
    group.train(4 * SLOW_SECONDS, 0.001, 0.003, transfer_seconds=0.1)
    assert not group.told


def test_no_more_episodes_are_kept_than_a_manifest_should_carry(group: Group) -> None:
    for turn in range(40):
        group.train(1.5 * SLOW_SECONDS, *((0.05, 0.15) if turn % 2 else (0.15, 0.05)))
    assert len(group.pace.episodes) == 16


def test_a_group_that_has_shrunk_to_one_rank_has_no_slow_one() -> None:
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    for step in range(40):
        now[0] += 1.0
        pace.step(1.0, [0.9])
        assert pace.look(step) is None
    shares = pace.take()
    assert shares is not None
    assert shares.waiting_shares == (0.0,)
