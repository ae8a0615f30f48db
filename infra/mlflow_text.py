"""What MLflow is told about runs, attempts and checkpoints: names, parameters, tags and notes.

MLflow cuts long values silently, so they are cut here, visibly. A checkpoint's parameters are the machine-readable
part; notes are markdown for people.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from training.checkpoint.history import Attempt
from training.checkpoint.manifest import Committed, Ref
from training.checkpoint.outcomes import Outcome
from training.config import JobConfig

NOTE = "mlflow.note.content"
RUN, TOKEN, STORE = "retoma.run", "retoma.token", "retoma.store"
VOID = "retoma.void"
IDENTITY, WORLD_SIZE = "retoma.identity", "retoma.world_size"  # of an attempt: what it computes, by how many ranks
REASON = "retoma.reason"
CONFIG = "retoma.config"

PARAM_CHARACTERS = 6000
TAG_CHARACTERS = 8000
DIGEST_CHARACTERS = 36


def cut(value: object, characters: int) -> str:
    """Text of at most so many characters; a cut one ends in `...`."""
    text = "" if value is None else str(value)
    return text if len(text) <= characters else text[: characters - 3] + "..."


def store_address(url: str) -> str:
    """Absolute and without a host: means the same in another folder; a plain path becomes `file:///...`."""
    return url if "://" in url else Path(url).expanduser().absolute().as_uri()


def milliseconds(created: str) -> int:
    """Unix milliseconds of an ISO time of the store; 0 where there is none. For display only."""
    try:
        return max(0, int(datetime.fromisoformat(created).timestamp() * 1000))
    except (ValueError, OverflowError):
        return 0


def flatten(config: JobConfig) -> dict[str, str]:
    """Dotted parameters of a resolved configuration."""
    flat: dict[str, str] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = cut(value, PARAM_CHARACTERS)

    walk("", config.model_dump(mode="json"))
    return flat


def checkpoint_name(committed: Committed) -> str:
    """`delta-000003-00000042`: kind, token, sequence. Sorts by age within a kind."""
    manifest = committed.manifest
    return f"{manifest.kind}-{manifest.token:06d}-{manifest.sequence:08d}"


def ratio(committed: Committed) -> float | None:
    """Bytes written for each byte of state; None for an empty state."""
    costs = committed.manifest.costs
    return costs.written_bytes / costs.state_bytes if costs.state_bytes else None


def checkpoint_params(committed: Committed, store_url: str) -> dict[str, str]:
    """Parameters of a checkpoint's LoggedModel."""
    manifest, share = committed.manifest, ratio(committed)
    return {
        "run": manifest.run,
        "token": str(manifest.token),
        "sequence": str(manifest.sequence),
        "kind": manifest.kind,
        "epoch": str(manifest.position.epoch),
        "step": str(manifest.position.step),
        "sample": str(manifest.position.sample),
        "parent": str(manifest.parent) if manifest.parent else "none",
        "digest": committed.ref.digest,
        "state_digest": manifest.state_digest,
        "written_bytes": str(manifest.costs.written_bytes),
        "state_bytes": str(manifest.costs.state_bytes),
        "ratio": "" if share is None else f"{share:.4f}",
        "store": cut(store_url, PARAM_CHARACTERS),
        "manifest": manifest.key,
    }


def checkpoint_note(committed: Committed, store_url: str) -> str:
    """Markdown for the page of a checkpoint."""
    manifest, costs, share = committed.manifest, committed.manifest.costs, ratio(committed)
    writer = manifest.writer
    on = f"a delta on `{manifest.parent}`" if manifest.kind == "delta" else "a base: restores alone"
    size = f"{costs.written_bytes:,} of {costs.state_bytes:,} bytes" + (f" ({share:.1%})" if share else "")
    lines = [
        f"Checkpoint `{committed.ref}` of run **{manifest.run}**, {on}.",
        "",
        f"- continues at epoch {manifest.position.epoch}, step {manifest.position.step}",
        f"- wrote {size}; stalled training for {costs.stall_seconds * 1000:.1f} ms",
        f"- committed by `{store_url}/{manifest.key}`, digest `{committed.ref.digest}`",
        f"- written by {writer.host or 'unknown host'}, pid {writer.pid}, {writer.created}",
        "",
        f"`retoma show {manifest.run}` prints the whole chain.",
    ]
    return cut("\n".join(lines), TAG_CHARACTERS)


