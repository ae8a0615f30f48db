"""F6: a store that answers 503 is asked again with jitter and within a budget; then the save fails, and only it."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.bits import bits
from tests.support.ranks import together
from tests.support.s3_proxy import Answer, Asked, Proxy, Verdict
from tests.support.s3_servers import RawBucket
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.ranks.exchange import MemoryBoard
from training.checkpoint.restore import restore_newest
from training.checkpoint.store.retry import RetryingStore
from training.checkpoint.store.s3 import S3Store
from training.errors import Unavailable

pytest_plugins = ["tests.support.s3_fixtures"]
pytestmark = pytest.mark.xdist_group("s3")
on_each = pytest.mark.parametrize(("s3", "folder"), [("moto", "packs"), ("seaweed", "manifests")], indirect=["s3"])
BUSY = Answer(503, "SlowDown", {"Retry-After": "1"})


class Busy:
    """Answers 503 to the next `left` writes below a folder."""

    def __init__(self, folder: str) -> None:
        self.folder, self.left, self.refused_at = folder, 0, list[float]()

    def __call__(self, asked: Asked) -> Verdict:
        if asked.method != "PUT" or f"/{self.folder}/" not in asked.key or not self.left:
            return None
        self.left -= 1
        self.refused_at.append(time.monotonic())
        return BUSY


def state_at(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((5_000,), float(step))}


@on_each
def test_a_store_that_is_busy_for_a_while_costs_time_and_nothing_else(
    bucket: RawBucket, proxy: Proxy, folder: str
) -> None:
    store = RetryingStore(S3Store(bucket.url), budget_seconds=30, rng=random.Random(1))
    proxy.rule = busy = Busy(folder)
    with IncrementalCheckpointer(store) as checkpointer:
        checkpointer.save(state_at(0))
        checkpointer.wait()
        busy.left = 3
        checkpointer.save(state_at(1))
        committed = checkpointer.wait()
    assert committed is not None
    assert committed.ref.sequence == 1
    pauses = [after - before for before, after in zip(busy.refused_at, busy.refused_at[1:], strict=False)]
    assert len(pauses) == 2
    assert max(pauses) - min(pauses) > 0.01, "no jitter"


@on_each
def test_a_store_that_stays_busy_fails_the_save_within_seconds_and_the_training_goes_on(
    bucket: RawBucket, proxy: Proxy, folder: str
) -> None:
    store = RetryingStore(S3Store(bucket.url), budget_seconds=1.0)
    proxy.rule = busy = Busy(folder)
    with IncrementalCheckpointer(store) as checkpointer:
        checkpointer.save(state_at(0))
        head = checkpointer.wait()
        assert head is not None
        busy.left = 10**9
        started = time.monotonic()
        checkpointer.save(state_at(1))
        with pytest.raises(Unavailable, match=r"503 SlowDown.* tried [0-9]+ times in"):
            checkpointer.wait()
        assert time.monotonic() - started < 5
        assert 2 <= len(busy.refused_at) <= 40
        assert checkpointer.wait() == head
        assert [key for key, _ in store.list("manifests/")] == [head.manifest.key]
        busy.left = 0
        checkpointer.save(state_at(2))
        committed = checkpointer.wait()
        assert committed is not None
        assert committed.manifest.parent == head.ref
        assert bits(dict(checkpointer.restore() or {})) == bits(state_at(2))


@pytest.mark.parametrize("s3", ["moto"], indirect=True)
def test_a_store_that_is_busy_is_never_taken_for_an_empty_one(bucket: RawBucket, proxy: Proxy) -> None:
    with IncrementalCheckpointer(S3Store(bucket.url)) as checkpointer:
        checkpointer.save(state_at(0))
    proxy.rule = lambda asked: BUSY if asked.method == "GET" else None
    impatient = RetryingStore(S3Store(bucket.url), budget_seconds=0.3)
    with pytest.raises(Unavailable, match="503"):
        IncrementalCheckpointer(impatient)
    assert len(proxy.asked) > 2
    proxy.rule = lambda asked: BUSY if "list-type" in asked.query else None
    with IncrementalCheckpointer(impatient) as later, pytest.raises(Unavailable, match="503"):
        later.restore()
    proxy.rule = lambda asked: None
    with IncrementalCheckpointer(impatient) as later:
        assert bits(dict(later.restore() or {})) == bits(state_at(0))


class BusyForRank1(Busy):
    """The same, for what rank 1 writes."""

    def __call__(self, asked: Asked) -> Verdict:
        return super().__call__(asked) if "-r0001-" in asked.key else None


@pytest.mark.parametrize("s3", ["seaweed"], indirect=True)
def test_one_rank_whose_store_stays_busy_fails_the_save_on_all_ranks_within_seconds(
    bucket: RawBucket, proxy: Proxy
) -> None:
    proxy.rule = busy = BusyForRank1("packs")
    board, store = MemoryBoard(3), RetryingStore(S3Store(bucket.url), budget_seconds=1.0)
    ranks = [IncrementalCheckpointer(store, group=exchange, split=["w"]) for exchange in board.ranks()]

    def save(step: int) -> list[Any]:
        def one(rank: IncrementalCheckpointer) -> Any:
            # wherever it is put, rank 1 writes a part of it
            rank.save({"w": {str(part): torch.full((5_000,), float(step + part)) for part in range(9)}})
            return rank.wait()

        return together([partial(one, rank) for rank in ranks])

    together([rank.restore for rank in ranks])
    first = save(0)
    assert not [found for found in first if isinstance(found, BaseException)]
    busy.left = 10**9
    started = time.monotonic()
    failed = save(1)
    assert time.monotonic() - started < 5
    assert [type(error) for error in failed] == [Unavailable] * 3
    assert all("503 SlowDown" in str(error) for error in failed)
    assert "rank 1" in str(failed[0])
    busy.left = 0
    again = save(2)
    assert len({str(found.ref) for found in again}) == 1
    for rank in ranks:
        rank.close()
    keys = [key for key, _ in store.list("manifests/")]
    assert keys == [first[0].manifest.key, again[0].manifest.key]
    restored = restore_newest(store, "default")
    assert restored is not None
    assert float(restored["w"]["8"][0]) == 10.0
