"""DVC as seen from outside: what its files say about a path, its command line, and the command that repairs.

DVC runs as a command of this Python (0.5-1 s a call), never imported: its imports and its locks stay out of our
process.
"""

from __future__ import annotations

import difflib
import os
import posixpath
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import tenacity
import yaml

from training.errors import Invalid

BUSY = ("Unable to acquire lock", "is busy, it is being blocked by")


@dataclass(frozen=True)
class Record:
    """What DVC's files say about one path. `digest` is None for a stage that never ran."""

    path: str
    target: str
    digest: str | None
    sources: tuple[str, ...]

    @property
    def is_stage(self) -> bool:
        """A command makes it; else it was added by hand and comes from a cache or remote."""
        return not self.target.endswith(".dvc")


def find_record(root: Path, path: str) -> Record:
    """Look `path` up in `<path>.dvc` and in the dvc.yaml and dvc.lock of the folders above it.

    Raises:
        Invalid: the path leaves the root, or DVC does not track it.
    """
    pure = PurePosixPath(posixpath.normpath(path))
    if pure.is_absolute() or ".." in pure.parts or not pure.name:
        raise Invalid(f"data set {path!r} must be a relative path inside the project's root {root}")
    own = f"{pure}.dvc"
    if (root / own).is_file():
        out = (_load(root / own).get("outs") or [{}])[0]
        return Record(str(pure), own, _digest_of(out, own), (own,))
    known: list[str] = []
    for folder in pure.parents:
        for record, out in _stage_outputs(root, folder):
            if record.path == str(pure):
                return replace(record, digest=_digest_of(out, record.target) if out else None)
            known.append(record.path)
    near = difflib.get_close_matches(str(pure), known, n=1)
    add = f"{command_for_people(root)} add {shlex.quote(str(pure))}"
    raise Invalid(
        f"data set {pure} is not tracked by DVC in {root}; tracked are: {', '.join(known) or 'none'}",
        hint=add
        if (root / pure).exists()
        else f"did you mean {near[0]}?"
        if near
        else f"put it there, then: {add}",
    )


def repair_command(root: Path, record: Record | None, damaged_cache: tuple[str, ...] = ()) -> str:
    """The shell command that brings a damaged or missing data set back, to be run in the root.

    A stage is forced: without it DVC may trust a modification time, or take the output from a damaged cache.
    """
    if record is None:
        return "make the data set with DVC (dvc repro or dvc pull) in a checkout of the recorded revision"
    dvc = command_for_people(root)
    steps = [] if has_git(root) else [f"{dvc} config --local core.no_scm true"]
    if record.is_stage:
        steps.append(f"{dvc} repro --force {shlex.quote(record.target)}")
    else:
        doomed = [record.path, *damaged_cache]
        steps += [f"rm -rf {shlex.join(doomed)}", f"{dvc} pull {shlex.quote(record.target)}"]
    return " && ".join(steps)


def _stage_outputs(root: Path, folder: PurePosixPath) -> Iterator[tuple[Record, dict[str, Any] | None]]:
    """Outputs of the stages in `folder`, with the lock's entry. Its names and paths are resolved."""
    yaml_path, lock_path = str(folder / "dvc.yaml"), str(folder / "dvc.lock")
    stages = _load(root / yaml_path).get("stages") or {}
    locked = _load(root / lock_path).get("stages") or {}
    for name in [*locked, *(name for name in stages if name not in locked)]:
        definition = stages.get(name.partition("@")[0]) or {}
        entry = locked.get(name) or definition
        base = folder / str(definition.get("wdir", "."))
        sources = (yaml_path, lock_path, *_inputs(base, entry, locked=name in locked))
        for out in entry.get("outs") or ():
            place = next(iter(out)) if isinstance(out, dict) and "path" not in out else out
            found = out if isinstance(out, dict) and "path" in out else None
            record = Record(
                _join(base, found["path"] if found else str(place)), f"{yaml_path}:{name}", None, sources
            )
            yield record, found


def _inputs(base: PurePosixPath, entry: dict[str, Any], *, locked: bool) -> Iterator[str]:
    """Files that the stage reads and that lie in the project. The lock spells parameter files as keys."""
    names = [item["path"] if isinstance(item, dict) else item for item in entry.get("deps") or ()]
    names += (entry.get("params") or ()) if locked else ()
    for name in names:
        path = _join(base, str(name))
        if not path.startswith(("../", "/")):
            yield path


def _digest_of(out: dict[str, Any], target: str) -> str:
    if out.get("hash") != "md5" or not isinstance(out.get("md5"), str):
        raise Invalid(
            f"DVC has no plain md5 on record for {out.get('path')!r}: written by DVC 2, or for another hash",
            hint=f"dvc commit --force {shlex.quote(target)}",
        )
    return "md5:" + str(out["md5"])


def _load(file: Path) -> dict[str, Any]:
    """A YAML mapping; empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        values = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise Invalid(f"{file} is not YAML: {error}", hint=f"git checkout -- {file}") from error
    if not isinstance(values, dict):
        raise Invalid(f"{file} must hold a mapping", hint=f"git checkout -- {file}")
    return values


def is_busy(done: subprocess.CompletedProcess[str]) -> bool:
    """Another DVC command held a lock for all the time that this one waited."""
    return done.returncode != 0 and any(text in done.stderr for text in BUSY)


@tenacity.retry(
    retry=tenacity.retry_if_result(is_busy),
    wait=tenacity.wait_random(0.1, 1.0),
    stop=tenacity.stop_after_delay(120),
    retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
)
def run_dvc(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run DVC of this Python, quietly. Waits while someone else's dvc command holds its lock."""
    with tempfile.TemporaryDirectory(prefix="retoma-dvc-") as settings:
        environment = clean_environment() | {"DVC_NO_ANALYTICS": "1", "SHELL": "/bin/sh"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        if not has_git(root):  # an image: DVC refuses to work without git unless told so
            Path(settings, "config").write_text("[core]\n    no_scm = true\n")
            environment["DVC_SYSTEM_CONFIG_DIR"] = settings
        command = [sys.executable, "-P", "-m", "dvc", *arguments]
        return subprocess.run(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


def has_git(root: Path) -> bool:
    """The root is in a git checkout; in an image it is not."""
    return any((folder / ".git").exists() for folder in (root, *root.parents))


def clean_environment() -> dict[str, str]:
    """The environment without git's own variables: inside a hook they would point git at another repository."""
    return {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}


def command_for_people(root: Path) -> str:
    """`dvc` as a person types it in the root; no environment needs to be activated."""
    if (root / ".venv/bin/dvc").exists():
        return ".venv/bin/dvc"
    return f'PATH={shlex.quote(str(Path(sys.executable).parent))}:"$PATH" dvc'


def _join(base: PurePosixPath, path: str) -> str:
    return posixpath.normpath(base / path)
