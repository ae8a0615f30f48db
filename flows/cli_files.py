"""Commands between a run and files of others: restore to one, import one. The tensors are a child's matter."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.filesize import decimal

from flows.cli_address import RUN_HELP, new_or_open, open_run, the_checkpoint
from infra.settings import Settings, load_settings
from tasks.ask import ask
from training.errors import Invalid

_PROCESS = (sys.executable, "-m", "training.process")
_SECONDS = 24 * 3600.0  # a checkpoint of any size; Ctrl-C ends it before

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Run = Annotated[str, typer.Argument(help=RUN_HELP)]


def restore(
    run: Run,
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="File to write; not there yet.")],
    checkpoint: Annotated[
        str | None,
        typer.Option(metavar="TOKEN/SEQUENCE", help="As `show` names it; default: the newest intact one."),
    ] = None,
    file_format: Annotated[
        Literal["safetensors", "torch"] | None,
        typer.Option("--format", help="Default: torch for .pt, .pth and .bin, else safetensors."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write a checkpoint to a file that others read. A training of the run goes on undisturbed."""
    settings = load_settings()
    opened = open_run(settings, run)
    chosen = file_format or ("torch" if to.suffix in {".pt", ".pth", ".bin"} else "safetensors")
    done = _ask(
        "--export",
        {
            "store_url": opened.store_url,
            "target": str(to.expanduser().absolute()),
            "checkpoint": the_checkpoint(checkpoint),
            "file_format": chosen,
            "force": force,
        },
        settings,
    )
    if as_json:
        typer.echo(json.dumps(done, indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    for skipped in done["skipped"]:
        console.print(f"skipped  {skipped['key']}: {skipped['reason']}", style="yellow", markup=False)
    at = done["position"]
    console.print(
        f"wrote {done['path']}: {done['tensors']} tensors, {decimal(done['size_bytes'])}, {done['file_format']}",
        markup=False,
    )
    console.print(
        f"of run {done['run']}, checkpoint {done['checkpoint']}; next is epoch {at['epoch']}, step {at['step']}",
        markup=False,
    )
    if done["converted"]:
        console.print(f"as tensors, since they were numpy values: {', '.join(done['converted'])}", markup=False)


def import_file(
    run: Run,
    file: Annotated[
        Path, typer.Argument(help="A file of torch.save, a folder of torch.distributed.checkpoint, or safetensors.")
    ],
    epoch: Annotated[int | None, typer.Option(min=0, help="The epoch that comes next; zero-based.")] = None,
    step: Annotated[int | None, typer.Option(min=0, help="The optimizer step that comes next.")] = None,
    sample: Annotated[int | None, typer.Option(min=0, help="Samples done, over all epochs.")] = None,
    as_json: Json = False,
) -> None:
    """Save a file of others as a base checkpoint of a new run or of one that is there. Nothing in it is run.

    It is an attempt like any other: a training of this run that is under way is fenced by it.
    """
    settings = load_settings()
    name, store_url = new_or_open(settings, run)
    given = {"epoch": epoch, "step": step, "sample": sample}
    position = {key: value or 0 for key, value in given.items()}
    if not file.exists():
        raise Invalid(f"{file} does not exist", hint="name a file, or a folder of torch.distributed.checkpoint")
    done = _ask(
        "--import",
        {
            "store_url": store_url,
            "source": str(file.expanduser().absolute()),
            "run": name,
            "position": position if any(value is not None for value in given.values()) else None,
        },
        settings,
    )
    if as_json:
        typer.echo(json.dumps(done, indent=2))
        return
    at = done["position"]
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"imported {done['source']} ({done['source_format']}) into run {done['run']} as checkpoint "
        f"{done['checkpoint']}: {decimal(done['state_bytes'])} of state in {decimal(done['written_bytes'])}",
        markup=False,
    )
    console.print(f"next is epoch {at['epoch']}, step {at['step']}; look at it: retoma show {run}", markup=False)


def _ask(mode: str, question: dict[str, Any], settings: Settings) -> dict[str, Any]:
    return ask((*_PROCESS, mode), question, timeout_seconds=_SECONDS, cwd=settings.home)
