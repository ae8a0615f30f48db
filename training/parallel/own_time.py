"""The time of a step that a rank needs for itself: without what it waits in collectives.

Only where a wait blocks the thread that trains: on CPUs. A GPU waits by itself, in the order of its queue, and the
thread that feeds it is long past the collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

_engine: Any = torch.autograd.Variable._execution_engine  # as FSDP2 itself uses it


class OwnTime:
    """A watch that stands still while the thread that trains waits for other ranks.

    Args:
        clock: seconds, monotonic.

    Attributes:
        measured: whether waits are told to it, see `told_of_waits`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.measured = False
        self._clock = clock
        self._thread = threading.get_ident()
        self._begun = clock()
        self._waits_since: float | None = None
        self._waited = 0.0

    def begin(self) -> None:
        """A step begins. A save or an evaluation before it is no part of it."""
        self._begun, self._waited = self._clock(), 0.0

    def seconds(self) -> float:
        """Of its own, since the step has begun."""
        return self.step_seconds() - self._waited

    def step_seconds(self) -> float:
        """Since the step has begun."""
        return self._clock() - self._begun

    def backward(self, loss: Tensor, model: nn.Module) -> None:
        """`loss.backward()`. DDP waits at its end, for the sums of gradients, in C++."""
        if self.measured and isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync:
            # before DDP asks for the same: what is asked for first is called first when the graph is done
            cast("Any", loss).register_hook(lambda _: _engine.queue_callback(self._wait))
        try:
            cast("Callable[[], None]", loss.backward)()
        finally:
            self._go_on()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The thread waits; within another wait, and in another thread, that is no news."""
        if self._waits_since is not None or threading.get_ident() != self._thread:
            yield
            return
        self._wait()
        try:
            yield
        finally:
            self._go_on()

    def _wait(self) -> None:
        self._waits_since = self._clock()

    def _go_on(self) -> None:
        if self._waits_since is not None:
            self._waited += self._clock() - self._waits_since
            self._waits_since = None


@contextmanager
def told_of_waits(own: OwnTime) -> Iterator[None]:
    """Within, each wait of Python code for a collective is told: of FSDP2, of tensor parallelism, of our own.

    torch has no hook for it: both functions that such a wait goes through are wrapped, and put back at the end.
    """
    places: list[tuple[Any, str]] = [(dist.Work, "wait"), (functional, "wait_tensor")]
    before = [getattr(place, name) for place, name in places]
    for (place, name), wait in zip(places, before, strict=True):
        setattr(place, name, _told(wait, own))
    own.measured = True
    try:
        yield
    finally:
        own.measured = False
        for (place, name), wait in zip(places, before, strict=True):
            setattr(place, name, wait)


def _told(wait: Callable[..., Any], own: OwnTime) -> Callable[..., Any]:
    @wraps(wait)
    def told(*arguments: Any, **named: Any) -> Any:
        with own.waiting():
            return wait(*arguments, **named)

    return told
