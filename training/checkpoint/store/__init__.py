"""Stores: where the bytes of a checkpoint live."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from training.checkpoint.store.base import Buffer, NotFound, ObjectInfo, Store, put_document
from training.checkpoint.store.local import LocalStore
from training.checkpoint.store.memory import MemoryStore
from training.errors import Invalid

__all__ = [
    "Buffer",
    "LocalStore",
    "MemoryStore",
    "NotFound",
    "ObjectInfo",
    "Store",
    "open_store",
    "put_document",
]

_memory_stores: dict[str, MemoryStore] = {}


def open_store(url: str | Path) -> Store:
    """Open a store by its address: a folder, `file:///folder`, or `memory://name` (of this process).

    Raises:
        Invalid: the scheme is not one of these.
    """
    parts = urlsplit(str(url))
    if len(parts.scheme) <= 1:  # no scheme, or a drive letter
        return LocalStore(Path(url).expanduser())
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(unquote(parts.path))
    if parts.scheme == "memory":
        return _memory_stores.setdefault(str(url), MemoryStore(str(url)))
    raise Invalid(f"no store for {url!r}", hint="use a folder, file:///folder or memory://name")
