"""Runs of MLflow: one parent run a training, one child run an attempt. Found by tag, never made twice."""

from __future__ import annotations

import contextlib
import getpass
import json
import re
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from infra.mlflow_connection import Conflict, Connection
from infra.mlflow_experiment import Experiment
from infra.mlflow_text import (
    DIGEST_CHARACTERS,
    IDENTITY,
    PARAM_CHARACTERS,
    REASON,
    RUN,
    TAG_CHARACTERS,
    TOKEN,
    WORLD_SIZE,
    attempt_name,
    attempt_tags,
    cut,
    milliseconds,
)
from training.checkpoint.history import Attempt
from training.errors import Invalid

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

_CREATED = "retoma.created_ns"  # orders runs that were made twice; start times may be equal
_DATA, _INPUT = "retoma.data", "retoma.input"  # inputs that were logged: a search does not return them
_BATCH = 100
_BATCH_METRICS = 1000
_PAGE = 1000
_NEWEST = 10
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class Point(NamedTuple):
    """One value of one metric. `timestamp` in Unix milliseconds; the same point always has the same one."""

    key: str
    value: float
    step: int
    timestamp: int


@dataclass(frozen=True)
class RunRecord:
    """What MLflow knows of a run.

    Attributes:
        id: MLflow's run id.
        status: RUNNING, FINISHED, FAILED, KILLED or SCHEDULED.
        tags: all tags.
        params: names of the logged parameters.
        steps: newest step of each metric.
        outputs: ids of the LoggedModels that it wrote.
    """

    id: str
    status: str
    tags: dict[str, str]
    params: frozenset[str]
    steps: dict[str, int]
    outputs: frozenset[str]


def check_run_name(run: str) -> str:
    """Refuse a run id that MLflow's search cannot quote."""
    if not _SAFE_NAME.fullmatch(run):
        raise Invalid(f"run id {run!r} may hold only letters, digits, dot, dash and underscore", run=run)
    return run


