"""The command that deletes: what no checkpoint that is kept needs, and nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal

from flows.cli_address import RUN_HELP, Opened, open_run
from infra.settings import Settings, load_settings
from tasks.runs import summarise
from training.checkpoint.adapters.address import checkpoint_name
from training.checkpoint.document import wall_clock
from training.errors import Invalid, Unavailable

if TYPE_CHECKING:
    from training.checkpoint.care.collect import CollectionReport

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Name = tuple[int, int]  # token and sequence


def gc(
    run: Annotated[str, typer.Argument(help=RUN_HELP)],
    keep: Annotated[int, typer.Option(min=1, help="Newest bases that stay, with all that came after them.")] = 2,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Nothing younger goes, by the store's clock.")
    ] = 86400.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing; tell what would go.")] = False,
    registry: Annotated[
        bool | None,
        typer.Option(help="Keep what registered models point at. Default: for a run by name, if MLflow is known."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete old checkpoints and what failed saves left. The head, pinned and registered ones stay.

    May run beside a training. Exit code 3 when something stood against it; then nothing was deleted.
    """
    settings = load_settings()
    opened = open_run(settings, run)
    aliases = _registered(settings, opened, registry)
    from training.checkpoint.care.collect import collect

    report = collect(
        opened.store,
        keep=keep,
        grace_seconds=grace,
        aliases=aliases,
        running=not (opened.address == opened.run and summarise(opened.run, opened.store_url).finished),
        dry_run=dry_run,
        created=wall_clock(),
    )
    if as_json:
        typer.echo(json.dumps(_plain(report), indent=2))
    else:
        _tell(report, Console(highlight=False, soft_wrap=True))
    if report.reason:
        raise Unavailable(f"nothing was deleted: {report.reason}", hint="try again later", run=opened.run)


def _registered(settings: Settings, opened: Opened, wanted: bool | None) -> set[Name]:
    """Checkpoints that are versions of a registered model: those have no weights of their own."""
    by_name = opened.address == opened.run
    known = settings.mlflow_url is not None or settings.ports() is not None
    if not (by_name and known if wanted is None else wanted):
        return set()
    from tasks.retain import registered_checkpoints
    from tasks.tracking import registry_of

    try:
        return registered_checkpoints(registry_of(settings), opened.run)
    except (Unavailable, Invalid) as error:
        error.hint = (
            f"registered models could lose their weights; without them: retoma gc {opened.run} --no-registry"
        )
        raise


def _plain(report: CollectionReport) -> dict[str, Any]:
    kept = [{"checkpoint": checkpoint_name(k.token, k.sequence), "reason": k.reason} for k in report.kept]
    return {
        **asdict(report),
        "kept": kept,
        "collected": [checkpoint_name(*name) for name in report.collected],
        "deleted": [deleted._asdict() for deleted in report.deleted],
        "freed_bytes": report.freed_bytes,
    }


def _tell(report: CollectionReport, console: Console) -> None:
    console.print(f"{report.url}: {len(report.kept)} checkpoints stay", markup=False)
    for kept in report.kept:
        console.print(f"  {checkpoint_name(kept.token, kept.sequence)}  {kept.reason}", style="dim", markup=False)
    verb = "would go" if report.dry_run else "are gone"
    console.print(f"{len(report.collected)} checkpoints {verb}")
    for name in report.collected:
        console.print(f"  {checkpoint_name(*name)}", style="dim")
    for deleted in report.deleted:
        if deleted.objects:
            console.print(f"{deleted.objects} {deleted.kind}, {decimal(deleted.size_bytes)}", markup=False)
    if report.in_flight:
        console.print(f"{report.in_flight} packs of a save that may be going on were left alone")
    console.print(f"{decimal(report.freed_bytes)} {'would be free' if report.dry_run else 'freed'}")
