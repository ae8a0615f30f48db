"""F17: a run that goes on with another number of ranks sees every sample once, and none twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.cuts import gpt_config, write_corpus
from tests.support.gang import gang
from training.checkpoint.ranks.exchange import Exchange
from training.config import JobConfig
from training.data import EpochBatches, share
from training.parallel.ranks import standing
from training.ports import Beat, Message
from training.randomness import epoch_order
from training.session import train_range
from training.stopping import GroupStop

SAMPLES = 24  # 4 steps of 6 an epoch: no micro-batch is short, and each sample that is drawn counts


@settings(deadline=None, max_examples=200)
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 9),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    done=st.integers(0, 9),
)
def test_the_order_of_samples_knows_no_world_size(
    samples: int, batch: int, before: int, after: int, done: int
) -> None:
    offset = min(done * batch, samples)
    seen: list[int] = []
    for world, start, stop in ((before, 0, offset), (after, offset, samples)):
        by_rank = [list(EpochBatches(7, 1, samples, batch, start, rank, world)) for rank in range(world)]
        for number, at in enumerate(range(start, stop, batch)):
            count = min(batch, samples - at)
            # of a rank for which nothing was left, nothing counts
            shares = [by_rank[rank][number][: share(count, rank, world)] for rank in range(world)]
            seen += [index for turn in range(count) for _, index in shares[turn % world][turn // world :][:1]]
    assert seen == list(epoch_order(7, 1, samples))


def train(exchange: Exchange, config: JobConfig, store: str, data: str, stop_at: int | None) -> int:
    """One rank, until all are asked to leave at about a step. Returns where that was."""
    ranks = standing(config.parallel, exchange, torch.device("cpu"))
    request, at = GroupStop(), [0]

    def hear(message: Message) -> None:
        if isinstance(message, Beat):
            at[0] = message.position.step
            if stop_at is not None and message.position.step >= stop_at:
                request.ask()

    try:
        train_range(config, store, "r", data_folder=Path(data), ranks=ranks, report=hear, request=request)
    except Exception as error:
        if stop_at is None or "asked to stop" not in str(error):
            raise
    return at[0]


@pytest.mark.soak
@pytest.mark.xdist_group("ranks")
def test_a_run_on_2_then_4_then_1_then_3_ranks_draws_every_sample_of_every_epoch_once(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    (tmp_path / "seen").mkdir()
    params: dict[str, Any] = {**gpt_config().params, "windows_per_epoch": SAMPLES, "folder": str(tmp_path / "seen")}
    steps = []
    for world, stop_at in ((2, 2), (4, 5), (1, 9), (3, None)):
        config = gpt_config(
            job="tests.support.seen_gpt:SeenGpt",
            params=params,
            epochs=4,
            batch_size=6,
            accumulate_batches=1,
            parallel={"world": world},
        )
        steps.append(max(gang(world, train, config, str(tmp_path / "store"), str(corpus), stop_at)))
    assert steps == sorted(steps)
    assert steps[-1] == 16
    lines = [line for file in (tmp_path / "seen").iterdir() for line in file.read_text().split()]
    assert Counter(lines) == Counter({str(index): 4 for index in range(SAMPLES)})
