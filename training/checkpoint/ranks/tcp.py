"""The exchange over a `TCPStore`. Retoma's launcher has one, which dies with no rank; see `hosted` for others."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import DistStoreError

from training.checkpoint.ranks.exchange import Stopped, not_in_time
from training.errors import Unavailable

LOOPBACK = "127.0.0.1"
LOOK_SECONDS = 0.5  # between two looks whether to wait on
CONNECT_SECONDS = 30.0
OPERATION_SECONDS = 10.0
T = TypeVar("T")


def host_store(address: str = LOOPBACK) -> tuple[Any, int]:
    """A store that listens on one address as long as it is kept, and its port. Raises `OSError`.

    By itself torch's store would listen on every interface.
    """
    listening = socket.create_server((address, 0))
    port = listening.getsockname()[1]
    store: Any = dist.TCPStore(  # type: ignore[attr-defined] # the stubs do not export it
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, port


class TcpExchange:
    """One rank's access, with a connection of its own. Not for two threads at once.

    Args:
        host, port: of the store.
        rank, size: of the group.
        generation: of the group; the messages of an older one are not seen.

    Raises:
        Unavailable: nobody answers there.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, generation: int = 0) -> None:
        self.rank, self.size, self.taken = rank, size, False
        self._prefix = f"g{generation}/"
        self._place = f"{host}:{port}"
        self._store = self._reach(lambda: reach_store(host, port))

    def post(self, key: str, data: bytes) -> None:
        """See `Exchange.post`."""
        self._reach(lambda: self._store.set(self._prefix + key, data))

    def wait(self, keys: Sequence[str], seconds: float, stop: Sequence[str] = ()) -> None:
        """See `Exchange.wait`."""
        deadline = time.monotonic() + seconds
        names = [self._prefix + key for key in keys]
        while True:
            left = deadline - time.monotonic()
            if self._there(names, min(LOOK_SECONDS, left)):
                return
            for other in stop:
                if self._reach(lambda other=other: self._store.check([self._prefix + other])):  # type: ignore[misc]
                    raise Stopped(other)
            if left <= LOOK_SECONDS:
                raise not_in_time(keys, seconds)

    def take(self, keys: Sequence[str], seconds: float, stop: Sequence[str] = ()) -> list[bytes]:
        """See `Exchange.take`."""
        self.wait(keys, seconds, stop)
        names = [self._prefix + key for key in keys]
        return self._reach(lambda: [bytes(data) for data in self._store.multi_get(names)])

    def forget(self, key: str) -> None:
        """See `Exchange.forget`."""
        self._reach(lambda: self._store.delete_key(self._prefix + key))

    def count(self, key: str, more: int = 1) -> int:
        """Add to the number under `key`, which begins at 0, and tell what it is now."""
        return self._reach(lambda: int(self._store.add(self._prefix + key, more)))

    def _there(self, names: list[str], seconds: float) -> bool:
        """Whether something is under all names within so long."""
        try:
            self._store.wait(names, timedelta(seconds=max(seconds, 0.001)))
        except (DistStoreError, RuntimeError):  # no time left, or nobody there: the next operation tells
            return False
        return True

    def _reach(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except (DistStoreError, RuntimeError) as error:
            raise Unavailable(f"the store of the ranks does not answer at {self._place}: {error}") from error


def reach_store(host: str, port: int) -> Any:
    """A connection to the store of another process. Raises torch's errors."""
    store: Any = dist.TCPStore(  # type: ignore[attr-defined] # the stubs do not export it
        host, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS)
    )
    store.set_timeout(timedelta(seconds=OPERATION_SECONDS))
    return store
