"""The fencing token: a number that only grows, and the right to commit.

Opening an attempt: claim a token, *then* look at the history, restore, seal. Committing: look for a newer claim
before and after the manifest. Either the newer attempt sees our commit, or we see its claim; never neither.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import Field

from training.checkpoint.document import Document, decode, encode
from training.checkpoint.manifest import Part, Ref
from training.checkpoint.store import NotFound, Store, put_document
from training.errors import Corrupt, Fenced, Invalid

MARKER_KEY = "retoma.json"
_TOKEN_KEY = re.compile(r"tokens/([0-9]{6,})\.(claim|seal)\.json", re.ASCII)


class Marker(Document):
    """`retoma.json`: this folder is the store of one run."""

    run: str


class Claim(Document):
    """`tokens/000003.claim.json`. Who and when are for people; nothing decides by them."""

    run: str
    token: int
    who: dict[str, Any] = Field(default_factory=dict)
    created: str = ""


class Skipped(Part):
    """A checkpoint that was not restored, or a note about the history, and why."""

    key: str
    reason: str


class Rollback(Part):
    """Why an attempt started from an older checkpoint than the newest intact one: the later are not healthy."""

    token: int = Field(ge=1)  # and sequence: of the incident, see `quarantine`
    sequence: int = Field(ge=0)
    since_step: int = Field(ge=0)  # the first step that is not healthy
    reason: str = ""
    skip_steps: int = Field(0, ge=0)  # steps whose data is left out, from the restored checkpoint on


class Seal(Document):
    """`tokens/000003.seal.json`: what the attempt really started from."""

    run: str
    token: int
    head: Ref | None = None
    skipped: tuple[Skipped, ...] = ()
    rollback: Rollback | None = None
    created: str = ""


C = TypeVar("C", Claim, Seal)


def claim_key(token: int) -> str:
    """Key of the claim of a token."""
    return f"tokens/{token:06d}.claim.json"


def seal_key(token: int) -> str:
    """Key of the seal of a token."""
    return f"tokens/{token:06d}.seal.json"


def run_of(store: Store, notes: list[Skipped] | None = None) -> str | None:
    """The run that the store holds, or None for a new store.

    The marker is a convenience: where it is lost or damaged, the claims say the same.

    Args:
        store: the store.
        notes: receives what is wrong with the marker.
    """
    try:
        return decode(store.get(MARKER_KEY), Marker, MARKER_KEY).run
    except Corrupt as error:
        run = _run_of_claims(store)
        if notes is not None and (run is not None or not isinstance(error, NotFound)):
            notes.append(Skipped(key=MARKER_KEY, reason=error.message))
        return run


def _run_of_claims(store: Store) -> str | None:
    for token in sorted(token_numbers(store)[0], reverse=True):
        try:
            return read_claim(store, token).run
        except Corrupt:
            continue
    return None


def mark_run(store: Store, run: str) -> list[Skipped]:
    """Create the run's marker, or check that the store belongs to this run.

    Returns:
        What is wrong with the marker. It is not needed to restore, so that its loss stops nobody.

    Raises:
        Invalid: the store holds another run.
    """
    notes: list[Skipped] = []
    found = run_of(store, notes)
    if found in (None, run):
        if put_document(store, MARKER_KEY, encode(Marker(run=run))):
            return notes
        found = run_of(store)  # somebody else was first, or the marker is damaged
    if found not in (None, run):
        raise Invalid(
            f"{store.url} holds run {found!r}, not {run!r}", hint="give each run a folder of its own", run=run
        )
    return notes


def prove_put_if_absent(store: Store, run: str) -> None:
    """Refuse a store that overwrites where it was asked not to: fencing would be an illusion there."""
    data = store.get(MARKER_KEY)
    if store.put_if_absent(MARKER_KEY, data + b" ") or store.get(MARKER_KEY) != data:
        raise Invalid(
            f"{store.url} does not honour put-if-absent",
            hint="use a store with conditional writes; without them two attempts can destroy each other's state",
            run=run,
        )


def token_numbers(store: Store) -> tuple[set[int], set[int]]:
    """Numbers of all claims and of all seals."""
    claims: set[int] = set()
    seals: set[int] = set()
    for key, _ in store.list("tokens/"):
        if match := _TOKEN_KEY.fullmatch(key):  # not a backup or a partial copy that somebody left there
            (claims if match[2] == "claim" else seals).add(int(match[1]))
    return claims, seals


def claim(store: Store, run: str, who: dict[str, Any], created: str = "") -> int:
    """Take the next token. From here every older attempt is unable to have a commit acknowledged.

    Numbers stay dense, since the holder of token t looks for the claim t + 1: where somebody deleted a claim
    whose seal or manifests are still there, it is put back first.
    """
    claims, seals = token_numbers(store)
    newest = max(claims | seals, default=0)
    while store.list(f"manifests/{newest + 1:06d}/"):
        newest += 1
    for token in sorted(set(range(1, newest + 1)) - claims):
        store.put_if_absent(claim_key(token), encode(Claim(run=run, token=token, who={"restored_by": who})))
    token = newest + 1
    while not store.put_if_absent(claim_key(token), encode(Claim(run=run, token=token, who=who, created=created))):
        token += 1
    return token


def check_not_fenced(store: Store, token: int, run: str) -> None:
    """Raise `Fenced` if a newer token was claimed."""
    if store.exists(claim_key(token + 1)):
        raise Fenced(f"token {token} is fenced: a newer attempt claimed token {token + 1}", run=run, token=token)


def seal(store: Store, document: Seal) -> None:
    """Put the seal of an attempt; repeating the same seal is a no-op.

    Raises:
        Fenced: a newer attempt exists, or the token was sealed by somebody else.
    """
    check_not_fenced(store, document.token, document.run)
    if not put_document(store, seal_key(document.token), encode(document)):
        raise Fenced(
            f"token {document.token} was sealed by another process", run=document.run, token=document.token
        )


def read_claim(store: Store, token: int) -> Claim:
    """Raises `Corrupt` if it is damaged or belongs under another key."""
    return _read(store, claim_key(token), Claim, token)


def read_seal(store: Store, token: int) -> Seal:
    """Raises `Corrupt` if it is damaged or belongs under another key."""
    return _read(store, seal_key(token), Seal, token)


def _read(store: Store, key: str, model: type[C], token: int) -> C:
    found = decode(store.get(key), model, key)
    if found.token != token:
        raise Corrupt(f"{key}: expected token {token}, actual {found.token}", key=key)
    return found