class Runs:
    """Parent and child runs in one experiment.

    Two processes that create the same run at once both find both, agree on the older one and delete the younger.
    """

    def __init__(self, connection: Connection, experiment: str) -> None:
        self._connection = connection
        self._experiment = Experiment(connection, experiment)

    def experiment_id(self) -> str:
        """Id of the experiment, created on first use."""
        return self._experiment.id()

    def parent(self, run: str) -> RunRecord | None:
        """The run of the whole training."""
        return self._oldest([r for r in self._search(run) if TOKEN not in r.data.tags])

    def attempts(self, run: str) -> dict[int, RunRecord]:
        """Child runs by token."""
        found: dict[int, list[Any]] = {}
        for each in self._search(run):
            token = each.data.tags.get(TOKEN, "")
            if token.isdigit():
                found.setdefault(int(token), []).append(each)
        oldest = {token: self._oldest(rows) for token, rows in found.items()}
        return {token: record for token, record in oldest.items() if record}

    def create_parent(self, run: str, tags: Mapping[str, str]) -> RunRecord:
        """Create the run of the training, or find the one that somebody else has just created."""
        own = self._create(run, time.time_ns() // 1_000_000, {**tags, RUN: check_run_name(run)})
        return self.parent(run) or own

    def create_attempt(self, run: str, parent_id: str, attempt: Attempt) -> RunRecord:
        """Create the child run of a token, or find it."""
        started = milliseconds(attempt.claim.created if attempt.claim else "") or time.time_ns() // 1_000_000
        identity = {"mlflow.parentRunId": parent_id, RUN: run, TOKEN: str(attempt.token)}
        own = self._create(attempt_name(attempt), started, {**attempt_tags(attempt), **identity})
        return self.attempts(run).get(attempt.token, own)

    def update(
        self, record: RunRecord, tags: Mapping[str, str] | None = None, params: Mapping[str, str] | None = None
    ) -> RunRecord:
        """Write tags that differ, and parameters that are not there yet: MLflow refuses to change those.

        Returns:
            The record as it is now. No traffic if nothing differs.
        """
        from mlflow.entities import Param, RunTag

        wanted = {key: cut(value, TAG_CHARACTERS) for key, value in (tags or {}).items()}
        new_tags = [RunTag(k, v) for k, v in wanted.items() if record.tags.get(k) != v]
        new_params = [
            Param(key, cut(value, PARAM_CHARACTERS))
            for key, value in (params or {}).items()
            if key not in record.params
        ]
        with self._connection.asking("describing a run") as client:
            for start in range(0, max(len(new_tags), len(new_params)), _BATCH):
                client.log_batch(
                    record.id,
                    tags=new_tags[start : start + _BATCH],
                    params=new_params[start : start + _BATCH],
                )
        names = record.params | {param.key for param in new_params}
        return replace(record, tags={**record.tags, **wanted}, params=names)

    def set_status(
        self,
        record: RunRecord,
        status: RunStatus | Literal["RUNNING"],
        reason: str = "",
        ended_milliseconds: int | None = None,
    ) -> RunRecord:
        """End a run (default: now), or set an ended one back to RUNNING. Returns the record as it is now."""
        if record.tags.get(REASON, "") != reason:
            record = self.update(record, {REASON: reason})
        if record.status == status:
            return record
        with self._connection.asking(f"setting a run to {status}") as client:
            if status == "RUNNING":
                client.update_run(record.id, status=status)
            else:
                client.set_terminated(record.id, status=status, end_time=ended_milliseconds)
        return replace(record, status=status)

    def add_dataset(self, record: RunRecord, data: Mapping[str, Any]) -> RunRecord:
        """Log the data set as input, once. Nothing happens without path and digest."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        path, digest = data.get("path"), str(data.get("digest") or "").removeprefix("md5:")
        if not path or not digest or record.tags.get(_DATA) == digest:
            return record
        source = {key: data[key] for key in ("path", "revision") if data.get(key) is not None}
        dataset = Dataset(
            name=str(path),
            digest=digest[:DIGEST_CHARACTERS],
            source_type="dvc",
            source=json.dumps(source),
            profile=json.dumps({key: data[key] for key in ("bytes", "files") if key in data}),
        )
        tags = {"retoma.git_revision": data.get("revision"), "retoma.git_dirty": data.get("dirty")}
        notes = [InputTag(key, str(value)) for key, value in tags.items() if value is not None]
        with self._connection.asking("naming the data set") as client:
            client.log_inputs(record.id, datasets=[DatasetInput(dataset, notes)])
        return self.update(record, {_DATA: digest})

    def add_output(self, record: RunRecord, model_id: str, step: int) -> None:
        """Name a checkpoint that the run wrote. MLflow refuses a repetition, which is no error here."""
        from mlflow.entities import LoggedModelOutput

        if model_id in record.outputs:
            return
        try:
            with self._connection.asking("naming a checkpoint as output") as client:
                client.log_outputs(record.id, [LoggedModelOutput(model_id=model_id, step=step)])
        except Conflict:
            return

    def add_input(self, record: RunRecord, model_id: str) -> RunRecord:
        """Name the checkpoint that the run restored, once."""
        from mlflow.entities import LoggedModelInput

        if record.tags.get(_INPUT) == model_id:
            return record
        with self._connection.asking("naming a checkpoint as input") as client:
            client.log_inputs(record.id, models=[LoggedModelInput(model_id=model_id)])
        return self.update(record, {_INPUT: model_id})

    def log_points(self, run_id: str, points: Iterable[Point]) -> None:
        """Log metrics. The very same point logged again is stored once."""
        from mlflow.entities import Metric

        metrics = [Metric(p.key, p.value, p.timestamp, p.step) for p in points]
        with self._connection.asking("logging metrics") as client:
            for start in range(0, len(metrics), _BATCH_METRICS):
                client.log_batch(run_id, metrics=metrics[start : start + _BATCH_METRICS])

    def steps_of(self, run_id: str, key: str) -> set[int]:
        """All steps at which a metric was logged."""
        with self._connection.asking("reading a metric") as client:
            return {metric.step for metric in client.get_metric_history(run_id, key)}

    def one_rank_value(self, identity: str, key: str) -> float | None:
        """Median of a metric in the newest attempt at the same job by one rank alone; None: there is none."""
        mine = f"tags.`{IDENTITY}` = '{identity}' AND tags.`{WORLD_SIZE}` = '1'"
        with self._connection.asking("looking for a run by one rank") as client:
            for run in client.search_runs(
                [self.experiment_id()],
                filter_string=mine,
                max_results=_NEWEST,
                order_by=["attributes.start_time DESC"],
            ):
                if key in run.data.metrics:
                    history = client.get_metric_history(run.info.run_id, key)
                    return statistics.median(metric.value for metric in history)
        return None

    def put_text(self, record: RunRecord, name: str, text: str) -> None:
        """Write or replace a small artifact."""
        with self._connection.asking(f"uploading {name}") as client:
            client.log_text(record.id, text, name)

    def put_file(self, record: RunRecord, folder: str, path: str) -> None:
        """Upload a file into a folder of the artifacts. One of the same name is replaced."""
        with self._connection.asking(f"uploading {path}") as client:
            client.log_artifact(record.id, path, folder)

    def _search(self, run: str) -> list[Any]:
        """All runs of a training, parent and children, oldest first."""
        found: list[Any] = []
        page: str | None = None
        with self._connection.asking(f"looking for run {run}") as client:
            while True:
                rows = client.search_runs(
                    [self.experiment_id()],
                    filter_string=f"tags.`{RUN}` = '{check_run_name(run)}'",
                    max_results=_PAGE,
                    order_by=["attributes.start_time ASC"],
                    page_token=page,
                )
                found.extend(rows)
                page = rows.token
                if not page:
                    return found

    def _create(self, name: str, started: int, tags: Mapping[str, str]) -> RunRecord:
        values = {"mlflow.user": _user(), _CREATED: str(time.time_ns()), **tags}
        with self._connection.asking("creating a run") as client:
            made = client.create_run(
                self.experiment_id(),
                start_time=started,
                tags={key: cut(value, TAG_CHARACTERS) for key, value in values.items()},
                run_name=name,
            )
        return _record(made)

    def _oldest(self, rows: list[Any]) -> RunRecord | None:
        """The first of several runs for one thing; the others, made in a race, are deleted."""
        if not rows:
            return None
        first, *others = sorted(rows, key=lambda r: (int(r.data.tags.get(_CREATED, 0)), r.info.run_id))
        for each in others:
            with contextlib.suppress(Invalid), self._connection.asking("removing a run made twice") as client:
                client.delete_run(each.info.run_id)
        return _record(first)


def _record(run: Any) -> RunRecord:
    return RunRecord(
        id=run.info.run_id,
        status=run.info.status,
        tags=dict(run.data.tags),
        params=frozenset(run.data.params),
        steps={metric.key: metric.step for metric in run.data.to_proto().metrics},
        outputs=frozenset(o.model_id for o in run.outputs.model_outputs) if run.outputs else frozenset(),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return "unknown"
