"""The command that breaks things on purpose, and tells whether the training came through."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from infra.settings import Settings, load_settings
from training.errors import Invalid

if TYPE_CHECKING:
    from tasks.drill.recording import Recording
    from tasks.drill.report import Drill

FAILED = 1


def drill(
    scenarios: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCENARIO...]", help="Joined by +: in one training. Default: a quick set. `all`: every one."
        ),
    ] = None,
    job: Annotated[
        Path | None, typer.Option(metavar="JOB.yaml", help="Drill this job instead of the small built-in one.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a value of its file; repeatable.")
    ] = None,
    s3: Annotated[bool, typer.Option("--s3", help="On a SeaweedFS server of its own instead of a folder.")] = False,
    here: Annotated[bool, typer.Option("--here", help="On the local stack, not on one of its own.")] = False,
    trials: Annotated[int, typer.Option(min=1, help="Faults in each scenario's training.")] = 1,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long `random` makes faults.")] = 2.0,
    mean_seconds: Annotated[float, typer.Option(min=1.0, help="Mean time between faults of `random`.")] = 30.0,
    seed: Annotated[int | None, typer.Option(help="Of the moments and of `random`. Default: a new one.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="For the report.")] = None,
    flow_run: Annotated[str | None, typer.Option(metavar="ID", help="Show the report on this flow run.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the scenarios, and do nothing.")] = False,
) -> None:
    """Break a real training in every way we know, and check that it ends bit for bit like an undisturbed one.

    It happens on a stack of its own, with ports and folders of its own: yours is not touched. Exit code 1 when a
    check does not hold.
    """
    from tasks.drill.scenarios import about, chosen

    console = Console(highlight=False, soft_wrap=True)
    if listing:
        _list(about(), console)
        return
    if sets and job is None:
        raise Invalid("--set changes a job: name it with --job")
    from secrets import randbelow

    from tasks.drill.run import run_drill, write_report
    from tasks.drill.scenarios import Scenario

    seed = randbelow(10_000) if seed is None else seed
    settings = load_settings()
    wanted = [
        Scenario(name, trials=trials, minutes=minutes, mean_seconds=mean_seconds, seed=seed)
        for name in chosen(scenarios or [])
    ]
    console.print(f"seed {seed}; scenarios: {', '.join(scenario.name for scenario in wanted)}")
    with _stopped_in_order():
        done = run_drill(
            settings,
            wanted,
            lambda line: console.print(line, style="dim", markup=False),
            s3=s3,
            here=here,
            job=job,
            overrides=sets or [],
            each=lambda recording: _tell(recording, console),
        )
    folder = out or settings.state_dir / "drills" / f"{done.started:%Y%m%d-%H%M%S}"
    _publish(settings, done, write_report(done, folder), flow_run, console)
    console.print(f"report   {folder / 'drill.html'}")
    console.print("[green]passed[/]" if done.passed else "[bold red]failed[/]")
    if not done.passed:
        raise typer.Exit(FAILED)


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    """SIGTERM as Ctrl-C: the drill's stack ends with it."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _list(rows: dict[str, str], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("scenario", no_wrap=True)
    table.add_column("what is broken")
    for name, text in rows.items():
        table.add_row(name, text)
    console.print(table)


def _tell(recording: Recording, console: Console) -> None:
    """A scenario's verdict, as soon as it is known."""
    from tasks.drill.checks import judge
    from tasks.drill.measures import goodput, trials
    from tasks.drill.worlds import in_words

    checks = judge(recording)
    word = "[green]pass[/]" if all(check.passed for check in checks) else "[bold red]FAIL[/]"
    share = goodput(recording)
    console.print(f"{word} {recording.scenario}" + (f", goodput {100 * share:.0f} %" if share is not None else ""))
    for trial in trials(recording):
        parts = [f"  {trial.fault}"]
        if trial.verdict_seconds is not None:
            parts.append(f"verdict {trial.verdict_seconds:.1f} s by {trial.by}")
        if trial.recovery_seconds is not None:
            what = "first step" if trial.next_token is not None or trial.token is None else "longest stand-still"
            parts.append(f"{what} {trial.recovery_seconds:.1f} s")
        if trial.steps_lost is not None:
            parts.append(f"{trial.steps_lost} steps lost")
        if trial.whole_seconds is not None:
            parts.append(f"whole {trial.whole_seconds:.1f} s after the node was back")
        console.print(", ".join(parts), markup=False)
    if ranks := in_words(recording):
        console.print(f"  {ranks}", markup=False)
    for check in checks:
        if not check.passed:
            console.print(f"  {check.name}: {check.detail}", style="red", markup=False)


def _publish(
    settings: Settings, done: Drill, files: dict[str, Path], flow_run: str | None, console: Console
) -> None:
    """To the user's servers, where there are any."""
    if settings.ports() is None and settings.prefect_api_url is None:
        return
    from tasks.drill.publish import publish_to_mlflow, publish_to_prefect

    if reason := publish_to_prefect(settings, done, flow_run):
        console.print(f"Prefect does not have the report: {reason}", style="yellow", markup=False)
    link, reason = publish_to_mlflow(settings, done, files)
    console.print(f"MLflow   {link}" if link else f"MLflow does not have the report: {reason}", markup=False)
