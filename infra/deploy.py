"""Puts the deployments of `infra/prefect.yaml` onto the Prefect server, pools first."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml
from pydantic import ValidationError

from infra.servers import POOLS, ask
from infra.settings import Settings
from training.config import Frozen
from training.errors import Invalid, Unavailable

PREFECT_FILE = Path("infra/prefect.yaml")
DEPLOY_TIMEOUT_SECONDS = 120


class Deployed(Frozen):
    """What was deployed last, kept in the state folder."""

    digest: str
    ids: tuple[str, ...]


def deploy(settings: Settings, *, force: bool = False) -> bool:
    """Create or update all deployments. Returns False when nothing had to be done.

    A schedule that was switched on in the Prefect site stays on until the file or a flow's source changes,
    or `force` is given.

    Raises:
        Unavailable: the server does not answer.
        Invalid: the file or a flow is wrong; the message has Prefect's own.
    """
    digest = _digest(settings)
    if not force and _is_deployed(settings, digest):
        return False
    ensure_pools(settings)
    arguments = ("--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE))
    done = _prefect(settings, arguments)
    if done.returncode:
        raise Invalid(
            f"`prefect {' '.join(arguments)}` failed:\n{_last_lines(done)}",
            hint="correct the flow or infra/prefect.yaml, then `retoma deploy`",
        )
    if settings.prefect_api_url is None:
        _record(settings).write_text(Deployed(digest=digest, ids=_ids(settings)).model_dump_json())
    return True


def ensure_pools(settings: Settings) -> None:
    """Create the work pools that do not exist yet. A pool that exists is left as it is.

    Raises:
        Unavailable: the server does not answer.
    """
    if settings.prefect_api_url is not None:
        for pool in POOLS:
            done = _prefect(settings, ("--no-prompt", "work-pool", "create", pool, "--type", "process"))
            if done.returncode and "already exists" not in done.stdout + done.stderr:
                raise Unavailable(f"could not create work pool {pool}:\n{_last_lines(done)}")
        return
    port = _port(settings)
    known = {pool["name"] for pool in ask(port, "POST", "/api/work_pools/filter", {})}
    for pool in POOLS:
        if pool not in known:  # its worker fills in the template of the pool
            ask(port, "POST", "/api/work_pools/", {"name": pool, "type": "process"})


def _digest(settings: Settings) -> str:
    """Changes with the file, the sources of the flows (their signatures are deployed) and the server."""
    file = settings.home / PREFECT_FILE
    hasher = hashlib.sha256(settings.prefect_url().encode())
    for path in (file, *sorted((settings.home / "flows").glob("*.py"))):
        try:
            hasher.update(path.read_bytes())
        except FileNotFoundError as error:
            raise Invalid(f"no {path}", hint="run it in the project's root, or set RETOMA_HOME") from error
    return hasher.hexdigest()


def _is_deployed(settings: Settings, digest: str) -> bool:
    if settings.prefect_api_url is not None:
        return False  # another machine may have deployed something else there
    try:
        last = Deployed.model_validate_json(_record(settings).read_text())
    except (FileNotFoundError, ValidationError):
        return False
    return last == Deployed(digest=digest, ids=_ids(settings))


def _ids(settings: Settings) -> tuple[str, ...]:
    """Ids of the deployments on the server that are ours by entrypoint, name and pool."""
    ours = {
        (entry["entrypoint"], entry["name"], entry["work_pool"]["name"])
        for entry in yaml.safe_load((settings.home / PREFECT_FILE).read_text())["deployments"]
    }
    there = ask(_port(settings), "POST", "/api/deployments/filter", {})
    return tuple(
        sorted(
            str(found["id"])
            for found in there
            if (found["entrypoint"], found["name"], found["work_pool_name"]) in ours
        )
    )


def _prefect(settings: Settings, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = settings.environment()
    # would be written into the deployments, and holds for this machine only
    del environment["RETOMA_HOME"]
    try:
        return subprocess.run(
            [sys.executable, "-m", "prefect", *arguments],
            env=environment,
            cwd=settings.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEPLOY_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(
            f"prefect was not done after {DEPLOY_TIMEOUT_SECONDS} s", hint="look at `retoma status`"
        ) from error


def _port(settings: Settings) -> int:
    ports = settings.ports()
    if ports is None:
        raise Unavailable(f"no local stack in {settings.state_dir}", hint="start one with `retoma up`")
    return ports.prefect


def _record(settings: Settings) -> Path:
    return settings.state_dir / "deployed.json"


def _last_lines(done: subprocess.CompletedProcess[str], count: int = 20) -> str:
    return "\n".join((done.stdout + done.stderr).strip().splitlines()[-count:])
