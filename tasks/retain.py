"""Looking after what a run has stored: long chains become short, and what nobody needs goes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from infra.mlflow_models import CHECKPOINT
from infra.mlflow_registry import MlflowRegistry
from infra.settings import Settings
from tasks.runs import run_names, summarise
from training.checkpoint.care.collect import GRACE_SECONDS, KEEP_BASES, collect
from training.checkpoint.care.compact import MAX_LINKS, compact, compactable
from training.checkpoint.document import wall_clock
from training.checkpoint.store import Store, open_store
from training.config import Frozen
from training.errors import Invalid, RetomaError

_THREADS = 4
logger = logging.getLogger(__name__)

Name = tuple[int, int]  # token and sequence


class Care(Frozen):
    """What to do.

    Attributes:
        keep: newest bases that stay, with all that is newer.
        grace_seconds: nothing younger goes, by the store's own clock.
        max_links: a checkpoint whose restore reads more of them is compacted.
        restore_seconds: the same, by how long the restore is predicted to take; None: no limit.
        dry_run: compact nothing and delete nothing.
    """

    keep: int = KEEP_BASES
    grace_seconds: float = GRACE_SECONDS
    max_links: int = MAX_LINKS
    restore_seconds: float | None = None
    dry_run: bool = False


class Retained(Frozen):
    """What became of one run.

    Attributes:
        compacted: the checkpoint that got a short form, as text.
        collected: how many checkpoints have gone, or would.
        waiting: why nothing was deleted, if something stood against it that will pass.
        errors: what went wrong; the rest was done.
    """

    run: str
    compacted: str | None = None
    kept: int = 0
    collected: int = 0
    freed_bytes: int = 0
    waiting: str = ""
    errors: tuple[str, ...] = ()

    def __str__(self) -> str:
        """One line."""
        parts = [f"{self.kept} checkpoints kept, {self.collected} collected, {self.freed_bytes} bytes freed"]
        parts += [f"{self.compacted} compacted"] if self.compacted else []
        parts += [f"nothing deleted: {self.waiting}"] if self.waiting else []
        return f"{self.run}: {'; '.join([*parts, *self.errors])}"


def retain(
    settings: Settings, registry: MlflowRegistry, runs: Sequence[str] | None = None, care: Care | None = None
) -> list[Retained]:
    """Compact and collect the stores of some runs, or of all. What goes wrong with one does not stop the next.

    While MLflow does not answer nobody knows which checkpoints registered models need: then nothing is deleted, and
    compaction goes on.
    """
    names = list(runs) if runs is not None else run_names(settings)
    return [retain_run(settings, registry, name, care or Care()) for name in names]


def retain_run(settings: Settings, registry: MlflowRegistry, run: str, care: Care) -> Retained:
    """One run. Never raises an error of this project: it is in what is returned."""
    store, errors, compacted = open_store(settings.run_url(run)), [], None
    try:
        compacted = None if care.dry_run else _compact(store, run, care)
    except RetomaError as error:
        errors.append(f"not compacted: {error.kind}: {error.message}")
    try:
        report = collect(
            store,
            keep=care.keep,
            grace_seconds=care.grace_seconds,
            aliases=registered_checkpoints(registry, run),
            running=not summarise(run, settings.run_url(run)).finished,
            dry_run=care.dry_run,
            created=wall_clock(),
        )
    except RetomaError as error:
        errors.append(f"not collected: {error.kind}: {error.message}")
        return Retained(run=run, compacted=compacted, errors=tuple(errors))
    return Retained(
        run=run,
        compacted=compacted,
        kept=len(report.kept),
        collected=len(report.collected),
        freed_bytes=report.freed_bytes,
        waiting=report.reason,
        errors=tuple(errors),
    )


def registered_checkpoints(registry: MlflowRegistry, run: str) -> set[Name]:
    """Checkpoints of a run that are versions of a registered model, with an alias or without: a version has no
    weights of its own.

    Raises:
        Unavailable: MLflow does not answer.
        Invalid: it refuses, or a version of this run does not say which checkpoint it is.
    """
    parent = registry.runs.parent(run)
    found: set[Name] = set()
    page: str | None = None
    while parent is not None:
        with registry.connection.asking(f"looking for models of run {run}") as client:
            rows = client.search_model_versions(f"run_id = '{parent.id}'", max_results=200, page_token=page)
        found |= {_place(f"{row.name}/{row.version}", dict(row.tags)) for row in rows}
        page = rows.token
        if not page:
            break
    return found


def _place(label: str, tags: dict[str, str]) -> Name:
    token, _, sequence = tags.get(CHECKPOINT, "").partition(" ")[0].partition("/")
    if not (token.isdigit() and sequence.isdigit()):
        raise Invalid(
            f"model version {label} does not name its checkpoint, so that nothing can be deleted safely",
            hint="delete the version in MLflow, or pin its checkpoint and give it the tag again",
        )
    return int(token), int(sequence)


def _compact(store: Store, run: str, care: Care) -> str | None:
    found = compactable(store, run, max_links=care.max_links, restore_seconds=care.restore_seconds)
    if found is None:
        return None
    ref = found.checkpoint.ref
    threads = min(_THREADS, os.cpu_count() or 1)
    done = compact(store, ref.token, ref.sequence, run, threads=threads, created=wall_clock())
    logger.info("run %s: %s: %s; %s", run, ref, found.reason, done.reason)
    return str(ref) if done.written else None
