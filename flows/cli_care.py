"""Commands that look after what a run has stored. They talk to its store only."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal

from flows.cli_address import RUN_HELP, open_run
from infra.settings import load_settings
from training.checkpoint.adapters.address import checkpoint_name, parse_checkpoint
from training.checkpoint.document import wall_clock
from training.errors import Corrupt

if TYPE_CHECKING:
    from training.checkpoint.care.compact import Compaction
    from training.checkpoint.care.verify import Report

_THREADS = 4
_STYLES = {"garbage": "dim", "damaged": "yellow", "head": "bold red"}

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Run = Annotated[str, typer.Argument(help=RUN_HELP)]
Checkpoint = Annotated[str, typer.Argument(metavar="TOKEN/SEQUENCE", help="As `show` names it.")]


def verify(
    run: Run,
    data: Annotated[bool, typer.Option("--data", help="Read, decode and check every byte, too.")] = False,
    as_json: Json = False,
) -> None:
    """Find out whether all checkpoints can be restored, before somebody has to. Exit code 4 when one cannot.

    Changes nothing, and may run beside a training.
    """
    opened = open_run(load_settings(), run)
    from training.checkpoint.care.verify import verify as look

    report = look(opened.store, data=data, threads=_threads())
    if as_json:
        fields = {
            **asdict(report),
            "head": checkpoint_name(*report.head) if report.head else None,
            "restorable": checkpoint_name(*report.restorable) if report.restorable else None,
            "intact": report.intact,
            "head_is_intact": report.head_is_intact,
        }
        typer.echo(json.dumps(fields, indent=2))
    else:
        _tell(report, _console())
    if not report.intact:
        damaged = [problem for problem in report.problems if problem.severity != "garbage"]
        start = checkpoint_name(*report.restorable) if report.restorable else "nothing"
        raise Corrupt(
            f"{len(damaged)} objects are damaged or missing; a resume would start from {start}",
            hint=damaged[0].hint,
            run=opened.run,
        )


def compact(
    run: Run,
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="TOKEN/SEQUENCE", help="As `show` names it; default: the newest intact one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a second, shorter form of a checkpoint, so that a restore reads no chain. Bit for bit the same state.

    Claims nothing, and may run beside a training.
    """
    opened = open_run(load_settings(), run)
    from training.checkpoint.care.compact import compact as shorten
    from training.checkpoint.care.compact import compactable

    name = parse_checkpoint(checkpoint) if checkpoint is not None else None
    if name is None:
        found = compactable(opened.store, opened.run, max_links=1)
        name = (found.checkpoint.ref.token, found.checkpoint.ref.sequence) if found else None
    done = shorten(opened.store, *name, opened.run, threads=_threads(), created=wall_clock()) if name else None
    if as_json:
        fields = {**asdict(done), "checkpoint": str(done.checkpoint.ref)} if done else {"written": False}
        typer.echo(json.dumps(fields, indent=2))
    else:
        _console().print(_told(done), markup=False)


def pin(
    run: Run,
    checkpoint: Checkpoint,
    reason: Annotated[str, typer.Option(help="For people who wonder later.")] = "",
    as_json: Json = False,
) -> None:
    """Keep a checkpoint, and what it needs, whatever a collection removes."""
    opened = open_run(load_settings(), run)
    from training.checkpoint.care.pins import pin as keep

    done = keep(opened.store, *parse_checkpoint(checkpoint), reason=reason, created=wall_clock())
    if as_json:
        typer.echo(done.model_dump_json(indent=2))
    else:
        _console().print(f"pinned {checkpoint_name(done.token, done.sequence)} of run {done.run}", markup=False)


def unpin(run: Run, checkpoint: Checkpoint, as_json: Json = False) -> None:
    """Let collections have a pinned checkpoint again."""
    opened = open_run(load_settings(), run)
    from training.checkpoint.care.pins import unpin as let_go

    token, sequence = parse_checkpoint(checkpoint)
    found = let_go(opened.store, token, sequence)
    name = checkpoint_name(token, sequence)
    if as_json:
        typer.echo(json.dumps({"run": opened.run, "checkpoint": name, "was_pinned": found}, indent=2))
    else:
        _console().print(f"{name} is no longer pinned" if found else f"{name} was not pinned", markup=False)


def _tell(report: Report, console: Console) -> None:
    intact = sum(checkpoint.intact for checkpoint in report.checkpoints)
    rebased = sum(checkpoint.rebased for checkpoint in report.checkpoints)
    pinned = sum(checkpoint.pinned for checkpoint in report.checkpoints)
    depth = (
        f"every byte, {decimal(report.read_bytes)}" if report.data else "structure only; --data reads every byte"
    )
    console.print(f"{report.url}: {depth}, {report.seconds:.1f} s", markup=False)
    console.print(
        f"{intact} of {len(report.checkpoints)} checkpoints are intact, {rebased} compacted, {pinned} pinned",
        style="green" if report.intact else "red",
    )
    for problem in report.problems:
        console.print(
            f"{problem.severity:<8} {problem.key}: {problem.what}", style=_STYLES[problem.severity], markup=False
        )
        console.print(f"         {problem.hint}", style="dim", markup=False)


def _told(done: Compaction | None) -> str:
    if done is None:
        return "the newest checkpoint is read without a chain already, or there is none"
    if not done.written:
        return f"{done.checkpoint.ref} was left as it is: {done.reason}"
    return (
        f"{done.checkpoint.ref}: {done.reason} in {done.seconds:.1f} s; a restore reads "
        f"{decimal(done.read_bytes_after)} instead of {decimal(done.read_bytes_before)}"
    )


def _threads() -> int:
    return min(_THREADS, os.cpu_count() or 1)


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True)
