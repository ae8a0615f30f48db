"""What the store says about an attempt or a checkpoint that nobody else can tell about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from infra.mlflow_runs import RunStatus
from infra.mlflow_text import epoch_range, milliseconds
from training.checkpoint.end import DONE
from training.checkpoint.history import Attempt
from training.checkpoint.manifest import Committed
from training.errors import Fenced, Preempted, Unavailable

Place = tuple[int, int]


class Ended(NamedTuple):
    """How an attempt ended, and when (Unix milliseconds; None: just now)."""

    status: RunStatus
    reason: str
    at_milliseconds: int | None = None


def left_out(place: Place, attempts: Iterable[Attempt]) -> str | None:
    """Why a seal left a checkpoint out of the history; None if none did."""
    for attempt in attempts:
        if attempt.seal is None or attempt.token <= place[0]:
            continue
        head = attempt.seal.head
        if head is None or place > (head.token, head.sequence):
            name = f"{place[0]:06d}/{place[1]:08d}"
            reasons = [skipped.reason for skipped in attempt.seal.skipped if name in skipped.key]
            why = f": {'; '.join(reasons)}" if reasons else ""
            return f"token {attempt.token} started from {head or 'the beginning'}{why}"
    return None


def status_of(kind: str) -> RunStatus:
    """Status of an attempt's run by the kind of its end: killed is what was not its own fault."""
    if kind == DONE:
        return "FINISHED"
    return "KILLED" if kind in (Fenced.__name__, Preempted.__name__, Unavailable.__name__) else "FAILED"


def outcome(attempt: Attempt, known: Mapping[Place, Committed], *, superseded: bool) -> Ended:
    """How an attempt ended whose supervisor could not tell MLflow.

    As its end says; without one, finished if its range is complete in the store.
    """
    if attempt.end is not None:
        return Ended(status_of(attempt.end.kind), attempt.end.reason, milliseconds(attempt.end.created) or None)
    span = epoch_range(attempt)
    own = [c.manifest for (token, _), c in known.items() if token == attempt.token]
    reached = [manifest.position.epoch for manifest in own]
    head = attempt.seal.head if attempt.seal else None
    if head is not None and (head.token, head.sequence) in known:
        reached.append(known[head.token, head.sequence].manifest.position.epoch)
    signs = [manifest.writer.created for manifest in own]
    signs += [document.created for document in (attempt.claim, attempt.seal) if document]
    last = max(map(milliseconds, signs), default=0) or None
    if span is not None and max(reached, default=-1) >= span[1]:
        return Ended("FINISHED", "", last)
    reason = "a newer attempt took over" if superseded else "its supervisor did not say how it ended"
    return Ended("KILLED", reason, last)
