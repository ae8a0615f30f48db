"""What the engine asks of a store, and the closed alphabet of keys.

A store holds the objects of one run below one URL. Objects are immutable: written once, whole, and durable when
the call returns. No method reads a cached listing.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from training.errors import Corrupt, Invalid, Unavailable

Buffer = bytes | bytearray | memoryview

_SEGMENT = r"[a-z0-9](?:[a-z0-9.\-]*[a-z0-9\-])?"
_KEY = re.compile(rf"{_SEGMENT}(?:/{_SEGMENT})*")


class NotFound(Corrupt, FileNotFoundError):
    """No object under this key."""


class NoSpace(Unavailable):
    """The store is full or over its quota. Later it may be otherwise; asking again at once is of no use."""


class ObjectInfo(NamedTuple):
    """One row of a listing."""

    key: str
    size_bytes: int


class Aged(NamedTuple):
    """One row of a listing with ages."""

    key: str
    size_bytes: int
    age_seconds: float


class Unfinished(NamedTuple):
    """A write that was begun and has not been finished: by a process that died, or by one that is still at it.

    Attributes:
        name: what the store calls it: a temporary file, the id of a multipart upload.
        key: the object that it would have become, or its folder where only that is known.
        age_seconds: since it was begun, by the store's own clock.
    """

    name: str
    key: str
    age_seconds: float


@runtime_checkable
class Store(Protocol):
    """The questions that the engine asks. Every method raises `Unavailable` when the store does not answer."""

    url: str

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Write the concatenated parts as one object, whole or not at all.

        Keys of packs are unique to one attempt and one save. Writing equal bytes again is a no-op; other bytes
        under an existing key are refused with `Corrupt`.
        """

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write if no object is there. True: this call wrote it. False: there was one, left untouched.

        Either way the object is durable when this returns, so that repeating a call settles an unknown outcome.
        """

    def get(self, key: str) -> bytes:
        """The whole object. Raises `NotFound`."""

    def read(self, key: str, offset: int, length: int) -> bytes:
        """`length` bytes from `offset`; fewer at the object's end. Raises `NotFound`."""

    def exists(self, key: str) -> bool:
        """Whether there is an object now."""

    def list(self, prefix: str) -> list[ObjectInfo]:
        """All objects below `prefix` (a folder, ending in `/`, or empty), sorted by key. Never a part of them:
        what cannot be listed is `Unavailable`, since an empty answer would start a training from zero.
        """

    def delete(self, key: str) -> None:
        """Remove the object; nothing happens if there is none."""

    def ages(self, prefix: str) -> builtins.list[Aged]:
        """Like `list`, with the age of each object by the store's own clock, never by ours.

        Only for the grace period of a collection: no decision about order or about who lives uses an age. The time
        from which it counts is that of the last written byte or, of a multipart upload on AWS, of its beginning:
        an object may be younger than its age by as long as its upload took.
        """

    def unfinished(self) -> builtins.list[Unfinished]:
        """Writes that have been begun and are not finished, sorted. Those of living writers are among them."""

    def abort(self, unfinished: Unfinished) -> None:
        """Remove what an unfinished write has left. Nothing happens if it is gone; a finished object stays."""


def check_key(key: str) -> str:
    """Refuse a key outside the closed alphabet: no user text, no `..`, no absolute path reaches a store."""
    if not _KEY.fullmatch(key):
        raise Invalid(f"store key {key!r} is outside the alphabet [a-z0-9.-/]")
    return key


def check_prefix(prefix: str) -> str:
    """Refuse a listing of anything but a folder: the keys of a store differ in what else a prefix means."""
    if prefix and not (prefix.endswith("/") and _KEY.fullmatch(prefix[:-1])):
        raise Invalid(f"store prefix {prefix!r} is neither empty nor a folder that ends in /")
    return prefix


def put_document(store: Store, key: str, data: bytes) -> bool:
    """Put if absent, where our own retry counts as success.

    Returns:
        True when the store holds exactly `data` under `key`, whoever wrote it; False when it holds other bytes.
    """
    return store.put_if_absent(key, data) or store.get(key) == data
