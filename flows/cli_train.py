"""The command that trains: starts a run or finds it again, follows it, and tells how it ended."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from infra import deploy, stack
from infra.links import prefect_link
from infra.settings import Settings, load_settings
from training.config import load_config
from training.errors import RetomaError, Unavailable

if TYPE_CHECKING:
    from infra.prefect_runs import PrefectRuns
    from tasks.follow import Look, Started
    from tasks.milestones import Milestone

LOOK_SECONDS = 1.0
INTERRUPTED = 130


def train(
    job: Annotated[
        Path, typer.Argument(metavar="JOB.yaml", help="The job's file, e.g. training/jobs/mnist_cnn.yaml.")
    ],
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the file; repeatable.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Name of the run to start or to go on with.")] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Start a new run even if one of this job is unfinished.")
    ] = False,
    follow: Annotated[bool, typer.Option(help="Show progress until the run ends.")] = True,
) -> None:
    """Train a job, or go on where it was: an unfinished run of the same job is resumed.

    Ctrl-C only stops looking; the run goes on.
    """
    overrides = sets or []
    config = load_config(job, overrides)
    settings = load_settings()
    console = Console(highlight=False, soft_wrap=True)
    _make_ready(settings, console)

    from infra.prefect_runs import PrefectRuns  # Prefect takes a second, and reads the environment
    from tasks.follow import start_or_attach

    with PrefectRuns(patience_seconds=60) as runs:
        started = start_or_attach(settings, runs, job, overrides, config, run=run, new=new)
        console.print(f"{started.how} run [bold]{started.run}[/]")
        console.print(f"Prefect  {prefect_link(settings, f'runs/flow-run/{started.flow_run.id}')}")
        if follow:
            _follow(settings, runs, started, console)


def _make_ready(settings: Settings, console: Console) -> None:
    """A local stack with our deployments, unless the servers are elsewhere."""
    if settings.prefect_api_url is None or settings.mlflow_url is None:
        stack.up(settings, report=lambda line: console.print(line, style="dim", markup=False))
    if settings.prefect_api_url is None:
        deploy.deploy(settings)
    settings.export()


def _follow(settings: Settings, runs: PrefectRuns, started: Started, console: Console) -> None:
    from flows.live import display_on
    from tasks.follow import go_on, look_at

    mlflow_url: str | None = None
    try:
        with display_on(console) as display:
            while True:
                look = look_at(runs, started)
                if look.milestone and look.milestone.mlflow_url and mlflow_url is None:
                    mlflow_url = look.milestone.mlflow_url
                    console.print(f"MLflow   {mlflow_url}")
                display.show(look)
                if look.flow_run.state == "CRASHED" and (following := go_on(settings, runs, started)):
                    link = prefect_link(settings, f"runs/flow-run/{following.flow_run.id}")
                    console.print(f"its flow crashed; another one goes on: {link}")
                    started = following
                elif not look.flow_run.live:
                    break
                time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        console.print(f"not looking any more; the run goes on. Look again: retoma train {_again(started)}")
        raise typer.Exit(INTERRUPTED) from None
    _tell_end(settings, look, started, console)


def _tell_end(settings: Settings, look: Look, started: Started, console: Console) -> None:
    from tasks.attempts import error_from

    if look.flow_run.state == "COMPLETED":
        if look.milestone is not None:
            _summarise(look.milestone, console)
        return
    if look.flow_run.state == "FAILED":
        raise error_from(look.flow_run.message)
    error: RetomaError = error_from(look.flow_run.message)
    if type(error) is not RetomaError:
        raise error
    raise Unavailable(
        f"the flow of run {started.run} ended {look.flow_run.state.lower()}: {look.flow_run.message}",
        hint=f"go on where it was: retoma train {_again(started)}; logs in {settings.state_dir / 'logs'}",
    )


def _again(started: Started) -> str:
    """Arguments that go on with this run. The changes belong to it: without them it would be another training."""
    parameters = started.flow_run.parameters
    changes = [part for change in parameters.get("overrides") or [] for part in ("--set", change)]
    return shlex.join([parameters.get("job", "JOB.yaml"), "--run", started.run, *changes])


def _summarise(milestone: Milestone, console: Console) -> None:
    seconds = f" in {milestone.seconds:.0f} s" if milestone.seconds is not None else ""
    console.print(f"[green]done[/]{seconds}")
    metrics = ", ".join(f"{name} {value:.4g}" for name, value in (milestone.metrics or {}).items())
    console.print(f"metrics      {metrics}")
    if sizes := milestone.sizes:
        text = f"{sizes.checkpoints} in {sizes.attempts} attempts, {decimal(sizes.written_bytes)} written"
        if sizes.delta_percent is not None and sizes.delta_bytes is not None:
            text += (
                f"; {sizes.deltas} deltas of {decimal(int(sizes.delta_bytes))} on average, "
                f"{sizes.delta_percent:.1f} % of the state ({decimal(sizes.state_bytes)})"
            )
        console.print(f"checkpoints  {text}")
    console.print(f"model        {milestone.model_version or 'not registered: MLflow was away'}")
    console.print(f"state        {milestone.state_digest}")
    console.print(f"history      retoma show {milestone.run}")
