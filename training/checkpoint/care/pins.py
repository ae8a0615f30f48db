"""Pins: checkpoints that no collection removes.

    pins/000003-00000041.json     put if absent; deleted by `unpin`

A pin is put and then held against what collections have announced; a collection announces and then looks for pins.
So either the pin is refused, or the checkpoint stays.
"""

from __future__ import annotations

import contextlib
import re

from training.checkpoint.chain import check_packs, read_chain
from training.checkpoint.collected import Name, read_collected
from training.checkpoint.document import Document, decode, encode
from training.checkpoint.store import Store
from training.errors import Corrupt, RetomaError

_KEY = re.compile(r"pins/([0-9]{6,})-([0-9]{8,})\.json", re.ASCII)


class Pin(Document):
    """One pin. Who, why and when are for people; its key alone keeps the checkpoint."""

    run: str
    token: int
    sequence: int
    reason: str = ""
    created: str = ""


def pin_key(token: int, sequence: int) -> str:
    """`pins/000003-00000041.json`."""
    return f"pins/{token:06d}-{sequence:08d}.json"


def pin(store: Store, token: int, sequence: int, reason: str = "", created: str = "") -> Pin:
    """Keep a checkpoint, and what it needs, until it is unpinned. Pinning twice changes nothing.

    Args:
        store: the run's store.
        token, sequence: the checkpoint.
        reason: for people.
        created: wall clock, informational.

    Raises:
        Corrupt: there is no such checkpoint, it is damaged, or a collection is removing it. Nothing is pinned.
    """
    chain = read_chain(store, token, sequence)
    document = Pin(run=chain.head.manifest.run, token=token, sequence=sequence, reason=reason, created=created)
    key = pin_key(token, sequence)
    written = store.put_if_absent(key, encode(document))
    try:
        _check_is_there(store, token, sequence)
    except Corrupt:
        if written:
            with contextlib.suppress(RetomaError):  # a pin to nothing keeps nothing; `verify` reports it
                store.delete(key)
        raise
    return document


def unpin(store: Store, token: int, sequence: int) -> bool:
    """Let collections have it again. Returns whether it was pinned."""
    key = pin_key(token, sequence)
    found = store.exists(key)
    store.delete(key)
    return found


def pinned(store: Store) -> set[Name]:
    """(token, sequence) of every pin, told by the keys: a damaged pin keeps its checkpoint, too."""
    matches = (_KEY.fullmatch(key) for key, _ in store.list("pins/"))
    return {(int(match[1]), int(match[2])) for match in matches if match}


def read_pin(store: Store, token: int, sequence: int) -> Pin:
    """One pin. Raises `Corrupt` if it is missing or damaged."""
    key = pin_key(token, sequence)
    found = decode(store.get(key), Pin, key)
    if (found.token, found.sequence) != (token, sequence):
        raise Corrupt(f"{key} holds the pin of {found.token}/{found.sequence}", key=key)
    return found


def _check_is_there(store: Store, token: int, sequence: int) -> None:
    if (token, sequence) in read_collected(store).names:
        raise Corrupt(
            f"checkpoint {token}/{sequence} is being removed by a collection",
            hint="pin a newer one; `retoma show` lists those that are kept",
            token=token,
            sequence=sequence,
        )
    check_packs(store, read_chain(store, token, sequence))
