"""A whole training: plan, ranges, evaluation, registration. Started again with the same run, it goes on.

prefect deployment run train/cpu -p job=training/jobs/mnist_cnn.yaml
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.states import Cancelled, Failed
from prefect.tasks import Task

from infra.prefect_runs import PrefectRuns
from infra.settings import Settings, load_settings
from tasks.attempts import GaveUp, RangeFollower, outcome_of
from tasks.evaluate import Evaluation, evaluate
from tasks.milestones import Milestones
from tasks.order import RangeOrder, finished
from tasks.plan import Plan, make_plan, new_run_name
from tasks.tracking import close_failed, open_run, register_run
from training.checkpoint.store import open_store
from training.config import load_config
from training.errors import RetomaError, Unavailable


def may_pass(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:  # noqa: ARG001 - Prefect's names
    """Whether a task failed for want of a server or store. Dead attempts are counted elsewhere."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, Unavailable) and not isinstance(error, GaveUp)


PATIENT: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": [2, 10, 60],
    "retry_condition_fn": may_pass,
    "cache_policy": NO_CACHE,
}


@flow(name="train")
def train(job: str, run: str | None = None, overrides: list[str] | None = None) -> Any:
    """Train a job to its end.

    Args:
        job: its YAML file, relative to the project's root.
        run: name of the run. One that exists is gone on with; default: a new one.
        overrides: `key=value` changes of the YAML file.
    """
    settings = load_settings()
    try:
        return run_training(settings, job, run or default_name(settings, job, overrides or []), overrides or [])
    except RetomaError as error:
        state, message = outcome_of(error)
        return Cancelled(message=message) if state == "CANCELLED" else Failed(message=message)


def run_training(
    settings: Settings, job: str, run: str, overrides: list[str], model: str | None = None
) -> dict[str, Any]:
    """The training, inside a flow; registered as `model`, by default the job's name. Raises its parts' errors."""
    milestones = Milestones(run, str(runtime.flow_run.id))
    milestones.reached("preparing")
    plan = prepare(settings, job, overrides, run)
    get_run_logger().info("resolved configuration:\n%s", plan.text())
    milestones.reached("training", ranges=len(plan.config.ranges()), mlflow_url=open_run(settings, plan))
    store = open_store(plan.store_url)
    version: str | None = None
    try:
        for order in plan.orders():
            if not finished(store, run, order.stop):
                title = f"epochs {order.start} to {order.stop}"
                train_epochs.with_options(name=title, task_run_name=title)(order)
        milestones.reached("evaluating")
        evaluation = evaluate_run(settings, plan)
        milestones.reached("registering")
        version = register(settings, plan, evaluation, model)
    except RetomaError as error:
        close_failed(settings, run, error)
        raise
    return milestones.done(plan, evaluation, version)


@task(**PATIENT, task_run_name="prepare")
def prepare(settings: Settings, job: str, overrides: list[str], run: str) -> Plan:
    """Configuration, data and a trial construction of the job."""
    return make_plan(settings, job, overrides, run)


@task(**PATIENT)
def train_epochs(order: RangeOrder) -> None:
    """One range, through as many attempts as it takes."""
    with PrefectRuns() as runs:
        RangeFollower(order, runs=runs, store=open_store(order.store_url), logger=get_run_logger()).follow()


@task(**PATIENT, task_run_name="evaluate")
def evaluate_run(settings: Settings, plan: Plan) -> Evaluation:
    """The final metrics, of the checkpoint that is registered."""
    return evaluate(plan, settings.home)


@task(**PATIENT, task_run_name="register")
def register_patiently(settings: Settings, plan: Plan, evaluation: Evaluation, model: str | None) -> str:
    """Everything that MLflow should have, and the model's new version."""
    return register_run(settings, plan, evaluation, model)


def register(settings: Settings, plan: Plan, evaluation: Evaluation, model: str | None) -> str | None:
    """Register; MLflow being away does not turn a training that is done into one that failed."""
    try:
        return register_patiently(settings, plan, evaluation, model)
    except Unavailable as error:
        get_run_logger().warning("not registered: %s; starting run %s again registers it", error, plan.run)
        return None


def default_name(settings: Settings, job: str, overrides: list[str]) -> str:
    """The same name whenever the same flow run is executed."""
    config = load_config(settings.home / job, overrides)
    start = runtime.flow_run.scheduled_start_time or datetime.now(UTC)
    return new_run_name(config, start, suffix=str(runtime.flow_run.id)[:4])
