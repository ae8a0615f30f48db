"""What the local stack consists of: command, environment and health check of each of its processes."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import tenacity

from infra.processes import Record
from infra.settings import LOOPBACK, Settings, StackPorts
from training.errors import Unavailable

REQUEST_TIMEOUT_SECONDS = 5.0
BUSY_SECONDS = 10.0
WORKER_NAME = "local"
POOLS = ("cpu", "gpu")


@dataclass(frozen=True)
class Component:
    """One process of the stack.

    Attributes:
        check: None when the process does its work, else why it does not (yet).
        children_finish: what the process started may go on when the process itself has died.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: Path
    check: Callable[[Record], str | None]
    port: int | None = None
    url: str | None = None
    children_finish: bool = False


def components(settings: Settings) -> list[Component]:
    """The processes that belong on this machine: none for a server that is set to be elsewhere.

    Raises:
        Unavailable: no ports were chosen yet.
    """
    ports = settings.ports()
    if ports is None:
        raise Unavailable(f"no local stack in {settings.state_dir}", hint="start one with `retoma up`")
    found = []
    if settings.prefect_api_url is None:
        found.append(_prefect_server(settings, ports))
    if settings.mlflow_url is None:
        found.append(_mlflow_server(settings, ports))
    if settings.prefect_api_url is None:
        found += [
            _worker(settings, ports, "cpu", settings.cpu_limit),
            _worker(settings, ports, "gpu", settings.gpu_limit),
        ]
    return found


def _prefect_server(settings: Settings, ports: StackPorts) -> Component:
    def check(_: Record) -> str | None:
        return None if ask_once(ports.prefect, "GET", "/api/ready") else "not ready"

    return Component(
        name="prefect",
        command=_python("prefect", "server", "start", "--host", LOOPBACK, "--port", str(ports.prefect)),
        environment={
            **settings.environment(),
            "PREFECT_SERVER_API_HOST": LOOPBACK,
            "PREFECT_SERVER_API_PORT": str(ports.prefect),
            # silence is found within a second of its limit instead of five
            "PREFECT_SERVER_EVENTS_PROACTIVE_GRANULARITY": "PT1S",
            # leases kept in memory are lost in a restart, and healthy runs are crashed minutes later
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
            "PREFECT_SERVER_SERVICES_CANCELLATION_CLEANUP_CANCELLING_TIMEOUT_SECONDS": "60",
            "PYTHONUNBUFFERED": "1",
        },
        cwd=_folder(settings, "prefect"),
        check=check,
        port=ports.prefect,
        url=f"http://{LOOPBACK}:{ports.prefect}",
    )


def _mlflow_server(settings: Settings, ports: StackPorts) -> Component:
    def check(_: Record) -> str | None:
        ask_once(ports.mlflow, "GET", "/health")
        return None

    folder = _folder(settings, "mlflow")
    database = f"sqlite:///{folder / 'mlflow.db'}"
    options = ["--host", LOOPBACK, "--port", str(ports.mlflow), "--workers", "1"]
    # clients send artifacts through the server: they need no folder in common with it
    options += ["--backend-store-uri", database, "--artifacts-destination", str(folder / "artifacts")]
    return Component(
        name="mlflow",
        command=_python("mlflow", "server", *options),
        environment={
            **settings.environment(),
            # 13 processes for features that a tracking server does not need
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "PYTHONUNBUFFERED": "1",
        },
        cwd=folder,
        check=check,
        port=ports.mlflow,
        url=f"http://{LOOPBACK}:{ports.mlflow}",
    )


def _worker(settings: Settings, ports: StackPorts, pool: str, limit: int) -> Component:
    def check(record: Record) -> str | None:
        path = f"/api/work_pools/{pool}/workers/filter"
        for worker in ask_once(ports.prefect, "POST", path, {}):
            if worker["name"] == WORKER_NAME and worker["status"] == "ONLINE":
                heard = datetime.fromisoformat(worker["last_heartbeat_time"])
                if heard.timestamp() >= record.started_seconds:
                    return None
        return "has not reported to the Prefect server yet"

    own = settings.environment()
    paths = [str(settings.home), *filter(None, [own.get("PYTHONPATH")])]
    arguments = ["--pool", pool, "--type", "process", "--limit", str(limit), "--name", WORKER_NAME]
    return Component(
        name=f"worker-{pool}",
        command=_python("infra.worker", *arguments),
        environment={
            **own,
            # `python` in a deployment's job variables is this interpreter
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), own.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join(paths),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            # after 25 s without the server a worker can't cancel what is in flight any more. `true` would kill
            # healthy trainings for it; ours look at their own state, and leave when they are cancelled
            "PREFECT_RUNNER_CRASH_ON_CANCELLATION_FAILURE": "false",
            "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(settings.heartbeat_seconds),
            "PYTHONUNBUFFERED": "1",
        },
        cwd=settings.home,
        check=check,
        children_finish=True,
    )


class _Busy(Unavailable):
    """The server asks to be asked again. Prefect does so, and has done nothing, while others lock its SQLite."""


@tenacity.retry(
    retry=tenacity.retry_if_exception_type(_Busy),
    wait=tenacity.wait_random_exponential(multiplier=0.1, max=1.0),
    stop=tenacity.stop_after_delay(BUSY_SECONDS),
    reraise=True,
)
def ask(port: int, method: str, path: str, body: Any = None) -> Any:
    """One request to a server on this machine, and again while it is busy. See `ask_once`."""
    return ask_once(port, method, path, body)


def ask_once(port: int, method: str, path: str, body: Any = None) -> Any:
    """One request to a server on this machine, past any proxy. Returns the decoded JSON, or the text.

    Raises:
        Unavailable: no connection, no answer in time, or an error status.
    """
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=REQUEST_TIMEOUT_SECONDS)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"no answer from port {port}: {error}") from error
    finally:
        connection.close()
    if answer.status >= 400:
        kind = _Busy if answer.status == HTTPStatus.SERVICE_UNAVAILABLE else Unavailable
        raise kind(f"{method} {path} on port {port}: status {answer.status}")
    try:
        return json.loads(text)
    except ValueError:
        return text


def choose_ports(old: StackPorts | None, keep: Callable[[int], bool]) -> StackPorts:
    """Two loopback ports: the old ones where `keep(port)`, else free ones."""
    with socket.socket() as first, socket.socket() as second:
        fresh = []
        for free in (first, second):  # both are held until both are known, so they differ
            free.bind((LOOPBACK, 0))
            fresh.append(int(free.getsockname()[1]))
    if old is None:
        return StackPorts(prefect=fresh[0], mlflow=fresh[1])
    return StackPorts(
        prefect=old.prefect if keep(old.prefect) else fresh[0],
        mlflow=old.mlflow if keep(old.mlflow) else fresh[1],
    )


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    # `-m` and not a script: the scripts in bin/ are looked up on PATH, and break when the folder moves
    return (sys.executable, "-m", module, *arguments)


def _folder(settings: Settings, name: str) -> Path:
    folder = settings.state_dir / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
