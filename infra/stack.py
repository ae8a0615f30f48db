"""The local stack: a Prefect server, an MLflow server, and one worker for each pool, as background processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal

import psutil
from filelock import FileLock, Timeout
from pydantic import computed_field

from infra.deploy import ensure_pools
from infra.processes import ProcessTable, Record, is_frozen, stop
from infra.servers import Component, choose_ports, components, is_free
from infra.settings import Settings
from training.config import Frozen
from training.errors import Invalid, Unavailable

POLL_SECONDS = 0.1
# A living process that does not answer may only be slow: the machine is busy training.
PATIENCE_SECONDS = 10.0

Report = Callable[[str], None]


class ProcessStatus(Frozen):
    """One process of the stack: `ready`, `stopped`, or alive but `not ready` (`detail` says why)."""

    name: str
    state: Literal["ready", "not ready", "stopped"]
    pid: int | None
    url: str | None
    log: str
    detail: str | None = None


class StackStatus(Frozen):
    """The whole stack."""

    state_dir: str
    processes: tuple[ProcessStatus, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def healthy(self) -> bool:
        """Whether every process does its work."""
        return bool(self.processes) and all(process.state == "ready" for process in self.processes)


def up(settings: Settings, report: Report = lambda _: None) -> StackStatus:
    """Start what is not running and wait until all of it is ready. Does nothing when all is well.

    Calls from several terminals end in one stack. Flow runs of a worker that died go on.

    Raises:
        Invalid: both servers are set to be elsewhere, so there is nothing to start.
        Unavailable: a process died or was not ready in time; the message has the end of its log.
    """
    if settings.prefect_api_url and settings.mlflow_url:
        raise Invalid(
            "RETOMA_PREFECT_API_URL and RETOMA_MLFLOW_URL name servers elsewhere: nothing to start here",
            hint="unset them to use a local stack",
        )
    if (now := status(settings)).healthy:
        return now
    with _locked(settings, report):
        table = ProcessTable(settings.state_dir)
        _settle_ports(settings, table)
        parts = components(settings)
        prefect = [part for part in parts if part.name == "prefect"]
        servers = [part for part in parts if part.port]
        _start(servers, table, settings, report)
        _wait_ready(prefect, table, settings.start_timeout_seconds)
        if prefect:
            # two workers that create their pools at once lock each other out of a fresh SQLite database
            ensure_pools(settings)
        _start([part for part in parts if not part.port], table, settings, report)
        _wait_ready(parts, table, settings.start_timeout_seconds)
        return status(settings)


def down(settings: Settings) -> int:
    """Stop every process of the stack and what they started. Returns how many were stopped.

    Flow processes are stopped first, so that their workers still report the runs as crashed; otherwise the
    server would show them as running for ever.

    Raises:
        Unavailable: a process survived SIGKILL.
    """
    if not settings.state_dir.is_dir():
        return 0
    table = ProcessTable(settings.state_dir)
    with _locked(settings, lambda _: None):
        seen: set[psutil.Process] = set()
        for chosen in (_flow_processes, _workers, ProcessTable.members):
            # whatever slipped in between is found by the next search
            targets = chosen(table)
            seen.update(targets)
            stop(targets, settings.stop_grace_seconds)
        survivors = table.members()
        survivors = stop(survivors, 0) if survivors else []
        if survivors:
            raise Unavailable(
                f"still alive after SIGKILL: {[process.pid for process in survivors]}",
                hint="they wait for the kernel (a hung disk or GPU); look at them with ps",
            )
        for name in ("prefect", "mlflow", "worker-cpu", "worker-gpu"):
            table.forget(name)
    return len(seen)


def status(settings: Settings) -> StackStatus:
    """Look at every process, changing nothing."""
    table = ProcessTable(settings.state_dir)
    parts = components(settings) if settings.ports() else []
    with ThreadPoolExecutor(max_workers=max(1, len(parts))) as pool:
        looks = tuple(pool.map(lambda part: _look(part, table), parts))
    return StackStatus(state_dir=str(settings.state_dir), processes=looks)


def _look(part: Component, table: ProcessTable) -> ProcessStatus:
    found = table.find(part.name)
    reason = _reason(part, found)
    return ProcessStatus(
        name=part.name,
        state="ready" if reason is None else "not ready" if found else "stopped",
        pid=found[0].pid if found else None,
        url=part.url,
        log=str(table.log(part.name)),
        detail=reason,
    )


def _reason(part: Component, found: tuple[Record, psutil.Process] | None) -> str | None:
    """Why a process does not do its work, None when it does."""
    if found is None:
        return "not running"
    record, process = found
    if is_frozen(process):
        return "frozen by a signal"
    try:
        return part.check(record)
    except Unavailable as error:
        return error.message


def _start(parts: list[Component], table: ProcessTable, settings: Settings, report: Report) -> None:
    for part in parts:
        if not _is_sound(part, table, settings):
            _restart(part, table, settings)
            report(f"starting {part.name}; log: {table.log(part.name)}")


def _is_sound(part: Component, table: ProcessTable, settings: Settings) -> bool:
    """Whether the process can stay: it is ready, or becomes so in a time that is usual for it."""
    found = table.find(part.name)
    if found is None or is_frozen(found[1]):
        return False
    age_seconds = time.time() - found[0].started_seconds
    patience_seconds = max(PATIENCE_SECONDS, settings.start_timeout_seconds - age_seconds)
    try:
        _wait_ready([part], table, patience_seconds)
    except Unavailable:
        return False
    return True


def _restart(part: Component, table: ProcessTable, settings: Settings) -> None:
    leftovers = table.members(part.name)
    if part.children_finish:
        leftovers = [process for process in leftovers if _runs(process, part)]
    stop(leftovers, settings.stop_grace_seconds)
    table.start(part.name, part.command, part.environment, part.cwd)


def _runs(process: psutil.Process, part: Component) -> bool:
    try:
        return process.cmdline() == list(part.command)
    except psutil.Error:
        return False


def _wait_ready(parts: list[Component], table: ProcessTable, timeout_seconds: float) -> None:
    deadline = time.monotonic() + timeout_seconds
    waiting = list(parts)
    while waiting:
        for part in list(waiting):
            found = table.find(part.name)
            reason = _reason(part, found)
            if reason is None:
                waiting.remove(part)
            elif found is None or time.monotonic() > deadline:
                problem = "died" if found is None else f"was not ready after {timeout_seconds:.0f} s ({reason})"
                raise Unavailable(
                    f"{part.name} {problem}; the end of {table.log(part.name)}:\n{table.tail(part.name)}",
                    hint="`retoma up` tries again; `retoma down` stops what is left",
                )
        time.sleep(POLL_SECONDS if waiting else 0)


def _settle_ports(settings: Settings, table: ProcessTable) -> None:
    """Choose ports the first time, and again for a server whose port was taken while it was away."""
    old = settings.ports()
    ours = {part.port for part in (components(settings) if old else ()) if table.members(part.name)}
    ports = choose_ports(old, keep=lambda port: port in ours or is_free(port))
    if ports == old:
        return
    # workers and what they run still have the old address in their environment
    stop([*_flow_processes(table), *_workers(table)], settings.stop_grace_seconds)
    draft = settings.stack_file.with_suffix(".draft")
    draft.write_text(ports.model_dump_json())
    draft.replace(settings.stack_file)


def _workers(table: ProcessTable) -> list[psutil.Process]:
    return [found[1] for name in ("worker-cpu", "worker-gpu") if (found := table.find(name))]


def _flow_processes(table: ProcessTable) -> list[psutil.Process]:
    """What the workers started themselves; the rest of the tree ends with these."""
    parents = {worker.pid for worker in _workers(table)}
    return [process for process in table.members() if _parent(process) in parents]


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None


@contextmanager
def _locked(settings: Settings, report: Report) -> Iterator[None]:
    settings.state_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(settings.state_dir / "stack.lock")
    patience_seconds = 2 * settings.start_timeout_seconds + settings.stop_grace_seconds
    try:
        try:
            lock.acquire(timeout=0)
        except Timeout:
            report(f"another retoma is starting or stopping this stack; process {os.getpid()} waits for it")
            lock.acquire(timeout=patience_seconds)
    except Timeout as error:
        raise Unavailable(
            f"{settings.state_dir} is locked by another `retoma up` or `retoma down`",
            hint="wait for it, or end it, then try again",
        ) from error
    try:
        yield
    finally:
        lock.release()
