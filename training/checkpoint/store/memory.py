"""A store in this process's memory: for tests and for trying the engine out."""

from __future__ import annotations

import builtins
import threading
import time
from collections.abc import Callable, Sequence

from training.checkpoint.store.base import (
    Aged,
    Buffer,
    NotFound,
    ObjectInfo,
    Unfinished,
    check_key,
    check_prefix,
)
from training.errors import Corrupt


class MemoryStore:
    """Objects in a dict, one lock around it. `clock` counts seconds, for the ages of objects."""

    def __init__(self, url: str = "memory://", clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self._clock = clock
        self._opened_at = clock()
        self._objects: dict[str, bytes] = {}
        self._written_at: dict[str, float] = {}
        self._lock = threading.Lock()

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """See `Store.put`."""
        data = b"".join(parts)
        if not self.put_if_absent(key, data) and self.get(key) != data:
            raise Corrupt(f"{key} already holds other bytes", key=key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        with self._lock:
            if check_key(key) in self._objects:
                return False
            self._objects[key] = bytes(data)
            self._written_at[key] = self._clock()
            return True

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        with self._lock:
            if check_key(key) not in self._objects:
                raise NotFound(f"no object {key} in {self.url}", key=key)
            return self._objects[key]

    def read(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.read`."""
        return self.get(key)[offset : offset + length]

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        with self._lock:
            return check_key(key) in self._objects

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See `Store.list`."""
        check_prefix(prefix)
        with self._lock:
            return sorted(ObjectInfo(k, len(v)) for k, v in self._objects.items() if k.startswith(prefix))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with self._lock:
            self._objects.pop(check_key(key), None)

    def ages(self, prefix: str) -> builtins.list[Aged]:
        """See `Store.ages`."""
        rows, now = self.list(prefix), self._clock()
        return [Aged(key, size, now - self._written_at.get(key, self._opened_at)) for key, size in rows]

    def unfinished(self) -> builtins.list[Unfinished]:
        """See `Store.unfinished`; a write to memory is done at once."""
        return []

    def abort(self, unfinished: Unfinished) -> None:
        """See `Store.abort`."""
