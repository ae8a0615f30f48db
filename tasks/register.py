"""Registering the result of a run as a model version. The aliases move last."""

from __future__ import annotations

import math
from typing import Any

from infra.mlflow_models import CHECKPOINT, Version
from infra.mlflow_registry import MlflowRegistry
from infra.mlflow_runs import Point
from infra.mlflow_text import RUN, STORE, milliseconds
from tasks.publish import publish
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Committed
from training.checkpoint.store import open_store
from training.errors import Diverged, Invalid

CANDIDATE, CHAMPION = "candidate", "champion"
JUDGED_BY = "retoma.judged_by"
_METRIC = "retoma.metric."
_LOWER_IS_BETTER = ("loss", "error", "perplexity", "bits", "mae", "mse")


def register_final(
    store_url: str,
    registry: MlflowRegistry,
    run: str,
    name: str,
    metrics: dict[str, float],
    metric: str | None = None,
    higher_is_better: bool | None = None,
) -> str:
    """Register the head of a run as a version of model `name`; repeating it makes no second version.

    The version is `candidate`; it becomes `champion` too if there is none yet, or if it is strictly better than
    the champion. `mlflow.pyfunc.load_model("models:/NAME@champion")` loads it from the run's store.

    Args:
        store_url: the run's store.
        registry: where to register.
        run: name of the run.
        name: of the registered model.
        metrics: the final evaluation.
        metric: which of them decides; default: `accuracy` if there is one, else the first loss, else the first.
        higher_is_better: direction; default: told by the metric's name.

    Returns:
        The version's number.

    Raises:
        Unavailable: MLflow or the store did not answer; run it again.
        Invalid: the run has no checkpoint, its job is unknown, or there is no such metric.
        Diverged: a metric is not finite.
    """
    metric = _choose(metrics, metric)
    higher = _is_higher_better(metric) if higher_is_better is None else higher_is_better
    store = open_store(store_url)
    publish(store, registry, run)
    head = read_lineage(store).head
    if head is None:
        raise Invalid(f"run {run} has no checkpoint to register", hint=f"retoma show {run}", run=run)
    version = _find(registry, run, name, head) or _create(registry, run, name, head, store.url)
    tags = {f"{_METRIC}{key}": repr(float(value)) for key, value in metrics.items()}
    registry.models.set_version_tags(version, {**tags, JUDGED_BY: f"{metric}, {'higher' if higher else 'lower'}"})
    _log_metrics(registry, run, head, metrics)
    _move_aliases(registry, version, metric, metrics[metric], higher=higher)
    return version.number


def pointer_of(committed: Committed, store_url: str) -> dict[str, Any]:
    """What `training.serving` needs to load a checkpoint.

    Raises:
        Invalid: the manifest does not say which job wrote it.
    """
    manifest = committed.manifest
    identity = manifest.job.get("identity") or {}
    if not identity.get("job"):
        raise Invalid(
            f"{manifest.key} does not name its job, so nothing can build the model",
            hint="only runs that `retoma train` made can be registered as models",
            run=manifest.run,
        )
    return {
        "store_url": store_url,
        "run": manifest.run,
        "token": manifest.token,
        "sequence": manifest.sequence,
        "digest": committed.ref.digest,
        "job": identity["job"],
        "params": identity.get("params", {}),
    }


def _find(registry: MlflowRegistry, run: str, name: str, head: Committed) -> Version | None:
    wanted = (run, _identity(head))
    for version in registry.models.versions(name):
        if (version.tags.get(RUN), version.tags.get(CHECKPOINT)) == wanted:
            return version
    return None


def _create(registry: MlflowRegistry, run: str, name: str, head: Committed, store_url: str) -> Version:
    parent = registry.runs.parent(run)
    entry = registry.checkpoints.all(run).get((head.ref.token, head.ref.sequence))
    if parent is None or entry is None:
        raise Invalid(f"the head {head.ref} of run {run} was removed from MLflow meanwhile", run=run)
    registry.models.upload_pointer(entry.model_id, pointer_of(head, store_url))
    revision = head.manifest.data.get("revision")
    return registry.models.create_version(
        name,
        entry.model_id,
        parent.id,
        tags={
            RUN: run,
            CHECKPOINT: _identity(head),
            STORE: store_url,
            "retoma.data_digest": str(head.manifest.data.get("digest", "")),
            **({"retoma.git_revision": str(revision)} if revision else {}),
        },
        description=f"Run {run}, checkpoint {head.ref} (step {head.manifest.position.step}), from `{store_url}`.",
    )


def _log_metrics(registry: MlflowRegistry, run: str, head: Committed, metrics: dict[str, float]) -> None:
    """The final evaluation on the parent run, at the head's step; what the run has already is left alone."""
    parent = registry.runs.parent(run)
    if parent is None:
        return
    step, timestamp = head.manifest.position.step, milliseconds(head.manifest.writer.created)
    points = [Point(f"final/{key}", float(value), step, timestamp) for key, value in metrics.items()]
    registry.runs.log_points(parent.id, [p for p in points if step > parent.steps.get(p.key, -1)])


def _move_aliases(registry: MlflowRegistry, version: Version, metric: str, value: float, *, higher: bool) -> None:
    models = registry.models
    candidate = models.with_alias(version.name, CANDIDATE)
    if candidate is None or int(candidate.number) < int(version.number):
        models.set_alias(version, CANDIDATE)
    champion = models.with_alias(version.name, CHAMPION)
    if champion is None or _is_better(value, champion.tags.get(f"{_METRIC}{metric}"), higher=higher):
        models.set_alias(version, CHAMPION)


def _is_better(value: float, other: str | None, *, higher: bool) -> bool:
    """Strictly better. A champion without this metric cannot be judged by it, and stays."""
    if other is None:
        return False
    return value > float(other) if higher else value < float(other)


def _identity(head: Committed) -> str:
    return f"{head.ref} {head.ref.digest}"


def _choose(metrics: dict[str, float], metric: str | None) -> str:
    for key, value in metrics.items():
        if not math.isfinite(value):
            raise Diverged(f"final metric {key} is {value}", hint="the run's earlier checkpoints are healthy")
    if metric is None:
        losses = [key for key in metrics if not _is_higher_better(key)]
        metric = "accuracy" if "accuracy" in metrics else next(iter([*losses, *metrics]), None)
    if metric is None or metric not in metrics:
        raise Invalid(f"no metric {metric!r} to judge the model by; there are: {', '.join(metrics) or 'none'}")
    return metric


def _is_higher_better(metric: str) -> bool:
    return not any(word in metric.lower() for word in _LOWER_IS_BETTER)
