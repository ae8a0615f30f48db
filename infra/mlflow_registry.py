"""MLflow as this project sees it: runs, attempts and checkpoints, filled from a run's store.

The store is the truth. Whatever is written here was committed there first, is found again by tag and never made
twice, and can be repeated by anyone at any time (`tasks.publish`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from infra.mlflow_checkpoints import Checkpoints
from infra.mlflow_connection import Connection, Missing
from infra.mlflow_models import Models
from infra.mlflow_runs import RunRecord, Runs, RunStatus
from infra.mlflow_text import CONFIG, NOTE, STORE, flatten, store_address
from training.config import Frozen, JobConfig, digest_of

DEFAULT_EXPERIMENT = "retoma"
DEFAULT_TIMEOUT_SECONDS = 5.0
MACHINE_LEARNING = "?workflowType=machine_learning"  # a fresh browser opens in GenAI mode, on an empty page


class RegistryPointer(Frozen):
    """A registered checkpoint: where it is and which bytes its manifest has."""

    store_url: str
    token: int
    sequence: int
    digest: str
    step: int


class MlflowRegistry:
    """The registry of runs and checkpoints on an MLflow server.

    Building it makes no traffic. Every method raises `Unavailable` when the server does not answer: at once when
    it refuses, after twice `timeout_seconds` when it is mute; and `Invalid` when it refuses the request.

    Attributes:
        runs: parent runs and attempts.
        checkpoints: one LoggedModel each.
        models: registered model versions and their aliases.
    """

    def __init__(
        self,
        url: str,
        experiment: str = DEFAULT_EXPERIMENT,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> None:
        self.connection = Connection(url, timeout_seconds)
        self.runs = Runs(self.connection, experiment)
        self.checkpoints = Checkpoints(self.connection, self.runs)
        self.models = Models(self.connection)

    def open_run(self, run: str, config: JobConfig, data_version: Mapping[str, Any], store_url: str) -> str:
        """Create the parent run of a training, or take up the one that exists. Repeating it is cheap.

        Parameters are logged once; where a resumed run has another value of something that does not change the
        numbers, `config.yaml` shows the newest.

        Returns:
            MLflow's run id.
        """
        job = {"name": config.short_name, "identity": {"job": config.job}}
        record = self.ensure_run(run, store_url, job, data_version)
        digest = digest_of(config.model_dump(mode="json"))
        if record.tags.get(CONFIG) != digest:
            text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
            self.runs.put_text(record, "config.yaml", text)
            self.runs.update(record, {CONFIG: digest}, flatten(config))
        self.runs.set_status(record, "RUNNING")
        return record.id

    def ensure_run(
        self, run: str, store_url: str, job: Mapping[str, Any], data_version: Mapping[str, Any]
    ) -> RunRecord:
        """The parent run, made from what a manifest tells when `open_run` never reached MLflow."""
        record = self.runs.parent(run) or self.runs.create_parent(run, {NOTE: f"Training **{run}**"})
        tags = {STORE: store_address(store_url), "retoma.job": str(job.get("name", ""))}
        if source := job.get("identity", {}).get("job"):
            tags["mlflow.source.name"] = str(source)
        if data_version.get("revision"):
            tags["mlflow.source.git.commit"] = str(data_version["revision"])
        return self.runs.update(self.runs.add_dataset(record, data_version), tags)

    def close_run(self, run: str, status: RunStatus, reason: str = "") -> None:
        """Set the parent run's final status. Raises `Invalid` if MLflow has no such run."""
        record = self.runs.parent(run)
        if record is None:
            raise Missing(f"MLflow has no run {run!r}", hint="publish it from its store first", run=run)
        self.runs.set_status(record, status, reason)

    def newest(self, run: str) -> RegistryPointer | None:
        """The newest registered checkpoint of the run's history; None if none was registered yet."""
        found = self.checkpoints.newest(run)
        if found is None:
            return None
        return RegistryPointer(
            store_url=found.store_url,
            token=found.token,
            sequence=found.sequence,
            digest=found.digest,
            step=found.step,
        )

    def run_url(self, run: str) -> str | None:
        """Address of the parent run's page; None if there is none."""
        record = self.runs.parent(run)
        if record is None:
            return None
        page = f"/#/experiments/{self.runs.experiment_id()}/runs/{record.id}"
        return self.connection.url + page + MACHINE_LEARNING
