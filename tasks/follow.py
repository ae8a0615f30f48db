"""Starting a run, or finding the one that is meant, and looking at it from outside."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import psutil

from infra.automations import COPIED, PARENTS
from infra.beat import Progress
from infra.prefect_runs import FlowRunInfo, PrefectRuns
from infra.settings import Settings
from tasks.attempts import is_range, run_tag
from tasks.milestones import Milestone, read_milestone
from tasks.plan import check_run_name, new_run_name, requested_digest
from tasks.runs import run_names, unfinished
from training.config import Frozen, JobConfig

TRAIN = "train/cpu"
TRAIN_PARAMETERS = {*COPIED["train"], "generation"}
# The automation creates the next parent in the second of the crash, on a machine that has nothing else to do.
SUCCESSOR_SECONDS = 20.0
LOOK_SECONDS = 0.5


class Started(Frozen):
    """The parent flow run to follow. `how`: new, resumed or attached."""

    run: str
    flow_run: FlowRunInfo
    how: str


class Look(Frozen):
    """What is known about a run at one moment. Progress and milestone are of this flow run, or None."""

    flow_run: FlowRunInfo
    milestone: Milestone | None
    progress: Progress | None
    waiting: bool  # a range waits for a worker of its pool


def start_or_attach(
    settings: Settings,
    runs: PrefectRuns,
    job: Path,
    overrides: list[str],
    config: JobConfig,
    *,
    run: str | None = None,
    new: bool = False,
) -> Started:
    """Attach to the flow that trains this already, else go on with an unfinished run of it, else start a new one.

    Raises:
        Invalid: the name cannot be one, or the flows are not deployed.
        Unavailable: the Prefect server or the store does not answer.
    """
    requested = requested_digest(config)
    name = check_run_name(run) if run else None
    if name is None and not new:
        alive = _alive(runs, runs.live_with_tag(job_tag(requested)))
        if alive is not None:
            return Started(run=str(alive.parameters["run"]), flow_run=alive, how="attached")
        found = unfinished(settings, requested)
        name = found.run if found else None
    if name is not None:
        alive = _alive(runs, _parents(runs, name))
        if alive is not None:
            return Started(run=name, flow_run=alive, how="attached")
    how = "resumed" if name in run_names(settings) else "new"
    name = name or new_run_name(config, datetime.now(UTC))
    flow_run = runs.start(
        TRAIN,
        {"job": _portable(settings, job), "run": name, "overrides": overrides},
        name=name,
        key=f"{name}:{secrets.token_hex(8)}",  # so that a request whose answer was lost makes no second one
        tags=["retoma", run_tag(name), job_tag(requested)],
    )
    return Started(run=name, flow_run=flow_run, how=how)


def successor(
    runs: PrefectRuns,
    started: Started,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Started | None:
    """The flow run that goes on after a crash of this one, waited for; None if there is none.

    Raises:
        Unavailable: the Prefect server does not answer.
    """
    deadline = clock() + SUCCESSOR_SECONDS
    generation = _generation(started.flow_run)
    while True:
        for found in _parents(runs, started.run):
            if (
                found.id != started.flow_run.id
                and _generation(found) == generation + 1
                and not _is_older(found, started)
            ):
                return Started(run=started.run, flow_run=found, how="resumed")
        if clock() > deadline:
            return None
        sleep(LOOK_SECONDS)


def go_on(settings: Settings, runs: PrefectRuns, crashed: Started) -> Started | None:
    """The successor of a crashed parent, started here if the server has none; None when it crashed too often.

    The server may be late with it: after a restart its automations hold back, for 15 minutes, what happens to a
    flow run within 5 minutes of the change of state before.
    """
    found = successor(runs, crashed)
    parameters = {**crashed.flow_run.parameters, "generation": _generation(crashed.flow_run) + 1}
    if found or parameters["generation"] > settings.parent_generations or set(parameters) - TRAIN_PARAMETERS:
        return found
    flow_run = runs.start(
        TRAIN,
        parameters,
        name=crashed.run,
        key=f"{crashed.run}:after:{crashed.flow_run.id}",
        tags=crashed.flow_run.tags,
    )
    return Started(run=crashed.run, flow_run=flow_run, how="resumed")


def rival(runs: PrefectRuns, run: str, flow_run_id: str) -> FlowRunInfo | None:
    """Another parent of the run that is alive, and was there before this one."""
    parents = _parents(runs, run)
    own = next((found.created for found in parents if found.id == flow_run_id), None)
    for found in parents:
        if found.id == flow_run_id or not found.live or found.state == "CANCELLING":
            continue
        if own is None or found.created is None or (found.created, found.id) < (own, flow_run_id):
            return found
    return None


def look_at(runs: PrefectRuns, started: Started) -> Look:
    """Ask the server how it stands."""
    flow_run = runs.read(started.flow_run.id)
    milestone = read_milestone(runs, started.run)
    if milestone is not None and milestone.flow_run_id != flow_run.id:
        milestone = None
    progress, waiting = None, False
    if milestone is not None and milestone.phase == "training":
        children = [run for run in runs.live_with_tag(run_tag(started.run)) if is_range(run)]
        waiting = any(child.state in ("SCHEDULED", "PENDING") for child in children)
        progress = runs.progress(started.run)
        if progress is not None and progress.flow_run_id not in {child.id for child in children}:
            progress = None
    return Look(flow_run=flow_run, milestone=milestone, progress=progress, waiting=waiting)


def job_tag(requested: str) -> str:
    """Tag of flow runs that train the same."""
    return f"job:{requested.removeprefix('sha256:')[:16]}"


def _parents(runs: PrefectRuns, run: str) -> list[FlowRunInfo]:
    """Parents of a run, newest first. By parameter: one that the automation has just made has no tag of it."""
    return [found for found in runs.newest_of(PARENTS) if found.parameters.get("run") == run]


def _generation(flow_run: FlowRunInfo) -> int:
    return int(flow_run.parameters.get("generation") or 0)


def _is_older(found: FlowRunInfo, started: Started) -> bool:
    ours = started.flow_run.created
    return ours is not None and found.created is not None and found.created < ours


def _alive(runs: PrefectRuns, candidates: list[FlowRunInfo]) -> FlowRunInfo | None:
    """The newest parent that is not over. One whose process is gone is over: the caller starts another."""
    for found in candidates:
        if is_range(found) or not found.live:
            continue
        milestone = read_milestone(runs, str(found.parameters.get("run")))
        if found.state == "RUNNING" and milestone and milestone.flow_run_id == found.id and is_gone(milestone):
            runs.supersede(found.id, f"process {milestone.pid} of {milestone.host} does not exist any more")
            continue
        if found.state != "CANCELLING":
            return found
    return None


class Reporter(Protocol):
    """Whoever said which process it is."""

    @property
    def host(self) -> str:
        """Name of its machine or container."""

    @property
    def pid(self) -> int:
        """Process number there."""

    @property
    def pid_started(self) -> float:
        """When that process was created."""


def is_gone(reporter: Reporter) -> bool:
    """Whether the process that reported ran on this machine and does not exist any more."""
    if reporter.host != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(reporter.pid).create_time() - reporter.pid_started) > 1.0
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def _portable(settings: Settings, job: Path) -> str:
    """Relative to the project's root where it lies below it: other machines have the root elsewhere."""
    absolute = job.absolute()
    return str(absolute.relative_to(settings.home) if absolute.is_relative_to(settings.home) else absolute)
