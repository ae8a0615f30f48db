"""What was found to be unhealthy and not committed, and what the next attempt does about it.

    quarantine/000003/00000042.json     why sequence 42 of token 3 was not committed

An incident is answered by the next seal: that attempt starts from a checkpoint from before the trouble began, if
the user asked for rollbacks, and from the newest one otherwise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pydantic import Field

from training.checkpoint.document import Document, decode, encode
from training.checkpoint.manifest import Ref
from training.checkpoint.store import Store, put_document
from training.checkpoint.token import Rollback, Seal, Skipped, read_seal, token_numbers
from training.errors import Corrupt

_KEY = re.compile(r"quarantine/([0-9]{6,})/([0-9]{8,})\.json", re.ASCII)


class Incident(Document):
    """`quarantine/000003/00000042.json`. `name` is that of a tensor, or `loss`."""

    run: str
    token: int = Field(ge=1)
    sequence: int = Field(ge=0)
    name: str
    reason: str
    epoch: int = Field(0, ge=0)  # where it was found
    step: int = Field(0, ge=0)
    since_step: int = Field(0, ge=0)  # the first step that is not healthy
    created: str = ""  # wall clock, informational


@dataclass(frozen=True)
class RollbackPolicy:
    """What an attempt does after an incident of the one before.

    Attributes:
        most: rollbacks of a run, all attempts together.
        skip_steps: steps whose data the caller leaves out after a rollback; kept in the seal, see `Rollback`.
    """

    most: int
    skip_steps: int = 0


def incident_key(token: int, sequence: int) -> str:
    """`quarantine/000003/00000042.json`."""
    return f"quarantine/{token:06d}/{sequence:08d}.json"


def put_incident(store: Store, incident: Incident) -> None:
    """Keep it; the first one of a sequence is believed."""
    put_document(store, incident_key(incident.token, incident.sequence), encode(incident))


def read_incidents(store: Store, token: int | None = None, notes: list[Skipped] | None = None) -> list[Incident]:
    """Those of one token or of all, oldest first. `notes` receives what is damaged."""
    found = []
    prefix = "quarantine/" if token is None else f"quarantine/{token:06d}/"
    for key in sorted(key for key, _ in store.list(prefix) if _KEY.fullmatch(key)):
        try:
            found.append(decode(store.get(key), Incident, key))
        except Corrupt as error:
            if notes is not None:
                notes.append(Skipped(key=key, reason=error.message))
    return found


def open_incident(store: Store, before: int, most: int) -> Incident | None:
    """The trouble that token `before` would have to roll back for: the earliest of its predecessor's incidents.

    None: there was none, a seal has answered it, or the run was rolled back `most` times already.
    """
    sealed = sorted(token for token in token_numbers(store)[1] if token < before)
    incidents = read_incidents(store, sealed[-1]) if sealed else []
    if not incidents or len(_answered(store, sealed)) >= most:
        return None
    return min(incidents, key=lambda incident: incident.since_step)


def rollback_of(
    store: Store, before: int, head: Ref | None, incident: Incident | None, skip_steps: int
) -> Rollback | None:
    """What the seal of token `before`, which starts from `head`, says about rollbacks.

    An attempt that starts where one that rolled back had started, since that one committed nothing, inherits: it
    must leave out the same data to end with the same bits. With an incident of its own it leaves out more.
    """
    sealed = [token for token in token_numbers(store)[1] if token < before]
    earlier: Rollback | None = None
    if sealed:
        seal = _seal_or_none(store, max(sealed))
        earlier = seal.rollback if seal is not None and seal.head == head else None
    if incident is None:
        return earlier
    return Rollback(
        token=incident.token,
        sequence=incident.sequence,
        since_step=incident.since_step,
        reason=incident.reason,
        skip_steps=skip_steps + (earlier.skip_steps if earlier is not None else 0),
    )


def _answered(store: Store, sealed: list[int]) -> set[tuple[int, int]]:
    seals = (_seal_or_none(store, token) for token in sealed)
    return {(seal.rollback.token, seal.rollback.sequence) for seal in seals if seal and seal.rollback}


def _seal_or_none(store: Store, token: int) -> Seal | None:
    try:
        return read_seal(store, token)
    except Corrupt:
        return None
