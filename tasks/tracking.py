"""A whole run as MLflow sees it: opened at its start, completed at its end; its absence stops nothing."""

from __future__ import annotations

import logging

from infra.mlflow_registry import MlflowRegistry
from infra.mlflow_runs import RunStatus
from infra.settings import Settings
from tasks.evaluate import Evaluation
from tasks.plan import Plan
from tasks.publish import publish
from tasks.register import register_final
from training.checkpoint.store import open_store
from training.errors import Fenced, Preempted, RetomaError, Unavailable

logger = logging.getLogger(__name__)


def registry_of(settings: Settings) -> MlflowRegistry:
    """The registry that the settings name. Makes no traffic.

    Raises:
        Unavailable: no server is set and no local stack was ever started.
    """
    return MlflowRegistry(settings.tracking_url(), settings.mlflow_experiment, settings.mlflow_timeout_seconds)


def open_run(settings: Settings, plan: Plan) -> str | None:
    """Create or take up the parent run. Returns the address of its page, None when MLflow is away."""
    registry = registry_of(settings)
    version = plan.data_version.model_dump() if plan.data_version else {}
    try:
        registry.open_run(plan.run, plan.config, version, plan.store_url)
        return registry.run_url(plan.run)
    except Unavailable as error:
        logger.warning("MLflow is away, the run is registered when it is back: %s", error.message)
        return None


def register_run(settings: Settings, plan: Plan, evaluation: Evaluation, model: str | None = None) -> str:
    """Publish what is missing, register the result as the next version of `model` (the job's name), close the run.

    Returns:
        `<model>/<version>`.

    Raises:
        Unavailable: MLflow or the store did not answer; repeat it.
    """
    registry = registry_of(settings)
    open_run(settings, plan)
    publish(open_store(plan.store_url), registry, plan.run, final=True)
    name = model or plan.config.short_name
    version = register_final(plan.store_url, registry, plan.run, name, evaluation.metrics)
    registry.close_run(plan.run, "FINISHED")
    return f"{name}/{version}"


def close_failed(settings: Settings, run: str, error: RetomaError) -> None:
    """Set the parent run to how it ended, if MLflow answers."""
    status: RunStatus = "KILLED" if isinstance(error, Fenced | Preempted) else "FAILED"
    try:
        registry_of(settings).close_run(run, status, f"{error.kind}: {error.message}")
    except RetomaError as problem:
        logger.warning("MLflow does not know how run %s ended: %s", run, problem.message)
