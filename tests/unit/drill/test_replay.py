"""The straight run of a training whose number of ranks has changed: the same numbers, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tasks.ask import ask
from tasks.drill.job import STRAIGHT_COMMAND
from tasks.drill.recording import CommitSeen
from tasks.drill.worlds import segments
from tests.support.cuts import gpt_config, write_corpus
from tests.support.gang import gang, outcomes
from tests.support.launched import ROOT, STEPS
from training import straight
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Committed
from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.store import LocalStore
from training.config import JobConfig
from training.errors import Preempted, RetomaError
from training.parallel.ranks import standing
from training.ports import Done, Failed, Message, Saved
from training.session import train_range
from training.stopping import GroupStop
from training.straight import Segment, Whole, on_one_node, replay

pytestmark = pytest.mark.xdist_group("ranks")  # each of them needs more processes than there are cores
DIES = 3


def train(exchange: Exchange, config: JobConfig, store: str, data: str, die_after: int | None = None) -> Done:
    """To the end on one rank, or until the checkpoint after so many steps."""
    request = GroupStop()
    signal.signal(signal.SIGTERM, lambda *_: request.ask())

    def hear(message: Message) -> None:
        if isinstance(message, Saved) and message.position.step == die_after:
            os._exit(DIES)

    ranks = standing(config.parallel, exchange, torch.device("cpu"))
    return train_range(config, store, "r", data_folder=Path(data), ranks=ranks, request=request, report=hear)


def in_a_gang(whole: Whole, config: JobConfig) -> Done | Failed:
    """What a launcher does, with ranks that have imported torch already."""
    answers = outcomes(config.parallel.world, train, config, whole.store_url, whole.folder)
    found = [answer for _, answer in answers]
    if all(ok for ok, _ in answers):
        return found[0]  # type: ignore[no-any-return]
    assert all("Preempted" in text for text in found), found
    return Failed(error=Preempted.__name__, message="asked to stop")


def chain(store: Path) -> list[Committed]:
    return read_lineage(LocalStore(store)).chain


def seen(store: Path) -> list[CommitSeen]:
    """As the drill collects them."""
    return [
        CommitSeen(
            token=committed.ref.token,
            sequence=committed.ref.sequence,
            step=committed.manifest.position.step,
            kind=committed.manifest.kind,
            at=0.0,
            save_seconds=0.0,
            ranks=committed.manifest.world_size,
        )
        for committed in chain(store)
    ]


@pytest.mark.parametrize(
    "killed", [pytest.param({1: 1}, id="1, 2"), pytest.param({2: 1, 1: 3}, id="2, 1, 2", marks=pytest.mark.soak)]
)
def test_a_training_whose_ranks_have_changed_is_replayed_bit_for_bit(
    killed: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = str(write_corpus(tmp_path / "corpus"))
    config = gpt_config(parallel={"world": 2, "nodes": 2, "min_nodes": 1})
    disturbed = tmp_path / "disturbed"
    for ranks, after in killed.items():
        answers = outcomes(ranks, train, on_one_node(config, ranks), str(disturbed), corpus, after)
        assert not any(ok for ok, _ in answers), "killed in the middle of an epoch"
    done, _ = gang(2, train, on_one_node(config, 2), str(disturbed), corpus)
    found = segments(seen(disturbed))
    assert [segment.ranks for segment in found] == [*killed, 2]
    assert found[-1].step == STEPS

    monkeypatch.setattr(straight, "_train_group", in_a_gang)
    again = replay(Whole(config, str(tmp_path / "straight"), "r", corpus), list(found))
    assert again.state_digest == done.state_digest
    assert segments(seen(tmp_path / "straight")) == found


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_launchers_replay_the_same_and_the_numbers_of_ranks_make_a_difference(tmp_path: Path) -> None:
    corpus = str(write_corpus(tmp_path / "corpus"))
    config = gpt_config(parallel={"world": 2, "nodes": 2, "min_nodes": 1})

    def digest(name: str, *wanted: Segment) -> str:
        question = {
            "config": config.model_dump(mode="json"),
            "data_folder": corpus,
            "store_url": str(tmp_path / name),
            "run": "r",
            "segments": wanted,
        }
        answer = ask(STRAIGHT_COMMAND, question, timeout_seconds=600, cwd=ROOT)
        assert answer["step"] == STEPS
        assert segments(seen(tmp_path / name)) == (wanted or (Segment(2, STEPS),))
        return str(answer["state_digest"])

    grown = (Segment(2, 1), Segment(1, 3), Segment(2, STEPS))
    assert digest("once", *grown) == digest("again", *grown)
    assert len({digest("never"), digest("lost", Segment(2, 1), Segment(1, STEPS)), digest("third", *grown)}) == 3


def test_a_replay_that_did_not_leave_where_it_should_is_no_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Whole(gpt_config(parallel={"world": 2}), str(tmp_path / "straight"), "r", None)
    monkeypatch.setattr(straight, "_train_group", lambda *_: Failed(error=Preempted.__name__, message="asked"))
    with pytest.raises(RetomaError, match="with 2 ranks left at step 0 instead of 4"):
        replay(whole, [Segment(2, 4), Segment(2, 6)])
    monkeypatch.setattr(straight, "_train_group", lambda *_: Failed(error="ValueError", message="this is bad"))
    with pytest.raises(RetomaError, match=r"did not leave at step 4.*this is bad"):
        replay(whole, [Segment(2, 4), Segment(2, 6)])
