"""Stores: where the bytes of a checkpoint live."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from training.checkpoint.store.base import (
    Aged,
    Buffer,
    NoSpace,
    NotFound,
    ObjectInfo,
    Store,
    Unfinished,
    put_document,
)
from training.checkpoint.store.local import LocalStore
from training.checkpoint.store.memory import MemoryStore
from training.errors import Invalid

__all__ = [
    "Aged",
    "Buffer",
    "LocalStore",
    "MemoryStore",
    "NoSpace",
    "NotFound",
    "ObjectInfo",
    "Store",
    "Unfinished",
    "open_store",
    "put_document",
]

_memory_stores: dict[str, MemoryStore] = {}


def open_store(url: str | Path) -> Store:
    """Open a store by its address: a folder, `file:///folder`, `s3://bucket/prefix` or `memory://name`.

    S3 is asked again when it does not answer. A folder is not: its errors (no space, a broken disk) do not go away
    in a minute, and a network file system retries in the kernel.

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
    if parts.scheme == "s3":
        from training.checkpoint.store.retry import RetryingStore
        from training.checkpoint.store.s3 import S3Store

        return RetryingStore(S3Store(str(url)))
    raise Invalid(f"no store for {url!r}", hint="use a folder, file:///folder, s3://bucket/prefix or memory://name")
