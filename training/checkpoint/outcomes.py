"""What became of each attempt: who said that it had ended and why, and what its end cost. For people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from training.checkpoint.end import DONE, End
from training.checkpoint.history import Attempt, Lineage
from training.checkpoint.manifest import Ref
from training.checkpoint.token import Rollback

Steps = Mapping[tuple[int, int], int]  # optimizer step of each checkpoint


@dataclass(frozen=True)
class Outcome:
    """The end of one attempt, and how the run went on. What nobody knows is None.

    Attributes:
        token: of the attempt.
        end: what was said about its end.
        step: the last step that it was heard of.
        next_token: the attempt that went on.
        restored: what that one started from; None with a `next_token`: from the beginning.
        restored_step: the step of that checkpoint.
        rollback: why that one did not start from the newest checkpoint.
        lost_steps: steps that were done and had to be done again.
        away_seconds: from the last sign of life to the seal of the next attempt, by wall clocks.
    """

    token: int
    end: End | None
    step: int | None
    next_token: int | None = None
    restored: Ref | None = None
    restored_step: int | None = None
    rollback: Rollback | None = None
    lost_steps: int | None = None
    away_seconds: float | None = None

    @property
    def verdict(self) -> str:
        """`Unavailable at step 73, said the supervisor, silent for 5.1 s: ...`: how the attempt ended."""
        end = self.end
        if end is None:
            return "nobody has said how it ended" if self.next_token else "nobody has said that it ended"
        at = f" at step {self.step}" if self.step is not None else ""
        silent = f", silent for {end.silent_seconds:.1f} s" if end.silent_seconds else ""
        reason = f": {end.reason.splitlines()[0]}" if end.reason else ""
        return f"{end.kind}{at}, said the {end.by}{silent}{reason}"

    @property
    def aftermath(self) -> str:
        """`token 4 went on from 000003/00000007, step 70: 3 steps lost, away for 4.2 s`; empty if nobody did."""
        if self.next_token is None:
            return ""
        step = f", step {self.restored_step}" if self.restored_step else ""
        costs = [f"{self.lost_steps} steps lost"] if self.lost_steps is not None else []
        costs += [f"away for {self.away_seconds:.1f} s"] if self.away_seconds is not None else []
        after = f": {', '.join(costs)}" if costs else ""
        why = f"; rolled back: {self.rollback.reason}" if self.rollback else ""
        return f"token {self.next_token} went on from {self.restored or 'the beginning'}{step}{after}{why}"


def outcomes(lineage: Lineage) -> dict[int, Outcome]:
    """By token. An attempt that died before its seal went on nowhere."""
    steps = {(c.ref.token, c.ref.sequence): c.manifest.position.step for c in lineage.chain}
    found, following = {}, None
    for attempt in reversed(lineage.attempts):
        found[attempt.token] = _outcome(attempt, following, steps, lineage)
        if attempt.seal is not None:
            following = attempt
    return dict(sorted(found.items()))


def _outcome(attempt: Attempt, following: Attempt | None, steps: Steps, lineage: Lineage) -> Outcome:
    end, step = attempt.end, _last_step(attempt, steps)
    if following is None or following.seal is None:
        return Outcome(attempt.token, end, step)
    head = following.seal.head
    restored_step = steps.get((head.token, head.sequence)) if head is not None else 0
    lost: int | None = None
    if end is not None and end.kind == DONE:
        lost = 0
    elif step is not None and restored_step is not None:
        lost = max(0, step - restored_step)
    return Outcome(
        token=attempt.token,
        end=end,
        step=step,
        next_token=following.token,
        restored=head,
        restored_step=restored_step,
        rollback=following.seal.rollback,
        lost_steps=lost,
        away_seconds=_seconds_between(_last_sign(attempt, lineage), following.seal.created),
    )


def _last_step(attempt: Attempt, steps: Steps) -> int | None:
    """What was said, and at least what it restored and committed. If nobody heard it, it may have gone on."""
    if attempt.end is None or attempt.seal is None or attempt.end.by == "successor":
        return None
    head = attempt.seal.head
    known = [step for (token, _), step in steps.items() if token == attempt.token]
    known.append(steps.get((head.token, head.sequence), 0) if head is not None else 0)
    return max(attempt.end.step, *known)


def _last_sign(attempt: Attempt, lineage: Lineage) -> float | None:
    """When it was certainly alive."""
    end = attempt.end
    if end is not None and end.by != "successor" and (ended := _seconds(end.created)) is not None:
        return ended - (end.silent_seconds or 0.0)
    signs = [c.manifest.writer.created for c in lineage.chain if c.ref.token == attempt.token]
    signs += [document.created for document in (attempt.claim, attempt.seal) if document is not None]
    return max((at for at in map(_seconds, signs) if at is not None), default=None)


def _seconds_between(then: float | None, created: str) -> float | None:
    now = _seconds(created)
    return round(max(0.0, now - then), 1) if now is not None and then is not None else None


def _seconds(created: str) -> float | None:
    try:
        return datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError):
        return None
