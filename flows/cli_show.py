"""Commands that look at runs. They read the stores and ask no server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from flows.cli_address import RUN_HELP, export_s3, open_run
from infra.settings import load_settings
from tasks.runs import attempt_rows, checkpoint_row, list_runs
from tasks.speed import group_row

if TYPE_CHECKING:
    from training.checkpoint.history import Attempt, Lineage
    from training.checkpoint.manifest import Committed

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def runs(as_json: Json = False) -> None:
    """List the runs, the newest last."""
    settings = load_settings()
    export_s3(settings)
    found = list_runs(settings)
    if as_json:
        typer.echo(json.dumps([summary.model_dump() for summary in found], indent=2))
        return
    console = _console()
    if not found:
        console.print(f"no runs in {settings.checkpoints_url}; start one with `retoma train JOB.yaml`")
        return
    table = Table(box=None, pad_edge=False)
    for title in ("run", "state", "epoch", "step", "head", "attempts", "last worked on"):
        table.add_column(title, overflow="fold")
    for summary in found:
        table.add_row(
            summary.run,
            "[green]finished[/]" if summary.finished else "[yellow]unfinished[/]",
            f"{summary.epoch}/{summary.epochs if summary.epochs is not None else '?'}",
            str(summary.step),
            summary.head or "none",
            str(summary.attempts),
            summary.updated[:19],
        )
    console.print(table)


def show(run: Annotated[str, typer.Argument(help=RUN_HELP)], as_json: Json = False) -> None:
    """Show a run's chain of checkpoints, how each was decided on, and its attempts."""
    from training.checkpoint.care.pins import pinned
    from training.checkpoint.chain import rebased_checkpoints  # the codec takes a while to load
    from training.checkpoint.collected import read_collected
    from training.checkpoint.quarantine import read_incidents

    settings = load_settings()
    opened = open_run(settings, run)
    store, lineage = opened.store, opened.lineage()
    by_token = {attempt.token: attempt for attempt in lineage.attempts}
    rebased, pins = rebased_checkpoints(store), pinned(store)
    chain = [_row(committed, by_token, rebased, pins) for committed in lineage.chain]
    collected = len(read_collected(store, []).names)
    attempts, incidents = attempt_rows(lineage), read_incidents(store, notes=lineage.problems)
    problems = [problem.model_dump() for problem in lineage.problems]
    group = group_row(settings, lineage)
    if as_json:
        head = lineage.head.manifest if lineage.head else None
        fields = {
            "run": opened.run,
            "store_url": store.url,
            "job": head.job if head else {},
            "data": head.data if head else {},
            "chain": chain,
            "group": group,
            "collected": collected,
            "collected_parent": str(lineage.collected) if lineage.collected else None,
            "pins": [f"{token:06d}/{sequence:08d}" for token, sequence in sorted(pins)],
            "attempts": attempts,
            "quarantine": [incident.model_dump() for incident in incidents],
            "problems": problems,
        }
        typer.echo(json.dumps(fields, indent=2))
        return
    console = _console()
    console.print(_chain_tree(opened.run, store.url, lineage, chain, collected))
    if group is not None:
        console.print(_group_tree(group))
    console.print(_attempt_tree(lineage, attempts))
    for incident in incidents:
        place = f"{incident.token:06d}/{incident.sequence:08d}"
        console.print(
            f"quarantined  {place}, step {incident.step}: {incident.reason}", style="yellow", markup=False
        )
    for problem in problems:
        console.print(f"problem  {problem['key']}: {problem['reason']}", style="red", markup=False)


def _row(
    committed: Committed, attempts: dict[int, Attempt], rebased: set[tuple[int, int]], pins: set[tuple[int, int]]
) -> dict[str, Any]:
    """What is shown of one checkpoint: its costs, why it is what it is, and what has become of it."""
    manifest, ref = committed.manifest, committed.ref
    bounds = [chunk.bound for chunk in manifest.chunks if chunk.bound is not None]
    return {
        **checkpoint_row(committed, attempts),
        "decision": manifest.decision.model_dump(),
        "chunks": len(manifest.chunks),
        "bounded_chunks": len(bounds),
        "bound": max(bounds, default=None),
        "rebased": (ref.token, ref.sequence) in rebased,
        "pinned": (ref.token, ref.sequence) in pins,
    }


def _chain_tree(run: str, store_url: str, lineage: Lineage, chain: list[dict[str, Any]], collected: int) -> Tree:
    tree = Tree(f"[bold]{run}[/]  {store_url}")
    if lineage.head is not None:
        manifest = lineage.head.manifest
        version = manifest.data.get("digest") or "no data set"
        tree.add(f"job {manifest.job.get('name', '?')}, data {version}, next epoch {manifest.position.epoch}")
        if rhythm := _rhythm(manifest.decision.interval):
            tree.add(rhythm)
    if collected:
        tree.add(f"{collected} older checkpoints were collected")
    branch = tree
    for row in chain:
        if row["kind"] == "base":
            branch = tree.add(_checkpoint_line(row))
        else:
            branch.add(_checkpoint_line(row))
    if not chain:
        tree.add("no checkpoint yet")
    return tree


