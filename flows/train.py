"""A whole training: plan, ranges, evaluation, registration. Started again with the same run, it goes on.

prefect deployment run train/cpu -p job=training/jobs/mnist_cnn.yaml
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.flows import Flow
from prefect.states import Cancelled, Failed
from prefect.tasks import Task

from infra.prefect_runs import PrefectRuns
from infra.settings import Settings, load_settings
from tasks.attempts import RangeFollower, Superseded, cancel_ranges, outcome_of, run_tag
from tasks.budget import GaveUp, refill
from tasks.evaluate import Evaluation, evaluate
from tasks.follow import job_tag, rival
from tasks.milestones import Milestones
from tasks.order import RangeOrder, finished
from tasks.plan import Plan, make_plan, new_run_name, requested_digest
from tasks.tracking import close_failed, open_run, register_run
from training.checkpoint.store import open_store
from training.config import load_config
from training.errors import Fenced, RetomaError, Unavailable


def may_pass(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:  # noqa: ARG001 - Prefect's names
    """Whether a task failed for want of a server or store. Dead attempts are counted elsewhere."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, Unavailable) and not isinstance(error, GaveUp)


CANCEL_SECONDS = 60.0
PATIENT: dict[str, Any] = {
    "retries": 3,
    "retry_delay_seconds": [2, 10, 60],
    "retry_condition_fn": may_pass,
    "cache_policy": NO_CACHE,
}


def cancel_with_ranges(flow: Flow[..., Any], flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001
    """Called by the worker that has ended a cancelled parent: its ranges go, whichever generation started them."""
    run = flow_run.parameters.get("run")
    if run:
        with PrefectRuns(patience_seconds=CANCEL_SECONDS) as runs:
            cancel_ranges(runs, run)
        close_failed(load_settings(), run, Fenced("cancelled"))


@flow(name="train", on_cancellation=[cancel_with_ranges])
def train(job: str, run: str | None = None, overrides: list[str] | None = None, generation: int = 0) -> Any:
    """Train a job to its end.

    Args:
        job: its YAML file, relative to the project's root.
        run: name of the run. One that exists is gone on with; default: a new one.
        overrides: `key=value` changes of the YAML file.
        generation: how often a crash of this flow was answered by starting it again; for the automation.
    """

    def body(settings: Settings) -> Any:
        changes = overrides or []
        name = run or default_name(settings, job, changes)
        return run_training(settings, job, name, changes, generation=generation)

    return as_parent(body)


def as_parent(body: Callable[[Settings], Any]) -> Any:
    """Do a parent's work, and turn its errors into the states that say what to do next.

    A parent that is no longer wanted leaves without proposing a state: it would overwrite the verdict.
    """
    settings = load_settings()
    try:
        return body(settings)
    except Superseded as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(Superseded.exit_code)
    except RetomaError as error:
        state, message = outcome_of(error)
        return Cancelled(message=message) if state == "CANCELLED" else Failed(message=message)


def run_training(
    settings: Settings, job: str, run: str, overrides: list[str], *, generation: int, model: str | None = None
) -> dict[str, Any]:
    """The training, inside a flow; registered as `model`, by default the job's name. Raises its parts' errors."""
    label(settings, job, run, overrides)
    if generation > settings.parent_generations:
        error = GaveUp(
            f"this flow has crashed {generation} times, and was started again each time",
            hint=f"see the logs of its worker, cure the cause, then `retoma train {job} --run {run}` goes on",
        )
        close_failed(settings, run, error)
        raise error
    milestones = Milestones(run, str(runtime.flow_run.id))
    milestones.reached("preparing")
    plan = prepare(settings, job, overrides, run)
    get_run_logger().info("resolved configuration:\n%s", plan.text())
    milestones.reached("training", ranges=len(plan.config.ranges()), mlflow_url=open_run(settings, plan))
    store = open_store(plan.store_url)
    if generation == 0:
        refill(store, run)  # a person, or a schedule, wants it tried again
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
    except Superseded:
        raise  # the run goes on without us
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
        RangeFollower(
            order,
            runs=runs,
            store=open_store(order.store_url),
            logger=get_run_logger(),
            parent=str(runtime.flow_run.id),
        ).follow()


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


def label(settings: Settings, job: str, run: str, overrides: list[str]) -> None:
    """Let others find this flow run, and the automation copy the name of the run, however it was started.

    Raises:
        Fenced: another parent of this run is alive.
    """
    own = str(runtime.flow_run.id)
    tags = [run_tag(run), job_tag(requested_digest(load_config(settings.home / job, overrides)))]
    with PrefectRuns() as runs:
        runs.label(own, name=run, parameters={"run": run}, tags=tags)
        if other := rival(runs, run, own):
            raise Fenced(f"flow run {other.id} goes on with it", run=run)


def default_name(settings: Settings, job: str, overrides: list[str]) -> str:
    """The same name whenever the same flow run is executed."""
    config = load_config(settings.home / job, overrides)
    start = runtime.flow_run.scheduled_start_time or datetime.now(UTC)
    return new_run_name(config, start, suffix=str(runtime.flow_run.id)[:4])
