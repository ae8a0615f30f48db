"""Other nodes for a range whose group has several: each is a flow run on the pool, called and replaced as needed.

Where the group has fewer nodes than it may have, another one is called; it comes as soon as a worker is free, and
the group grows. A flow run that is counted as running while its node is not heard of is given up.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from infra.prefect_runs import FlowRunInfo
from tasks.attempts import is_companion, run_tag
from tasks.order import RangeOrder
from training.config import Frozen
from training.errors import RetomaError
from training.ports import Gathering

DEPLOYMENT = "join-range/gpu"
LOOK_SECONDS = 2.0
COMING_SECONDS = 20.0  # from Running until its node is heard of
LEASE_SECONDS = 60.0


class NodeCall(Frozen):
    """What a node is told: plain values that pass through the orchestrator."""

    order: RangeOrder
    gathering: Gathering
    lease_seconds: float = LEASE_SECONDS


class Runs(Protocol):
    """What is asked of the orchestrator; see `infra.prefect_runs.PrefectRuns`."""

    def live_with_tag(self, tag: str) -> list[FlowRunInfo]:
        """Flow runs with a tag that are not over."""

    def start(
        self, deployment: str, parameters: dict[str, Any], *, name: str, key: str, tags: Iterable[str]
    ) -> FlowRunInfo:
        """Create a flow run, or find the one with this key."""

    def cancel(self, flow_run_id: str) -> None:
        """Ask for a flow run to be cancelled."""

    def close(self) -> None:
        """Close the connection."""


class Company:
    """The other nodes of one attempt at a range.

    Args:
        order: the range; its configuration says how many nodes.
        address: of this node, as others reach it.
        connect: opens a connection of one thread to the orchestrator.

    Attributes:
        gathering: where they come to.
        here: flow runs whose nodes are heard of now.
    """

    def __init__(
        self,
        order: RangeOrder,
        address: str,
        connect: Callable[[], Runs],
        logger: logging.Logger | logging.LoggerAdapter[Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gathering = Gathering(host=address, port=_free_port(address), ticket=secrets.token_hex(16))
        self.here: tuple[str, ...] = ()
        self._order, self._connect, self._logger, self._clock = order, connect, logger, clock
        self._wanted = order.config.parallel.nodes - 1
        self._numbers = itertools.count(1)
        self._unheard: dict[str, float] = {}  # running, and not heard of, since then
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="retoma-company", daemon=True)

    def start(self) -> None:
        """Call them, and keep watch."""
        self._thread.start()

    def dismiss(self) -> None:
        """The range is done, and those that are here go: nobody is called in their place."""
        self._over.set()

    def close(self, seconds: float) -> None:
        """Nobody is needed any more. Those that are here are told by the launcher."""
        self._over.set()
        self._thread.join(seconds)

    def look(self, runs: Runs) -> None:
        """One look: give up whom nobody hears of, call who is missing."""
        live = [run for run in runs.live_with_tag(run_tag(self._order.run)) if is_companion(run)]
        coming = [run for run in live if run.state != "CANCELLING" and not self._is_stale(run)]
        for run in live:
            if run not in coming and run.state != "CANCELLING":
                runs.cancel(run.id)
        for _ in range(self._wanted - len(coming)):
            self._call(runs)

    def _is_stale(self, run: FlowRunInfo) -> bool:
        """Whether it was called by an attempt that is over, or runs on a node that is gone."""
        if run.parameters["call"].get("gathering", {}).get("ticket") != self.gathering.ticket:
            return True
        if run.state != "RUNNING" or run.id in self.here:
            self._unheard.pop(run.id, None)
            return False
        return self._clock() - self._unheard.setdefault(run.id, self._clock()) > COMING_SECONDS

    def _call(self, runs: Runs) -> None:
        call = NodeCall(order=self._order, gathering=self.gathering)
        number = next(self._numbers)
        order = self._order
        name = f"{order.run}-{order.start}-{order.stop}-a{order.attempt}-node{number}"
        runs.start(
            DEPLOYMENT,
            {"call": call.model_dump(mode="json")},
            name=name,
            key=f"{order.run}:{self.gathering.ticket}:n{number}",
            tags=["retoma", run_tag(order.run)],
        )
        self._logger.info("another node was called: flow run %s", name)

    def _watch(self) -> None:
        runs = self._connect()
        while not self._over.is_set():
            try:
                self.look(runs)
            except RetomaError as error:
                self._logger.warning("other nodes could not be called: %s", error.message)
            self._over.wait(LOOK_SECONDS)
        with suppress(RetomaError):
            for run in runs.live_with_tag(run_tag(self._order.run)):
                if is_companion(run) and run.state != "CANCELLING" and run.id not in self.here:
                    runs.cancel(run.id)  # it would find nobody, and wait
        runs.close()


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