def _rhythm(interval: dict[str, Any]) -> str:
    """How often the newest attempt saves, and why."""
    if (seconds := interval.get("auto_seconds")) is not None:
        cost = interval.get("save_seconds")
        reason = f"a save costs {1000 * cost:.1f} ms" if cost is not None else "the cost of a save is not known yet"
        mean = interval.get("seconds_between_failures", 0.0)
        return f"saves every {seconds:.0f} s (auto): {reason}, one failure in {mean / 3600:.1f} h is expected"
    steps, seconds = interval.get("every_steps"), interval.get("every_seconds")
    parts = [f"{steps} steps" if steps else "", f"{seconds:g} s" if seconds else ""]
    return f"saves every {' or '.join(part for part in parts if part)}" if any(parts) else ""


def _checkpoint_line(row: dict[str, Any]) -> str:
    share = 100 * row["written_bytes"] / row["state_bytes"] if row["state_bytes"] else 0.0
    style = "bold cyan" if row["kind"] == "base" else "cyan"
    attempt = f"  attempt {row['attempt']}.{row['try']}" if row["attempt"] is not None else ""
    return (
        f"[{style}]{row['kind']:<5}[/] {row['checkpoint']}  step {row['step']:>6}  "
        f"{decimal(row['written_bytes']):>9} {share:5.1f} %  stall {1000 * row['stall_seconds']:.1f} ms{attempt}"
        f"{_remarks(row)}"
    )


def _remarks(row: dict[str, Any]) -> str:
    decision = row["decision"]
    modes = " ".join(f"{count} {mode}" for mode, count in sorted(decision["modes"].items()) if count)
    parts = [modes, decision["kind"]]
    if row["bound"] is not None:
        parts.append(f"[yellow]not exact: within {row['bound']:.2g} in {row['bounded_chunks']} chunks[/]")
    if row["rebased"]:
        parts.append("[green]compacted[/]")
    if row["pinned"]:
        parts.append("[green]pinned[/]")
    if decision["failed_saves"] or decision["skipped_saves"]:
        parts.append(f"[yellow]{decision['failed_saves']} saves failed, {decision['skipped_saves']} skipped[/]")
    return "".join(f"  {part}" for part in parts if part)


def _group_tree(group: dict[str, Any]) -> Tree:
    """How the ranks of the newest attempt share the work."""
    tree = Tree(f"[bold]ranks[/]  {group['world_size']}{_pace_text(group)}")
    one, share = group["one_rank"], group["scaling_efficiency"]
    if share is not None:
        alone = f"one rank alone: {one['samples_per_second']:,.0f} samples/s in run {one['run']}"
        tree.add(f"scaling efficiency {100 * share:.0f} % ({alone})")
    else:
        tree.add("scaling efficiency not measured: no run of the same job, epochs and params included, on one rank")
    for row in group["ranks"]:
        tree.add(f"rank {row['rank']}{_rank_text(row)}  wrote {decimal(row['written_bytes'])}")
    for episode in group["slow_ranks"]:
        until = f"until step {episode['until_step']}" if episode["until_step"] is not None else "and still did"
        tree.add(
            f"[yellow]slow[/] rank {episode['rank']} held up the others from step {episode['since_step']} {until}: "
            f"{1000 * episode['excess_seconds']:.1f} ms more in steps of {1000 * episode['step_seconds']:.1f} ms"
        )
    return tree


def _pace_text(group: dict[str, Any]) -> str:
    parts = []
    if (speed := group["samples_per_second"]) is not None:
        parts.append(f"{speed:,.0f} samples/s")
    if (seconds := group["step_seconds"]) is not None:
        parts.append(
            f"a step takes {1000 * seconds:.1f} ms, {100 * group['communication_share']:.0f} % communication"
        )
    return "".join(f"  {part}" for part in parts)


def _rank_text(row: dict[str, Any]) -> str:
    if row["own_seconds"] is None:
        return ""
    return f"  {1000 * row['own_seconds']:7.1f} ms of a step its own  waits {100 * row['waiting_share']:3.0f} %"


def _attempt_tree(lineage: Lineage, attempts: list[dict[str, Any]]) -> Tree:
    from training.checkpoint.outcomes import outcomes

    tree, ends = Tree("[bold]attempts[/]"), outcomes(lineage)
    for row in attempts:
        epochs = f"epochs {row['range'][0]} to {row['range'][1]}" if row["range"] else "library"
        number = f", attempt {row['attempt']} try {row['try']}" if row["attempt"] is not None else ""
        start = "died before it restored" if not row["sealed"] else f"from {row['restored'] or 'nothing'}"
        host = f" on {row['host']}" if row["host"] else ""
        branch = tree.add(f"token {row['token']}  {epochs}{number}{host}: {start}, {row['manifests']} checkpoints")
        for skipped in row["skipped"]:
            branch.add(f"[yellow]skipped[/] {escape(skipped['key'])}: {escape(skipped['reason'])}")
        if row["rollback"]:
            branch.add(f"[yellow]rolled back[/], {row['rollback']['skip_steps']} steps of data left out")
        ended = ends[row["token"]]
        style = "green" if row["verdict"] == "Done" else "yellow" if row["verdict"] else "dim"
        branch.add(f"[{style}]{escape(ended.verdict)}[/]")
        if after := ended.aftermath:
            branch.add(escape(after))
    return tree


def _console() -> Console:
    # Rows are cut at the console's width, which is 80 in a pipe; a narrow terminal wraps them instead.
    console = Console(highlight=False, soft_wrap=True)
    return Console(highlight=False, soft_wrap=True, width=max(console.width, 140))
