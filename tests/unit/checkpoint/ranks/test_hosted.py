"""Ranks that something else has launched: rank 0 hosts the store of their messages, and finds who is dead."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from tests.support.gang import gang
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.ranks.exchange import Exchange, MemoryBoard, Stopped, dead_key
from training.checkpoint.ranks.hosted import Watch, host_exchange
from training.checkpoint.store import MemoryStore
from training.errors import Invalid, Unavailable

pytestmark = pytest.mark.xdist_group("ranks")


def test_who_does_not_count_on_is_dead_and_alive_again_when_he_does() -> None:
    watch = Watch(10)
    watch.look({1: 5, 2: 5}, now=100)
    watch.look({1: 6, 2: 5}, now=109)
    assert watch.dead == set()
    watch.look({1: 6, 2: 5}, now=111)
    assert watch.dead == {2}
    watch.look({1: 6, 2: 6}, now=120)
    assert watch.dead == {1}
    watch.look({1: 7, 2: 7}, now=121)
    assert watch.dead == set()


def test_ranks_without_a_process_group_cannot_meet() -> None:
    with pytest.raises(Invalid, match="there is none"):
        host_exchange()


def test_an_exchange_serves_one_checkpointer() -> None:
    """The second would take the messages of the first for its own."""
    (exchange,) = MemoryBoard(1).ranks()
    IncrementalCheckpointer(MemoryStore(), group=exchange)
    with pytest.raises(Invalid, match="one checkpointer"):
        IncrementalCheckpointer(MemoryStore(), group=exchange)


def meet(exchange: Exchange) -> dict[str, Any]:
    """A place where nobody can meet; two groups of the same processes; rank 1 falls silent; rank 0 is gone."""
    found: dict[str, Any] = {}
    with pytest.raises(Unavailable) as caught:
        host_exchange(host="192.0.2.1")
    found["elsewhere"] = str(caught.value)
    first, second = host_exchange(), host_exchange(silent_seconds=1.5)
    rank, other = first.rank, 1 - first.rank
    for number, own in enumerate((first, second)):
        own.post(f"from {rank}", str(number).encode())
    found["heard"] = [own.take([f"from {other}"], 10)[0] for own in (first, second)]
    found["listening"] = {c.laddr.ip for c in psutil.Process().net_connections() if c.status == "LISTEN"}
    first.close()
    begun = time.monotonic()
    if rank == 1:
        second.abandon()
    else:
        with pytest.raises(Stopped):
            second.take(["never"], 60, [dead_key(1)])
    found["silent"] = time.monotonic() - begun
    dist.barrier()
    if rank == 0:
        second.abandon()
    dist.barrier()
    begun = time.monotonic()
    if rank == 1:
        with pytest.raises(Unavailable):
            second.take(["never"], 60, [dead_key(0)])
    found["gone"] = time.monotonic() - begun
    return found


def test_ranks_meet_tell_and_miss_each_other() -> None:
    host, guest = gang(2, meet)
    assert host["heard"] == guest["heard"] == [b"0", b"1"]
    for rank in (host, guest):
        assert "rank 0 cannot host a store at 192.0.2.1" in rank["elsewhere"]
        assert "host_exchange(host=...)" in rank["elsewhere"]
    assert 1 < host["silent"] < 15
    assert guest["gone"] < 15
    assert host["listening"] <= {"127.0.0.1"}, "nobody on another node can reach it"
