"""How an attempt ended, told by whoever saw it: for people, and for the count of attempts that led nowhere.

    tokens/000003.end.json      the first who says it is believed

Nothing about commits or fencing is decided by it: the attempt may be alive, and its commits are judged by tokens.
"""

from __future__ import annotations

import re

from pydantic import Field

from training.checkpoint.document import Document, decode, encode
from training.checkpoint.store import Store
from training.checkpoint.token import Skipped
from training.errors import Corrupt

DONE = "Done"
_KEY = re.compile(r"tokens/([0-9]{6,})\.end\.json", re.ASCII)


class End(Document):
    """`tokens/000003.end.json`.

    `kind` is `Done`, the name of a kind of `training.errors`, or that of another exception. `by` is `supervisor`,
    `successor` (who found an older claim without an end) or `parent` (who gave the attempt up).
    """

    run: str
    token: int = Field(ge=1)
    kind: str
    reason: str = ""
    by: str
    epoch: int = Field(0, ge=0)  # epoch and step that were heard of last; 0: none
    step: int = Field(0, ge=0)
    silent_seconds: float | None = None  # between the last sign of life and the verdict
    stack: str | None = None  # of a process that hung, or of each rank of a group with its last collectives
    created: str = ""  # wall clock, informational


def end_key(token: int) -> str:
    """Key of the end of a token."""
    return f"tokens/{token:06d}.end.json"


def put_end(store: Store, end: End) -> End:
    """Say how an attempt ended. Returns what is in the store now: the first who said it is believed."""
    if store.put_if_absent(end_key(end.token), encode(end)):
        return end
    try:
        return read_end(store, end.token)
    except Corrupt:
        return end


def read_end(store: Store, token: int) -> End:
    """Raises `Corrupt` if it is missing, damaged, or belongs under another key."""
    key = end_key(token)
    found = decode(store.get(key), End, key)
    if found.token != token:
        raise Corrupt(f"{key}: expected token {token}, actual {found.token}", key=key)
    return found


def read_ends(store: Store, notes: list[Skipped] | None = None) -> dict[int, End]:
    """All that are readable, by token. `notes` receives those that are not."""
    ends = {}
    for token in end_numbers(store):
        try:
            ends[token] = read_end(store, token)
        except Corrupt as error:
            if notes is not None:
                notes.append(Skipped(key=end_key(token), reason=error.message))
    return ends


def end_numbers(store: Store) -> list[int]:
    """Tokens whose end is known, ascending."""
    matches = (_KEY.fullmatch(key) for key, _ in store.list("tokens/"))
    return sorted(int(match[1]) for match in matches if match)
