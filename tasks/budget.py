"""How often a run may be tried: counted in its store alone, so that no restart of a parent forgets it.

A new checkpoint refills the budget, and so does a person who starts the run again (`refill`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile

from tasks.order import RangeOrder
from training.checkpoint.document import Document, encode
from training.checkpoint.end import DONE, End, read_end
from training.checkpoint.history import head_ref, read_committed, sequences
from training.checkpoint.manifest import Ref
from training.checkpoint.quarantine import open_incident
from training.checkpoint.store import Store, put_document
from training.checkpoint.token import read_seal, token_numbers
from training.config import HealthConfig
from training.errors import Corrupt, Diverged, Fenced, Invalid, Preempted, Unavailable, error_of_kind

NOT_FAILURES = (DONE, Fenced.__name__, Preempted.__name__, Diverged.__name__)  # the last one is counted elsewhere
FINAL = (Invalid.__name__, Diverged.__name__)
REASON_CHARACTERS = 300
_REFILL_KEY = re.compile(r"tokens/([0-9]{6,})\.refill\.json", re.ASCII)


class GaveUp(Unavailable):
    """So many tries in a row committed nothing that another one at once is pointless."""

    @property
    def kind(self) -> str:
        """To a caller it is the same: retry later."""
        return Unavailable.__name__


class Refill(Document):
    """`tokens/000007.refill.json`: what happened up to token 7 does not count any more."""

    run: str
    token: int
    created: str = ""


@dataclass(frozen=True)
class Try:
    """A token that led nowhere, or the newest one that led to a checkpoint.

    Attributes:
        token: its number.
        end: how it ended, as far as somebody said.
        step: where it ended; None if it never came to train.
        committed: whether it left a checkpoint.
    """

    token: int
    end: End | None
    step: int | None
    committed: bool

    def __str__(self) -> str:
        if self.end is None:
            return f"token {self.token}: nobody said how it ended"
        reason = self.end.reason.splitlines()[0] if self.end.reason else "no reason given"
        return f"token {self.token}: {self.end.kind}, {reason[:REASON_CHARACTERS]}"


def check_budget(store: Store, order: RangeOrder, unclaimed: int = 0) -> None:
    """Return if another attempt is worth it. Ask when the one before is over, before the next one claims.

    Args:
        store: the run's store.
        order: the range.
        unclaimed: attempts in a row that died before they claimed a token, which the store cannot know of.

    Raises:
        GaveUp: too many tries in a row without a new checkpoint, or the same step failed too often.
        Invalid, Diverged: the last attempt ended so, and another one would.
    """
    tries = list(_tries(store))
    if tries and tries[0].end is not None and tries[0].end.kind in FINAL:
        _check_final(store, order, tries[0].end)
    failed = [each for each in tries if each.end is None or each.end.kind not in NOT_FAILURES]
    _check_step(store, order, failed)
    fruitless = [each for each in failed if not each.committed]
    count = len(fruitless) + unclaimed
    if count >= order.config.attempts_per_range:
        raise GaveUp(
            f"{count} tries in a row without a new checkpoint{_listed(fruitless)}",
            hint=_hint(store, order),
            run=order.run,
        )


def may_roll_back(store: Store, health: HealthConfig) -> bool:
    """Whether the next attempt starts from before the trouble that ended the last one as `Diverged`."""
    if health.on_divergence != "rollback":
        return False
    claims, seals = token_numbers(store)
    return open_incident(store, max(claims | seals, default=0) + 1, health.rollbacks) is not None


def refill(store: Store, run: str) -> None:
    """A person starts the run again: all tokens so far are forgiven."""
    claims, seals = token_numbers(store)
    newest = max(claims | seals, default=0)
    if newest:
        created = datetime.now(UTC).isoformat(timespec="seconds")
        key = f"tokens/{newest:06d}.refill.json"
        put_document(store, key, encode(Refill(run=run, token=newest, created=created)))


def _tries(store: Store) -> Iterator[Try]:
    """Tokens since the last refill, newest first, down to and with the newest that left a checkpoint."""
    claims, seals = token_numbers(store)
    head = head_ref(store)
    for token in range(max(claims | seals, default=0), _refilled(store), -1):
        committed = bool(sequences(store, token)) or (head is not None and head.token == token)
        try:
            end: End | None = read_end(store, token)
        except Corrupt:
            end = None
        step = _step(store, end) if end is not None and token in seals else None
        yield Try(token, end, step, committed)
        if committed:
            return


def _step(store: Store, end: End) -> int | None:
    """The step that was heard of last, at least the one that was committed or restored."""
    if end.by == "successor":  # it heard of none
        return None
    own = sequences(store, end.token)
    try:
        head = read_seal(store, end.token).head
        place = (end.token, own[-1]) if own else (head.token, head.sequence) if head else None
        certain = read_committed(store, *place).manifest.position.step if place else 0
    except Corrupt:
        certain = 0
    return max(end.step, certain)


def _refilled(store: Store) -> int:
    matches = (_REFILL_KEY.fullmatch(key) for key, _ in store.list("tokens/"))
    return max((int(match[1]) for match in matches if match), default=0)


def _check_final(store: Store, order: RangeOrder, end: End) -> None:
    if end.kind == Diverged.__name__ and may_roll_back(store, order.config.health):
        return
    raise error_of_kind(end.kind, end.reason, hint=_hint(store, order), run=order.run, token=end.token)


def _check_step(store: Store, order: RangeOrder, failed: list[Try]) -> None:
    known = [each for each in failed if each.step is not None]
    same = list(takewhile(lambda each: each.step == known[0].step, known))
    if len(same) >= order.config.supervisor.same_step_failures:
        raise GaveUp(
            f"{len(same)} tries in a row ended at step {same[0].step}{_listed(same)}",
            hint=_hint(store, order),
            run=order.run,
        )


def _listed(tries: list[Try]) -> str:
    return "".join(f"\n  {each}" for each in reversed(tries))


def _hint(store: Store, order: RangeOrder) -> str:
    head: Ref | None = head_ref(store)
    return (
        f"see `retoma show {order.run}`, cure the cause, then `retoma train JOB.yaml --run {order.run}` "
        f"goes on from {head or 'the beginning'}"
    )
