"""Data sets: made or fetched by DVC, verified by us, and named by a version that a run records.

DVC does not notice every damage: it trusts size and modification time, and what a remote or its own cache hands
out. So the digest is recomputed from the bytes here, in DVC's own form, and compared with what git has on record
in `dvc.lock` (a stage's output) or in `<path>.dvc` (made by `dvc add`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tenacity

from infra.dvc import Record, clean_environment, find_record, has_git, is_busy, repair_command, run_dvc
from training.config import Frozen
from training.errors import Invalid, Unavailable

IGNORED_BY_DVC = {".git", ".hg", ".dvc"}
NAMED_FILES = 3
LOCK_WAIT_SECONDS = 600.0
logger = logging.getLogger(__name__)


class DataVersion(Frozen):
    """Which bytes a run trains on.

    Attributes:
        path: file or folder, relative to the project's root, with `/`.
        digest: `md5:<32 hex>.dir` for a folder: md5 of `json.dumps(entries, sort_keys=True)`, where entries is
            the list of `{"md5": ..., "relpath": ...}` of all files, sorted by relpath. `md5:<32 hex>` for a file.
        revision: git commit of the checkout that recorded it; None without git.
        dirty: DVC's files for this path, or what the stage depends on, differ from that commit.
        bytes, files: size and number of files.
    """

    path: str
    digest: str
    revision: str | None
    dirty: bool
    bytes: int
    files: int


@dataclass(frozen=True)
class Content:
    """What really lies on the disk. `md5s` maps relpath to hex digest; a single file's relpath is empty."""

    md5s: dict[str, str]
    bytes: int

    @property
    def digest(self) -> str:
        """DVC's digest of it; see `DataVersion.digest`."""
        if set(self.md5s) == {""}:
            return "md5:" + self.md5s[""]
        entries = [{"md5": md5, "relpath": name} for name, md5 in sorted(self.md5s.items())]
        return f"md5:{_md5(json.dumps(entries, sort_keys=True).encode())}.dir"


def ensure_data(root: Path, path: str) -> DataVersion:
    """Make the data set if it is absent, verify every byte of it, and name its version.

    Only something absent is made: what is there but wrong is refused, since it may be someone's work. Safe to
    call from several processes at once.

    Raises:
        Invalid: not tracked by DVC; its stage fails; or a file is changed, missing or extra. The hint is the
            command that repairs it.
        Unavailable: the remote did not answer, or another process kept DVC's lock.
    """
    root = root.resolve()
    with _alone(root):
        record = find_record(root, path)
        if not (root / record.path).exists():
            _make(root, record)
            record = find_record(root, path)  # a first run, or one with another Python, has written the lock
        if record.digest is None:
            raise Invalid(
                f"data set {record.path} exists, but dvc.lock has no digest for it",
                hint=repair_command(root, record),
            )
        content = _read_content(root, record.path, record)
        _compare(root, record.path, record.digest, content, record)
        revision, dirty = _git_state(root, record.sources)
        return DataVersion(
            path=record.path,
            digest=record.digest,
            revision=revision,
            dirty=dirty,
            bytes=content.bytes,
            files=len(content.md5s),
        )


def verify_data(root: Path, version: DataVersion) -> Path:
    """Recompute the digest on the node that trains. Returns the verified file or folder.

    Needs neither git nor DVC's files here, only the data.

    Raises:
        Invalid: it is absent, or not the bytes of `version`.
    """
    root = root.resolve()
    try:
        record = find_record(root, version.path)
    except Invalid:
        record = None
    content = _read_content(root, version.path, record)
    if record and record.digest == content.digest != version.digest:
        raise Invalid(
            f"data set {version.path}: the run was started with {version.digest} of revision {version.revision}, "
            f"this checkout has {content.digest}",
            hint="bring both checkouts, and Python's version, to the same state; or start a new run",
        )
    _compare(root, version.path, version.digest, content, record)
    return root / version.path


def _read_content(root: Path, path: str, record: Record | None) -> Content:
    """Hash every file below `path`. Cost: about 0.6 GB/s for each core, hashlib releases the GIL."""
    top = root / path
    if not top.exists():
        raise Invalid(f"data set {path} is missing in {root}", hint=repair_command(root, record))
    names = [""] if top.is_file() else sorted(_walk(top))
    for name in names:
        if not (top / name).is_file():  # a dangling or folder link, a pipe: DVC does not store these
            raise Invalid(f"data set {path}: {name} is no regular file", hint=repair_command(root, record))
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        md5s = list(pool.map(lambda name: _file_md5(top / name), names))
    return Content(
        md5s=dict(zip(names, md5s, strict=True)), bytes=sum((top / name).stat().st_size for name in names)
    )


