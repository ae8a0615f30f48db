"""Puts the deployments of `infra/prefect.yaml` and our automations onto the Prefect server, pools first."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from filelock import FileLock, Timeout
from pydantic import ValidationError

from infra.automations import PREFIX, wanted
from infra.servers import POOLS, ask
from infra.settings import Settings
from training.config import Frozen
from training.errors import Invalid, Unavailable

PREFECT_FILE = Path("infra/prefect.yaml")
DEPLOY_TIMEOUT_SECONDS = 120


class Deployed(Frozen):
    """What was put there last, kept in the state folder."""

    digest: str
    ids: tuple[str, ...]


def deploy(settings: Settings, *, force: bool = False) -> bool:
    """Create or update all deployments and automations. Returns False when nothing had to be done.

    A schedule that was switched on in the Prefect site stays on until the file or a flow's source changes,
    or `force` is given. An automation that was switched off there stays off.

    Raises:
        Unavailable: the server does not answer.
        Invalid: the file or a flow is wrong; the message has Prefect's own.
    """
    settings.make_state_dir()
    lock = FileLock(settings.state_dir / "deploy.lock")  # two at once would create each automation twice
    try:
        with lock.acquire(timeout=2 * DEPLOY_TIMEOUT_SECONDS):
            flows = _deploy_flows(settings, force=force)
            return _deploy_automations(settings, force=force) or flows
    except Timeout as error:
        raise Unavailable(
            f"another `retoma deploy` holds {lock.lock_file}", hint="wait for it, or end it, then try again"
        ) from error


def _deploy_flows(settings: Settings, *, force: bool) -> bool:
    digest, record = _digest(settings), settings.state_dir / "deployed.json"
    if not force and _is_current(settings, record, digest, _deployment_ids):
        return False
    ensure_pools(settings)
    arguments = ("--no-prompt", "deploy", "--all", "--prefect-file", str(PREFECT_FILE))
    done = _prefect(settings, arguments)
    if done.returncode:
        raise Invalid(
            f"`prefect {' '.join(arguments)}` failed:\n{_last_lines(done)}",
            hint="correct the flow or infra/prefect.yaml, then `retoma deploy`",
        )
    _remember(settings, record, digest, _deployment_ids)
    return True


def _deploy_automations(settings: Settings, *, force: bool) -> bool:
    text = json.dumps(wanted(settings))
    digest = hashlib.sha256(f"{settings.prefect_url()} {text}".encode()).hexdigest()
    record = settings.state_dir / "automations.json"
    if not force and _is_current(settings, record, digest, _automation_ids):
        return False
    done = _python(settings, ("-m", "infra.automations"), text)
    if done.returncode:
        raise Unavailable(
            f"the automations could not be written:\n{_last_lines(done)}", hint="try `retoma deploy` again"
        )
    _remember(settings, record, digest, _automation_ids)
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


def _is_current(settings: Settings, record: Path, digest: str, ids: Callable[[Settings], tuple[str, ...]]) -> bool:
    if settings.prefect_api_url is not None:
        return False  # another machine may have deployed something else there
    try:
        last = Deployed.model_validate_json(record.read_text())
    except (FileNotFoundError, ValidationError):
        return False
    return last == Deployed(digest=digest, ids=ids(settings))


def _remember(settings: Settings, record: Path, digest: str, ids: Callable[[Settings], tuple[str, ...]]) -> None:
    if settings.prefect_api_url is None:
        record.write_text(Deployed(digest=digest, ids=ids(settings)).model_dump_json())


def _deployment_ids(settings: Settings) -> tuple[str, ...]:
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


def _automation_ids(settings: Settings) -> tuple[str, ...]:
    """Ids and last changes of our automations on the server: one that was changed there by hand is put right."""
    there = ask(_port(settings), "POST", "/api/automations/filter", {})
    return tuple(sorted(f"{found['id']} {found['updated']}" for found in there if found["name"].startswith(PREFIX)))


def _prefect(settings: Settings, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return _python(settings, ("-m", "prefect", *arguments))


def _python(settings: Settings, arguments: Sequence[str], text: str = "") -> subprocess.CompletedProcess[str]:
    """A process of its own: Prefect reads its environment when it is imported, and takes a second for that."""
    environment = settings.environment()
    # would be written into the deployments, and holds for this machine only
    del environment["RETOMA_HOME"]
    try:
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=settings.home,
            input=text,
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


def _last_lines(done: subprocess.CompletedProcess[str], count: int = 20) -> str:
    return "\n".join((done.stdout + done.stderr).strip().splitlines()[-count:])
