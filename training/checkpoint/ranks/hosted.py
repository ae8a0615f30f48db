"""The exchange of ranks that retoma did not launch: rank 0 hosts its store, and watches over the others.

    dist.init_process_group()                             # torchrun, mp.spawn, Slurm: whatever started the ranks
    with host_exchange() as exchange:
        checkpointer = IncrementalCheckpointer("./checkpoints", group=exchange)

The process group is used once, to tell where the store is. No save uses it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from training.checkpoint.ranks.exchange import Stopped, dead_key
from training.checkpoint.ranks.tcp import CONNECT_SECONDS, TcpExchange, host_store
from training.errors import Invalid, Unavailable

BEAT_SECONDS = 1.0
GOODBYE_SECONDS = 10.0  # that rank 0 waits for the others to end
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.02
_MEET = "met"
_ELSEWHERE = "with ranks on several nodes: host_exchange(host=...), an address of rank 0's node"


class Place(NamedTuple):
    """Where the store of a group is. `generation`: of the group; nobody else's messages are taken for its own."""

    host: str
    port: int
    generation: int


def host_exchange(
    process_group: dist.ProcessGroup | None = None, *, host: str = "127.0.0.1", silent_seconds: float = 30.0
) -> HostedExchange:
    """An exchange for the ranks of a process group, for one checkpointer. A collective: every rank calls it.

    Args:
        process_group: default: all ranks.
        host: the address of rank 0's node that the store listens on, and that the others reach it by. By default
            nobody on another node can: give it there when the ranks are on several nodes. Rank 0's counts.
        silent_seconds: a rank that gives no sign of life for so long is taken for dead: a save in flight fails on
            the others instead of waiting for its `patience_seconds`. A thread gives the sign, so that it must be
            longer than the ranks hold Python's lock at a stretch. A rank that comes back is alive again. If rank 0
            dies, the store goes with it, and the others know at once. Rank 0's counts.

    Raises:
        Invalid: there is no process group.
        Unavailable: rank 0 cannot host a store at `host`, or not all ranks reach it.
    """
    if not dist.is_initialized():
        raise Invalid("ranks meet over a process group, and there is none", hint="dist.init_process_group()")
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    told: list[Any] = [None]
    server = None
    if rank == 0:
        try:
            server, port = host_store(host)
            told = [Place(host, port, secrets.randbelow(2**31))]
        except OSError as error:
            told = [f"rank 0 cannot host a store at {host}: {error}"]
    dist.broadcast_object_list(told, group=process_group, group_src=0)
    if isinstance(told[0], str):
        raise Unavailable(told[0], hint=_ELSEWHERE)
    try:
        exchange = HostedExchange(told[0], rank, size, silent_seconds, server)
    except Unavailable as error:
        raise Unavailable(error.message, hint=_ELSEWHERE) from error
    try:
        exchange.meet()
    except BaseException:
        exchange.abandon()
        raise
    return exchange


class HostedExchange(TcpExchange):
    """One rank's access. Close it after the last save: rank 0 stays until the others have heard how that ended.

    Args:
        place: of the store.
        rank, size: of the group.
        silent_seconds: see `host_exchange`.
        server: the store itself, in rank 0.
    """

    def __init__(self, place: Place, rank: int, size: int, silent_seconds: float, server: Any = None) -> None:
        super().__init__(place.host, place.port, rank, size, place.generation)
        self._server = server
        self._ending = threading.Event()
        pulse = TcpExchange(place.host, place.port, rank, size, place.generation)
        self._pulse = threading.Thread(
            target=_beat, args=(pulse, silent_seconds, self._ending), name="retoma-pulse", daemon=True
        )
        self._pulse.start()

    def meet(self) -> None:
        """Return when all ranks have come."""
        if self.rank == 0:
            for other in range(1, self.size):
                self.wait([f"{_MEET}/{other}"], 2 * CONNECT_SECONDS)
            self.post(_MEET, b"")
        else:
            self.post(f"{_MEET}/{self.rank}", b"")
            self.wait([_MEET], 2 * CONNECT_SECONDS)

    def close(self) -> None:
        """Say goodbye. Rank 0 waits a little for the others to do so, since the store goes with it."""
        if self._ending.is_set():
            return
        deadline = time.monotonic() + GOODBYE_SECONDS
        try:
            with suppress(Unavailable):
                self.post(f"bye/{self.rank}", b"")
            for other in range(1, self.size) if self.rank == 0 else ():
                with suppress(Stopped, Unavailable):  # nothing depends on it
                    self.wait([f"bye/{other}"], max(0.0, deadline - time.monotonic()), [dead_key(other)])
        finally:
            self.abandon()

    def abandon(self) -> None:
        """End at once, as after an error."""
        self._ending.set()
        self._pulse.join(2 * BEAT_SECONDS)
        self._server = None

    def _there(self, names: list[str], seconds: float) -> bool:
        """Asks now and then: of a wait that ends torch warns, and this process has its log in other hands."""
        deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE_SECONDS
        while not self._reach(lambda: self._store.check(names)):
            if time.monotonic() + pause > deadline:
                return False
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, 1.5 * pause)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abandon()


class Watch:
    """Finds who is silent, by numbers that grow while their owners live. Own clock: theirs may be wrong.

    Args:
        silent_seconds: without a new number.
    """

    def __init__(self, silent_seconds: float) -> None:
        self._silent_seconds = silent_seconds
        self._heard: dict[int, tuple[int, float]] = {}
        self.dead: set[int] = set()

    def look(self, counts: Mapping[int, int], now: float) -> None:
        """Take the numbers of all ranks at a moment into account.

        Args:
            counts: of each rank.
            now: seconds of a monotonic clock.
        """
        for rank, count in counts.items():
            before = self._heard.get(rank)
            if before is None or before[0] != count:
                self._heard[rank] = count, now
                self.dead.discard(rank)
            elif now - before[1] > self._silent_seconds:
                self.dead.add(rank)


def _beat(exchange: TcpExchange, silent_seconds: float, ending: threading.Event) -> None:
    """Give a sign of life, and in rank 0 look for those of the others, until the end or rank 0's."""
    watch, told = Watch(silent_seconds), set[int]()
    try:
        while not ending.wait(BEAT_SECONDS):
            exchange.count(f"alive/{exchange.rank}")
            if exchange.rank == 0:
                others = range(1, exchange.size)
                watch.look({rank: exchange.count(f"alive/{rank}", 0) for rank in others}, time.monotonic())
                for rank in watch.dead - told:
                    exchange.post(dead_key(rank), b"")
                for rank in told - watch.dead:
                    exchange.forget(dead_key(rank))
                told = set(watch.dead)
    except Unavailable:
        return  # rank 0 is gone, and whoever waits for it finds the same
