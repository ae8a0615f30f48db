"""What all wrappers of a store have in common: every operation goes through one place."""

from __future__ import annotations

import builtins
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from training.checkpoint.store.base import Aged, Buffer, ObjectInfo, Store, Unfinished

T = TypeVar("T")


class Request(NamedTuple):
    """One operation: the method's name, its key or prefix or nothing, and the size of what it writes."""

    operation: str
    key: str
    sent_bytes: int = 0


class StoreWrapper(ABC):
    """A store that asks another one."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    @abstractmethod
    def _call(self, request: Request, ask: Callable[[], T]) -> T:
        """Do one operation; `ask` does it at the inner store."""

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """See `Store.put`."""
        sent_bytes = sum(memoryview(part).nbytes for part in parts)
        self._call(Request("put", key, sent_bytes), lambda: self.inner.put(key, parts))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        return self._call(Request("put_if_absent", key, len(data)), lambda: self.inner.put_if_absent(key, data))

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return self._call(Request("get", key), lambda: self.inner.get(key))

    def read(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.read`."""
        return self._call(Request("read", key), lambda: self.inner.read(key, offset, length))

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        return self._call(Request("exists", key), lambda: self.inner.exists(key))

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See `Store.list`."""
        return self._call(Request("list", prefix), lambda: self.inner.list(prefix))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._call(Request("delete", key), lambda: self.inner.delete(key))

    def ages(self, prefix: str) -> builtins.list[Aged]:
        """See `Store.ages`."""
        return self._call(Request("ages", prefix), lambda: self.inner.ages(prefix))

    def unfinished(self) -> builtins.list[Unfinished]:
        """See `Store.unfinished`."""
        return self._call(Request("unfinished", ""), self.inner.unfinished)

    def abort(self, unfinished: Unfinished) -> None:
        """See `Store.abort`."""
        self._call(Request("abort", unfinished.key), lambda: self.inner.abort(unfinished))
