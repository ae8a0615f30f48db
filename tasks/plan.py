"""What a run will do: its configuration, resolved once, its data, its ranges, and proof that it can start.

A run is named once and keeps its numbers: an existing run is only gone on with under an equal identity.
"""

from __future__ import annotations

import re
import secrets
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from infra.settings import Settings
from tasks.ask import ask
from tasks.data import DataVersion, ensure_data
from tasks.order import RangeOrder
from training.checkpoint.history import Attempt, Lineage, read_lineage
from training.checkpoint.store import Store, open_store
from training.config import NAME_PATTERN, Frozen, JobConfig, differences, digest_of, load_config, parse_config
from training.errors import Invalid

CHECK_COMMAND = (sys.executable, "-m", "training.process", "--check")


class Preflight(Frozen):
    """The job as a training process has built it."""

    steps_per_epoch: int
    total_steps: int
    samples: int
    params: dict[str, Any]
    parameters: int


class Plan(Frozen):
    """A run that can start. `config` has the job's own defaults filled in."""

    run: str
    config: JobConfig
    requested: str
    store_url: str
    data_version: DataVersion | None
    preflight: Preflight

    def orders(self) -> list[RangeOrder]:
        """One order for each range, in sequence."""
        return [
            RangeOrder(
                run=self.run,
                start=start,
                stop=stop,
                attempt=1,
                config=self.config,
                requested=self.requested,
                store_url=self.store_url,
                data_version=self.data_version,
            )
            for start, stop in self.config.ranges()
        ]

    def text(self) -> str:
        """The resolved configuration and what follows from it, as YAML, for people."""
        facts = {
            "run": self.run,
            "store": self.store_url,
            "data": self.data_version.model_dump() if self.data_version else None,
            "parameters": self.preflight.parameters,
            "samples": self.preflight.samples,
            "steps": f"{self.preflight.total_steps} ({self.preflight.steps_per_epoch} an epoch)",
            "ranges": [f"{start}-{stop}" for start, stop in self.config.ranges()],
            "config": self.config.model_dump(mode="json"),
        }
        return yaml.safe_dump(facts, sort_keys=False)


def make_plan(settings: Settings, job: str, overrides: list[str], run: str) -> Plan:
    """Resolve the configuration, make and verify the data, build the job once in a process of its own.

    Raises:
        Invalid: the configuration, the data or the job is wrong, or the run exists with another identity.
        Unavailable: the store, or a data remote, does not answer.
    """
    check_run_name(run)
    asked = load_config(settings.home / job, overrides)
    store_url = settings.run_url(run)
    version = ensure_data(settings.home, asked.data) if asked.data else None
    folder = settings.home / version.path if version else None
    preflight = check_job(settings.home, asked, folder)
    config = asked.model_copy(update={"params": preflight.params})
    refuse_other_identity(open_store(store_url), config, run, version.digest if version else None)
    return Plan(
        run=run,
        config=config,
        requested=requested_digest(asked),
        store_url=store_url,
        data_version=version,
        preflight=preflight,
    )


def check_job(root: Path, config: JobConfig, data_folder: Path | None) -> Preflight:
    """Build the job as a training process would. What is wrong with it shows here, before anything is scheduled."""
    answer = ask(
        CHECK_COMMAND,
        {"config": config.model_dump(mode="json"), "data_folder": str(data_folder) if data_folder else None},
        timeout_seconds=config.supervisor.start_seconds,
        cwd=root,
    )
    return Preflight.model_validate(answer)


def requested_digest(config: JobConfig) -> str:
    """What tells that a user asks for the same training again. The job's defaults are not filled in yet."""
    return digest_of(config.identity())


def new_run_name(config: JobConfig, now: datetime, suffix: str | None = None) -> str:
    """`<short name>-<date>-<time>-<4 hex digits>`."""
    return f"{config.short_name[:40]}-{now:%Y%m%d-%H%M%S}-{suffix or secrets.token_hex(2)}"


def check_run_name(run: str) -> str:
    """The name, if it can be a folder, an artifact key and a part of a link everywhere.

    Raises:
        Invalid: it cannot.
    """
    if not re.fullmatch(NAME_PATTERN, run):
        raise Invalid(f"run name {run!r} does not match {NAME_PATTERN}", hint="lower case, digits and - only")
    return run


def claimed_config(attempts: list[Attempt]) -> tuple[JobConfig, str] | None:
    """Configuration and requested digest, as the newest readable claim holds them."""
    for attempt in reversed(attempts):
        who = attempt.claim.who if attempt.claim else {}
        try:
            return JobConfig.model_validate(who["config"]), str(who["requested"])
        except (KeyError, ValidationError):
            continue
    return None


def run_config(lineage: Lineage) -> JobConfig | None:
    """The configuration of a run, from its store alone."""
    claimed = claimed_config(lineage.attempts)
    if claimed is not None:
        return claimed[0]
    config = lineage.head.manifest.job.get("config") if lineage.head else None
    try:
        return parse_config(config) if config else None
    except Invalid:
        return None


def refuse_other_identity(store: Store, config: JobConfig, run: str, data_digest: str | None) -> None:
    """Raise `Invalid`, naming the keys, if the run was started as another training or on other data."""
    lineage = read_lineage(store)
    stored = lineage.head.manifest.job.get("identity") if lineage.head else None
    if stored is None:
        earlier = run_config(lineage)
        stored = earlier.identity() if earlier else None
    if stored is None:
        return
    before = lineage.head.manifest.data.get("digest") if lineage.head else data_digest
    ours = {**config.identity(), "data digest": data_digest}
    if found := differences({**stored, "data digest": before}, ours):
        raise Invalid(
            f"run {run} was started as another training: {'; '.join(found)}",
            hint="undo the change, or start a new run (retoma train --new)",
            run=run,
        )
