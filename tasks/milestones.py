"""How far a whole run is: kept at the Prefect server, where a command on any machine finds it."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from typing import Any, Literal

import psutil
import yaml

from infra.facts import from_metadata, to_metadata
from infra.prefect_runs import PrefectRuns
from tasks.evaluate import Evaluation
from tasks.plan import Plan
from tasks.runs import checkpoint_row
from training.checkpoint.history import Lineage, read_lineage
from training.checkpoint.store import open_store
from training.config import Frozen
from training.errors import Unavailable

PATIENCE_SECONDS = 20.0
TABLE_ROWS = 500
COLUMNS = (
    "checkpoint",
    "kind",
    "parent",
    "epoch",
    "step",
    "written_bytes",
    "state_bytes",
    "stall_seconds",
    "attempt",
)
logger = logging.getLogger(__name__)


class Sizes(Frozen):
    """What a run has written. Sizes of deltas are means over all of them, in bytes and per cent of the state."""

    checkpoints: int
    deltas: int
    attempts: int
    state_bytes: int
    written_bytes: int
    delta_bytes: float | None = None
    delta_percent: float | None = None


class Milestone(Frozen):
    """The newest thing that a parent flow has reached, and which process it is."""

    run: str
    phase: str
    host: str
    pid: int
    pid_started: float
    flow_run_id: str
    ranges: int | None = None
    mlflow_url: str | None = None
    seconds: float | None = None  # since this process began with the run
    metrics: dict[str, float] | None = None
    state_digest: str | None = None
    checkpoint: str | None = None
    model_version: str | None = None
    sizes: Sizes | None = None


def milestone_key(run: str) -> str:
    """Artifact key."""
    return f"run-{run}"


def read_milestone(runs: PrefectRuns, run: str) -> Milestone | None:
    """The newest one of a run."""
    return from_metadata(Milestone, runs.latest_metadata(milestone_key(run)))


def sizes_of(lineage: Lineage) -> Sizes:
    """Totals over the checkpoints that a run's history admits."""
    manifests = [committed.manifest for committed in lineage.chain]
    deltas = [m.costs for m in manifests if m.kind == "delta" and m.costs.state_bytes]
    count = len(deltas)
    return Sizes(
        checkpoints=len(manifests),
        deltas=count,
        attempts=len(lineage.attempts),
        state_bytes=manifests[-1].costs.state_bytes if manifests else 0,
        written_bytes=sum(m.costs.written_bytes for m in manifests),
        delta_bytes=sum(c.written_bytes for c in deltas) / count if count else None,
        delta_percent=100 * sum(c.written_bytes / c.state_bytes for c in deltas) / count if count else None,
    )


class Milestones:
    """Writes them. A server that is away costs a little time and no training."""

    def __init__(self, run: str, flow_run_id: str) -> None:
        self._runs = PrefectRuns(patience_seconds=PATIENCE_SECONDS)
        self._started = time.monotonic()
        self._now = Milestone(
            run=run,
            phase="starting",
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_started=psutil.Process().create_time(),
            flow_run_id=flow_run_id,
        )

    def reached(self, phase: str, **fields: Any) -> None:
        """Note a phase: preparing, training, evaluating, registering, done."""
        seconds = round(time.monotonic() - self._started, 1)
        self._now = self._now.model_copy(update={"phase": phase, "seconds": seconds, **fields})
        shown = self._now.model_dump(mode="json", exclude_none=True, exclude={"pid_started"})
        self._put(
            milestone_key(self._now.run),
            "markdown",
            f"```yaml\n{yaml.safe_dump(shown, sort_keys=False)}```",
            to_metadata(self._now),
        )

    def _put(
        self, key: str, kind: Literal["markdown", "table"], data: str, metadata: dict[str, str] | None = None
    ) -> None:
        try:
            with self._runs:  # minutes pass until the next one
                self._runs.put_artifact(key, kind, data, metadata=metadata, flow_run_id=self._now.flow_run_id)
        except Unavailable as error:
            logger.warning("phase %s could not be shown: %s", self._now.phase, error.message)

    def done(self, plan: Plan, evaluation: Evaluation, model_version: str | None) -> dict[str, Any]:
        """Note the end, with a table of all checkpoints; returns the summary."""
        lineage = read_lineage(open_store(plan.store_url))
        attempts = {attempt.token: attempt for attempt in lineage.attempts}
        rows = [checkpoint_row(committed, attempts) for committed in lineage.chain[-TABLE_ROWS:]]
        self._put(f"checkpoints-{plan.run}", "table", json.dumps([{c: row[c] for c in COLUMNS} for row in rows]))
        self.reached(
            "done",
            metrics=evaluation.metrics,
            state_digest=evaluation.state_digest,
            checkpoint=str(evaluation.checkpoint),
            model_version=model_version,
            sizes=sizes_of(lineage),
        )
        return self._now.model_dump(mode="json", exclude_none=True)
