"""Real ranks: processes with a gloo group, forked from a server that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from training.checkpoint.ranks.tcp import TcpExchange
from training.guard import die_with_parent
from training.parallel.agent import ONE_THREAD

SECONDS = 120
_PRELOAD = [
    "tests.support.gang",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
]


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with patch.dict(os.environ, ONE_THREAD):  # as ranks of retoma have it
        forkserver.ensure_running()
    return context


def gang(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(exchange, *arguments)` returns on each of `size` ranks. No tensors: numpy arrays.

    Raises:
        AssertionError: with the traceback of the first rank that failed.
    """
    answers = outcomes(size, work, *arguments)
    failed = [text for ok, text in answers if not ok]
    assert not failed, failed[0]
    return [value for _, value in answers]


def outcomes(size: int, work: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
    """Of each rank whether it returned, and what; or why it did not: a traceback, or that it died."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    members = []
    for rank in range(size):
        ours, theirs = _context().Pipe()
        process = _context().Process(target=_member, args=(theirs, store.port, rank, size, work, arguments))
        process.start()
        theirs.close()
        members.append((process, ours))
    try:
        return [_answer(pipe) for _, pipe in members]
    finally:
        for process, pipe in members:
            process.kill()
            process.join()
            pipe.close()


def _answer(pipe: Connection) -> tuple[bool, Any]:
    if not pipe.poll(SECONDS):
        return False, f"no answer in {SECONDS} s"
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return False, "a rank died"


def _member(
    pipe: Connection, port: int, rank: int, size: int, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    die_with_parent()
    os.nice(15)  # several at once, beside tests of seconds
    torch.set_num_threads(1)
    store: Any = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        "gloo", store=dist.distributed_c10d.PrefixStore("gang", store), rank=rank, world_size=size
    )
    try:
        pipe.send((True, work(TcpExchange("127.0.0.1", port, rank, size), *arguments)))
    except BaseException:  # noqa: BLE001 - the test shows it
        pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
    finally:
        dist.destroy_process_group()
