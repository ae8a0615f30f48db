"""Commands for the local stack and the deployments."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from infra import deploy as deployments
from infra import stack
from infra.links import mlflow_link, prefect_link
from infra.settings import Settings, load_settings
from training.errors import Invalid, Unavailable

STYLES = {"ready": "green", "not ready": "yellow", "stopped": "red"}
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def up() -> None:
    """Start the local stack: Prefect, MLflow and a worker for each pool, and deploy. Does nothing when it is up.

    Trainings that were stopped by `retoma down` go on; those that should not, cancel in the Prefect site.
    """
    settings = load_settings()
    console = _console()
    stack.up(settings, report=lambda line: console.print(line, style="dim"))
    if settings.prefect_api_url is None:
        deployments.deploy(settings)
    _print_links(settings, console)


def down() -> None:
    """Stop the local stack and everything it started. Data and checkpoints stay."""
    stopped = stack.down(load_settings())
    _console().print(f"stopped {stopped} processes" if stopped else "nothing was running")


def status(as_json: Json = False) -> None:
    """Show the state of each process of the stack. Exit code 3 when one is not ready."""
    settings = load_settings()
    if settings.prefect_api_url and settings.mlflow_url:
        raise Invalid("both servers are set to be elsewhere: there is no local stack", hint="look at them there")
    found = stack.status(settings)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    elif found.processes:
        table = Table(box=None, pad_edge=False)
        for title in ("process", "state", "pid", "log"):
            table.add_column(title, overflow="fold")
        for process in found.processes:
            state = process.state if process.state != "not ready" else f"not ready: {process.detail}"
            pid = str(process.pid or "")
            table.add_row(process.name, f"[{STYLES[process.state]}]{state}[/]", pid, process.log)
        _console().print(table)
        if found.healthy:
            _print_links(settings, _console())
    if not found.healthy:
        raise Unavailable("the local stack is not running", hint="start it with `retoma up`")


def env() -> None:
    """Print the variables that `prefect` and `mlflow` need to find the servers: eval "$(retoma env)"."""
    settings = load_settings()
    variables = settings.variables()
    settings.make_state_dir()
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def deploy(
    force: Annotated[bool, typer.Option(help="Deploy even when nothing has changed.")] = False,
) -> None:
    """Put flows and automations onto the Prefect server, work pools first."""
    settings = load_settings()
    changed = deployments.deploy(settings, force=force)
    text = "deployed" if changed else "up to date"
    _console().print(f"{text}: {prefect_link(settings, 'deployments')}")


def _print_links(settings: Settings, console: Console) -> None:
    console.print(f"Prefect  {prefect_link(settings)}")
    console.print(f"MLflow   {mlflow_link(settings)}")
    console.print(f"logs     {settings.state_dir / 'logs'}")
    console.print("Telemetry of Prefect, MLflow and DVC is switched off.", style="dim")


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)
