"""The fencing token: a number that only grows, and the right to commit.

Opening an attempt: claim a token, *then* look at the history, restore, seal. Committing: look for a newer claim
before and after the manifest. Either the newer attempt sees our commit, or we see its claim; never neither.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from training.checkpoint.document import Document, decode, encode
from training.checkpoint.manifest import Part, Ref
from training.checkpoint.store import Store, put_document
from training.errors import Corrupt, Fenced, Invalid

MARKER_KEY = "retoma.json"


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


class Seal(Document):
    """`tokens/000003.seal.json`: what the attempt really started from."""

    run: str
    token: int
    head: Ref | None = None
    skipped: tuple[Skipped, ...] = ()
    created: str = ""


def claim_key(token: int) -> str:
    """Key of the claim of a token."""
    return f"tokens/{token:06d}.claim.json"


def seal_key(token: int) -> str:
    """Key of the seal of a token."""
    return f"tokens/{token:06d}.seal.json"


def mark_run(store: Store, run: str) -> None:
    """Create the run's marker, or check that the store belongs to this run.

    Raises:
        Invalid: the store holds another run.
        Corrupt: the marker is damaged.
    """
    data = encode(Marker(run=run))
    if put_document(store, MARKER_KEY, data):
        return
    found = decode(store.get(MARKER_KEY), Marker, MARKER_KEY).run
    if found != run:
        raise Invalid(
            f"{store.url} holds run {found!r}, not {run!r}", hint="give each run a folder of its own", run=run
        )


def prove_put_if_absent(store: Store, run: str) -> None:
    """Refuse a store that overwrites where it was asked not to: fencing would be an illusion there."""
    data = encode(Marker(run=run))
    if store.put_if_absent(MARKER_KEY, data):
        raise Corrupt(f"{MARKER_KEY} vanished from {store.url}", key=MARKER_KEY)
    if store.put_if_absent(MARKER_KEY, data + b" ") or store.get(MARKER_KEY) != data:
        raise Invalid(
            f"{store.url} does not honour put-if-absent",
            hint="use a store with conditional writes; without them two attempts can destroy each other's state",
        )


def token_numbers(store: Store) -> tuple[set[int], set[int]]:
    """Numbers of all claims and of all seals."""
    claims: set[int] = set()
    seals: set[int] = set()
    for key, _ in store.list("tokens/"):
        name, _, kind = key.removeprefix("tokens/").partition(".")
        if name.isdigit():
            (claims if kind == "claim.json" else seals).add(int(name))
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
    key = claim_key(token)
    found = decode(store.get(key), Claim, key)
    if found.token != token:
        raise Corrupt(f"{key} holds the claim of token {found.token}", key=key)
    return found


def read_seal(store: Store, token: int) -> Seal:
    """Raises `Corrupt` if it is damaged or belongs under another key."""
    key = seal_key(token)
    found = decode(store.get(key), Seal, key)
    if found.token != token:
        raise Corrupt(f"{key} holds the seal of token {found.token}", key=key)
    return found
