"""The start of an attempt that has claimed its token: look, restore, and seal what was really restored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from training.checkpoint.quarantine import RollbackPolicy, open_incident, rollback_of
from training.checkpoint.restore import Found, find_newest
from training.checkpoint.store import Store
from training.checkpoint.token import Rollback, Seal, Skipped, seal


class Opened(NamedTuple):
    """What an attempt starts from: None is the beginning of the run."""

    found: Found | None
    rollback: Rollback | None


def open_attempt(
    store: Store, run: str, token: int, *, created: str, notes: Iterable[Skipped], policy: RollbackPolicy | None
) -> Opened:
    """Restore the newest intact checkpoint, or the newest healthy one, and seal it.

    Args:
        store: the run's store.
        run: its name.
        token: claimed by the attempt.
        created: wall clock, informational.
        notes: what is wrong with the store already.
        policy: whether to roll back after an incident of the attempt before.

    Raises:
        Corrupt: the run has checkpoints, and none is intact.
        Diverged: none is from before the incident.
        Fenced: a newer attempt has taken over.
    """
    incident = open_incident(store, token, policy.most) if policy is not None else None
    found, skipped = find_newest(store, run, before=token, notes=notes, incident=incident)
    head = found.state.checkpoint.ref if found is not None else None  # a state may be empty
    rollback = rollback_of(store, token, head, incident, policy.skip_steps) if policy is not None else None
    seal(
        store,
        Seal(run=run, token=token, head=head, skipped=tuple(skipped), rollback=rollback, created=created),
    )
    return Opened(found, rollback)
