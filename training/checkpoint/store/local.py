"""A store in a folder. An object appears whole under its name, or not at all, also after a power cut.

Temporary file in the same folder, fsync, hard link to the final name (which fails if it exists: put-if-absent on
any POSIX file system, NFS included), fsync of the folder.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from training.checkpoint.store.base import (
    Aged,
    Buffer,
    NoSpace,
    NotFound,
    ObjectInfo,
    Unfinished,
    check_key,
    check_prefix,
)
from training.errors import Corrupt, Invalid, Unavailable

_TEMPORARY = ".tmp-"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class LocalStore:
    """Objects as files below `folder`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self.url = self.folder.as_uri()

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """See `Store.put`."""
        if not self._link(key, parts) and self.get(key) != b"".join(parts):
            raise Corrupt(f"{key} already holds other bytes", key=key)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        return self._link(key, [data])

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        with self._reading(key) as path:
            return path.read_bytes()

    def read(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.read`."""
        with self._reading(key) as path, path.open("rb") as file:
            return os.pread(file.fileno(), length, offset)

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        return self._path(key).exists()

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See `Store.list`."""
        rows = self._walk(check_prefix(prefix), temporary=False)
        return sorted(ObjectInfo(key, stat.st_size) for key, stat in rows)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._unlink(self._path(key))

    def ages(self, prefix: str) -> builtins.list[Aged]:
        """See `Store.ages`. An object is as old as its last written byte."""
        rows = list(self._walk(check_prefix(prefix), temporary=False))
        now = self._now() if rows else 0.0
        return sorted(Aged(key, stat.st_size, now - stat.st_mtime) for key, stat in rows)

    def unfinished(self) -> builtins.list[Unfinished]:
        """See `Store.unfinished`: temporary files. Only the folder of the object is known, not its name."""
        rows = list(self._walk("", temporary=True))
        now = self._now() if rows else 0.0
        return sorted(Unfinished(name, name.rpartition("/")[0], now - stat.st_mtime) for name, stat in rows)

    def abort(self, unfinished: Unfinished) -> None:
        """See `Store.abort`."""
        folder, _, name = unfinished.name.rpartition("/")
        if not name.startswith(_TEMPORARY):
            raise Invalid(f"{unfinished.name!r} is no temporary file of a store")
        self._unlink(self.folder / check_prefix(f"{folder}/" if folder else "") / name)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
            if path.parent.is_dir():
                _fsync_folder(path.parent)
        except OSError as error:
            raise self._explain(error, path, 0) from error

    def _walk(self, prefix: str, *, temporary: bool) -> Iterator[tuple[str, os.stat_result]]:
        for folder, _, names in os.walk(self.folder / prefix, onerror=self._cannot_list):
            for name in names:
                if name.startswith(_TEMPORARY) is temporary:
                    path = Path(folder, name)
                    with contextlib.suppress(FileNotFoundError):  # deleted while we were looking
                        yield path.relative_to(self.folder).as_posix(), path.stat()

    def _now(self) -> float:
        """The file system's clock, which on a network is not ours: the time of a file written just now."""
        path = self.folder / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            path.touch(exist_ok=False)
            return path.stat().st_mtime
        except OSError as error:
            raise self._explain(error, path, 0) from error
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _cannot_list(self, error: OSError) -> None:
        """What is not there is empty; what cannot be read is not."""
        if not isinstance(error, FileNotFoundError):
            raise Unavailable(f"listing {error.filename}: {error.strerror}") from error

    def _path(self, key: str) -> Path:
        return self.folder / check_key(key)

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[Path]:
        try:
            yield self._path(key)
        except FileNotFoundError as error:
            raise NotFound(f"no object {key} in {self.url}", key=key) from error
        except OSError as error:
            raise Unavailable(f"reading {self._path(key)}: {error}", key=key) from error

    def _link(self, key: str, parts: Sequence[Buffer]) -> bool:
        path = self._path(key)
        temporary = path.parent / f"{_TEMPORARY}{uuid.uuid4().hex}"
        try:
            _make_folder(path.parent)
            with temporary.open("xb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), memoryview(part).cast("B"))
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
                written = True
            except FileExistsError:
                written = False  # fsync all the same: who linked it may have died just then
            _fsync_folder(path.parent)
            return written
        except OSError as error:
            raise self._explain(error, path, sum(memoryview(p).nbytes for p in parts)) from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _explain(self, error: OSError, path: Path, needed_bytes: int) -> Unavailable | Invalid:
        key = path.relative_to(self.folder).as_posix()
        if error.errno in _NO_SPACE:
            free_bytes = shutil.disk_usage(_nearest_folder(path)).free
            return NoSpace(
                f"no space to write {path}: {needed_bytes} bytes needed, {free_bytes} bytes free",
                hint=f"free space below {self.folder}, or check the quota; nothing was committed",
                key=key,
            )
        if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOTSUP}:
            return Invalid(
                f"cannot write {path}: {error.strerror}",
                hint="the folder must be writable, on a file system with hard links",
                key=key,
            )
        return Unavailable(f"writing {path}: {error}", key=key)


def _nearest_folder(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.is_dir())


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _make_folder(folder: Path) -> None:
    """Create missing folders, and make each of them durable in its parent."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        _fsync_folder(new.parent)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