def _walk(top: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(top):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = [name for name in folders if name not in IGNORED_BY_DVC and name not in links]
        for name in [*files, *links]:
            if name not in IGNORED_BY_DVC:
                yield Path(folder, name).relative_to(top).as_posix()


def _compare(root: Path, path: str, digest: str, content: Content, record: Record | None) -> None:
    """Raise Invalid, naming the files, unless the content has this digest."""
    if content.digest == digest:
        return
    expected, cache = _expected_files(root, digest)
    problems = []
    for name in sorted({*expected, *content.md5s} if expected else ()):
        want, have = expected.get(name), content.md5s.get(name)
        if want != have:
            what = "is extra" if want is None else "is missing" if have is None else "is changed"
            problems.append(f"{name or path} {what} (expected {want or 'no file'}, actual {have or 'none'})")
    if not expected:
        found = (f"{name} {md5}" for name, md5 in content.md5s.items())
        problems = ["DVC's cache has no list of its files, so which one is unknown", *found]
    if len(problems) > NAMED_FILES:
        problems[NAMED_FILES:] = [f"and {len(problems) - NAMED_FILES} more"]
    damaged = tuple(
        str(file)
        for md5 in expected.values()
        if cache and (file := cache / md5[:2] / md5[2:]).is_file() and _file_md5(file) != md5
    )
    raise Invalid(
        f"data set {path} is not as recorded: expected {digest}, actual {content.digest}; {'; '.join(problems)}",
        hint=repair_command(root, record, damaged),
    )


def _expected_files(root: Path, digest: str) -> tuple[dict[str, str], Path | None]:
    """relpath -> md5 as DVC's cache lists it (nothing if it is not there or wrong), and the cache's folder."""
    md5 = digest.removeprefix("md5:")
    is_folder, place = md5.endswith(".dir"), Path(md5[:2], md5[2:])
    cache: Path | None = root / ".dvc/cache/files/md5"
    if cache and not (cache / place).is_file():  # a cache elsewhere is a setting that only DVC can read
        done = run_dvc(root, "cache", "dir") if (root / ".dvc").is_dir() else None
        cache = Path(done.stdout.strip(), "files", "md5") if done and done.returncode == 0 else None
    if not is_folder:
        return {"": md5}, cache
    listing = cache / place if cache else None
    if listing is None or not listing.is_file() or _file_md5(listing) + ".dir" != md5:
        return {}, cache
    return {entry["relpath"]: entry["md5"] for entry in json.loads(listing.read_bytes())}, cache


def _make(root: Path, record: Record) -> None:
    verb = "repro" if record.is_stage else "pull"
    done = run_dvc(root, verb, record.target)
    if done.returncode == 0 and (root / record.path).exists():
        return
    said = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-8:])
    message = f"dvc {verb} {record.target} did not make data set {record.path}: {said}"
    if is_busy(done):
        raise Unavailable(message, hint="wait for the other dvc command, then try again")
    if record.is_stage or "No remote provided" in done.stderr:
        raise Invalid(message, hint=f"fix it until this works: {repair_command(root, record)}")
    raise Unavailable(message, hint=f"try by hand: {repair_command(root, record)}")


def _git_state(root: Path, sources: tuple[str, ...]) -> tuple[str | None, bool]:
    """The commit of the checkout, and whether `sources` differ from it. (None, False) without git."""
    if not has_git(root):
        return None, False
    revision = _git(root, "rev-parse", "--verify", "HEAD")
    status = _git(root, "--no-optional-locks", "status", "--porcelain", "--", *sources)
    if status is None:
        logger.warning("git does not answer in %s: the data's revision is not recorded", root)
        return None, False
    return (revision or "").strip() or None, bool(status.strip())


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, env=clean_environment(), capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One process at a time makes and checks data: the second must not look at a half-made folder."""
    try:
        (root / ".dvc/tmp").mkdir(exist_ok=True)
        handle = (root / ".dvc/tmp/retoma-data.lock").open("w")
    except OSError:  # no .dvc, or read-only: nothing can be made here, so nothing can be half-made
        yield
        return
    with handle:
        try:
            for attempt in tenacity.Retrying(
                retry=tenacity.retry_if_exception_type(BlockingIOError),
                wait=tenacity.wait_random(0.05, 0.25),
                stop=tenacity.stop_after_delay(LOCK_WAIT_SECONDS),
                reraise=True,
            ):
                with attempt:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Unavailable(f"another process is busy with the data of {root}") from error
        yield


def _md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def _file_md5(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