def epoch_range(attempt: Attempt) -> tuple[int, int] | None:
    """The half-open epoch range that the claim names."""
    found = (attempt.claim.who if attempt.claim else {}).get("range")
    if isinstance(found, list | tuple) and len(found) == 2 and all(isinstance(n, int) for n in found):
        return found[0], found[1]
    return None


def attempt_name(attempt: Attempt) -> str:
    """`epochs 2-4, token 3`: the half-open range and the token."""
    span = epoch_range(attempt)
    return f"epochs {span[0]}-{span[1]}, token {attempt.token}" if span else f"token {attempt.token}"


def attempt_tags(attempt: Attempt, outcome: Outcome | None = None) -> dict[str, str]:
    """Tags of an attempt's child run, as far as its claim, its seal and its end tell them."""
    who = attempt.claim.who if attempt.claim else {}
    span = epoch_range(attempt)
    # plain facts only: the whole configuration is an artifact of the parent run
    tags = {f"retoma.{k}": cut(v, TAG_CHARACTERS) for k, v in who.items() if isinstance(v, str | int | float)}
    if span:
        tags["retoma.range"] = f"{span[0]}-{span[1]}"
    if attempt.seal:
        tags["retoma.restored_from"] = str(attempt.seal.head or "nothing: started from the beginning")
        if attempt.seal.skipped:
            lines = [f"{skipped.key}: {skipped.reason}" for skipped in attempt.seal.skipped]
            tags["retoma.skipped"] = cut("\n".join(lines), TAG_CHARACTERS)
        if attempt.seal.rollback:
            tags["retoma.rollback"] = cut(attempt.seal.rollback.reason, TAG_CHARACTERS)
    if outcome is not None:
        tags.update(_outcome_tags(outcome))
    tags[NOTE] = attempt_note(attempt, outcome)
    return tags


def _outcome_tags(outcome: Outcome) -> dict[str, str]:
    end = outcome.end
    facts = {
        "verdict": end.kind if end else None,
        "verdict_by": end.by if end else None,
        "silent_seconds": end.silent_seconds if end else None,
        "stack": end.stack if end else None,
        "last_step": outcome.step,
        "next_token": outcome.next_token,
        "next_restored": (outcome.restored or "nothing") if outcome.next_token else None,
        "lost_steps": outcome.lost_steps,
        "away_seconds": outcome.away_seconds,
    }
    return {f"retoma.{key}": cut(value, TAG_CHARACTERS) for key, value in facts.items() if value is not None}


def attempt_note(attempt: Attempt, outcome: Outcome | None = None) -> str:
    """Markdown for the page of an attempt."""
    span = epoch_range(attempt)
    what = f"epochs {span[0]} up to {span[1]}" if span else "a part of the run"
    lines = [f"One attempt at {what}, with fencing token {attempt.token}.", ""]
    if attempt.seal is None:
        lines.append("It has not started: no seal, so nothing was restored and nothing can have been committed.")
    elif attempt.seal.head is None:
        lines.append("It started from the beginning.")
    else:
        lines.append(f"It resumed from checkpoint `{attempt.seal.head}` (an *input* below).")
    for skipped in attempt.seal.skipped if attempt.seal else ():
        lines.append(f"- skipped `{skipped.key}`: {skipped.reason}")
    if outcome is not None and outcome.end is not None:
        lines += ["", f"How it ended: {outcome.verdict}.", "", outcome.aftermath]
        lines += ["", "```", outcome.end.stack, "```"] if outcome.end.stack else []
    return cut("\n".join(lines), TAG_CHARACTERS)


def run_note(run: str, store_url: str, chain: list[Committed], attempts: list[Attempt]) -> str:
    """Markdown for the page of the whole training."""
    head: Ref | None = chain[-1].ref if chain else None
    bases = sum(c.manifest.kind == "base" for c in chain)
    lines = [
        f"Training **{run}**: {len(attempts)} attempts, {bases} bases and {len(chain) - bases} deltas.",
        "",
        f"- head: `{head or 'none yet'}`"
        + (f", continues at epoch {chain[-1].manifest.position.epoch}" if chain else ""),
        f"- store: `{store_url}`",
        "- lineage: artifact `lineage.html` (picture) and `lineage.json` (table)",
    ]
    return cut("\n".join(lines), TAG_CHARACTERS)
