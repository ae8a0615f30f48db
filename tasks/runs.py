"""Which runs there are, told by their stores alone: no server is asked."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from infra.settings import Settings
from training.checkpoint.history import Attempt, Lineage, head_ref, read_committed, read_lineage
from training.checkpoint.manifest import Committed
from training.checkpoint.outcomes import Outcome, outcomes
from training.checkpoint.store import Store, open_store
from training.checkpoint.token import MARKER_KEY, Claim, read_claim, token_numbers
from training.config import Frozen, JobConfig
from training.errors import Corrupt, Invalid


class RunSummary(Frozen):
    """One run. `epoch` and `step` are what comes next; `updated` is informational."""

    run: str
    store_url: str
    job: str
    epoch: int
    epochs: int | None
    step: int
    finished: bool
    head: str | None
    attempts: int
    updated: str
    requested: str | None  # see `tasks.plan.requested_digest`


def run_names(settings: Settings) -> list[str]:
    """Names of all runs below the root of the stores."""
    if "://" not in settings.checkpoints_url:
        root = Path(settings.checkpoints_url)
        found = root.iterdir() if root.is_dir() else iter(())
        return sorted(folder.name for folder in found if (folder / MARKER_KEY).is_file())
    keys = (key for key, _ in open_store(settings.checkpoints_url).list(""))
    return sorted(key.removesuffix(f"/{MARKER_KEY}") for key in keys if key.endswith(f"/{MARKER_KEY}"))


def list_runs(settings: Settings) -> list[RunSummary]:
    """All runs, those that were worked on last come last. Reads two small objects of each."""
    summaries = (summarise(run, settings.run_url(run)) for run in run_names(settings))
    return sorted(summaries, key=lambda summary: (summary.updated, summary.run))


def summarise(run: str, store_url: str) -> RunSummary:
    """One run from its newest claim and its head; damage shows as what is missing."""
    store = open_store(store_url)
    claim, head = _newest_claim(store), _head(store)
    who = claim.who if claim else {}
    config = _config(who)
    position = head.manifest.position if head else None
    told = head.manifest.job if head else {}
    epochs = config.epochs if config else told.get("epochs")
    epoch = position.epoch if position else 0
    return RunSummary(
        run=run,
        store_url=store_url,
        job=config.job if config else str(told.get("identity", {}).get("job", "")),
        epoch=epoch,
        epochs=epochs,
        step=position.step if position else 0,
        finished=epochs is not None and epoch >= epochs,
        head=str(head.ref) if head else None,
        attempts=len(token_numbers(store)[0]),
        updated=max(head.manifest.writer.created if head else "", claim.created if claim else ""),
        requested=who.get("requested"),
    )


def unfinished(settings: Settings, requested: str) -> RunSummary | None:
    """The newest run of the same training that has not reached its end."""
    same = [s for s in list_runs(settings) if s.requested == requested and not s.finished]
    return same[-1] if same else None


def find_run(settings: Settings, run: str) -> tuple[Store, Lineage]:
    """The store of a run, and its whole history.

    Raises:
        Invalid: there is no such run; names those that sound alike.
    """
    names = run_names(settings)
    if run not in names:
        near = difflib.get_close_matches(run, names, n=3, cutoff=0.4) or names[-3:]
        there = f"did you mean {' or '.join(near)}?" if near else "there is none yet"
        raise Invalid(f"no run {run!r} in {settings.checkpoints_url}; {there}", hint="retoma runs", run=run)
    store = open_store(settings.run_url(run))
    return store, read_lineage(store)


def checkpoint_row(committed: Committed, attempts: dict[int, Attempt]) -> dict[str, Any]:
    """What is shown of one checkpoint."""
    manifest = committed.manifest
    attempt = attempts.get(manifest.token)
    who = attempt.claim.who if attempt and attempt.claim else {}
    return {
        "checkpoint": str(committed.ref),
        "token": manifest.token,
        "sequence": manifest.sequence,
        "kind": manifest.kind,
        "parent": str(manifest.parent) if manifest.parent else None,
        "epoch": manifest.position.epoch,
        "step": manifest.position.step,
        "written_bytes": manifest.costs.written_bytes,
        "state_bytes": manifest.costs.state_bytes,
        "stall_seconds": manifest.costs.stall_seconds,
        "attempt": who.get("attempt"),
        "try": who.get("try"),
        "loss": manifest.health.loss,
        "digest": committed.ref.digest,
        "state_digest": manifest.state_digest,
        "created": manifest.writer.created,
    }


def attempt_row(attempt: Attempt, outcome: Outcome) -> dict[str, Any]:
    """What is shown of one token: who claimed it, what it restored and had to skip, how it ended, what followed."""
    who = attempt.claim.who if attempt.claim else {}
    seal, end = attempt.seal, attempt.end
    return {
        "token": attempt.token,
        "range": who.get("range"),
        "attempt": who.get("attempt"),
        "try": who.get("try"),
        "host": who.get("host"),
        "flow_run_id": who.get("flow_run_id"),
        "claimed": attempt.claim.created if attempt.claim else None,
        "sealed": seal is not None,
        "restored": str(seal.head) if seal and seal.head else None,
        "skipped": [skipped.model_dump() for skipped in seal.skipped] if seal else [],
        "manifests": attempt.manifests,
        "rollback": seal.rollback.model_dump() if seal and seal.rollback else None,
        "verdict": end.kind if end else None,
        "verdict_by": end.by if end else None,
        "reason": end.reason if end else None,
        "silent_seconds": end.silent_seconds if end else None,
        "stack": end.stack if end else None,
        "ended": end.created if end else None,
        "last_step": outcome.step,
        "next_token": outcome.next_token,
        "next_restored": str(outcome.restored) if outcome.restored else None,
        "next_restored_step": outcome.restored_step,
        "lost_steps": outcome.lost_steps,
        "away_seconds": outcome.away_seconds,
    }


def attempt_rows(lineage: Lineage) -> list[dict[str, Any]]:
    """One for each token, oldest first."""
    ends = outcomes(lineage)
    return [attempt_row(attempt, ends[attempt.token]) for attempt in lineage.attempts]


def attempts_text(lineage: Lineage) -> str:
    """Markdown: a table of all attempts, for the orchestrator's pages."""
    ends = outcomes(lineage)
    lines = ["| token | attempt | started from | how it ended | what followed |", "|---|---|---|---|---|"]
    for attempt in lineage.attempts:
        who = attempt.claim.who if attempt.claim else {}
        number = f"{who['attempt']}.{who.get('try', 1)}" if "attempt" in who else ""
        start = str(attempt.seal.head or "the beginning") if attempt.seal else "died before it restored"
        ended = ends[attempt.token]
        cells = (str(attempt.token), number, start, ended.verdict, ended.aftermath)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def _newest_claim(store: Store) -> Claim | None:
    for token in sorted(token_numbers(store)[0], reverse=True):
        try:
            claim = read_claim(store, token)
        except Corrupt:
            continue
        if "config" in claim.who:
            return claim
    return None


def _head(store: Store) -> Committed | None:
    ref = head_ref(store)
    return read_committed(store, ref.token, ref.sequence) if ref else None


def _config(who: dict[str, Any]) -> JobConfig | None:
    try:
        return JobConfig.model_validate(who["config"])
    except (KeyError, ValidationError):  # a run that was trained with the library alone, or by another version
        return None
