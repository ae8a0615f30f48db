"""What collections have removed: a document is put before anything is deleted.

    collected/00000003.json     names what the third collection removes, and all that those before it removed

It tells "collected" from "lost", and it closes a race. A collection puts its document and then looks for a newer
claim; an attempt claims and then reads the document. Either the attempt sees that a checkpoint is on its way out,
or the collection sees the attempt and deletes nothing. No clock is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from training.checkpoint.document import Document, decode, encode
from training.checkpoint.store import Store, put_document
from training.checkpoint.token import Skipped, read_seal, token_numbers
from training.errors import Corrupt

_KEY = re.compile(r"collected/([0-9]{8,})\.json", re.ASCII)

Name = tuple[int, int]  # token and sequence of a checkpoint


class Range(NamedTuple):
    """Checkpoints of one token, both ends included."""

    token: int
    first: int
    last: int


class Collection(Document):
    """One collection, and in `earlier` and `earlier_forms` the sum of those before it.

    `token` was the newest claim when it was put, and was sealed. A collection that finds a newer claim afterwards
    deletes nothing; it is void if that attempt started from what it names.
    """

    run: str
    number: int
    token: int
    added: tuple[Range, ...] = ()
    earlier: tuple[Range, ...] = ()
    added_forms: tuple[str, ...] = ()  # nonces of rebased forms
    earlier_forms: tuple[str, ...] = ()
    created: str = ""  # wall clock, informational


@dataclass(frozen=True)
class Collected:
    """All that was collected so far.

    Attributes:
        number: of the newest document; 0 if there is none.
        names: checkpoints that are gone, or on their way out.
        forms: nonces of rebased forms, the same.
    """

    number: int = 0
    names: frozenset[Name] = field(default_factory=frozenset)
    forms: frozenset[str] = field(default_factory=frozenset)


def collected_key(number: int) -> str:
    """`collected/00000003.json`."""
    return f"collected/{number:08d}.json"


def read_collected(store: Store, notes: list[Skipped] | None = None) -> Collected:
    """What was collected.

    Args:
        store: the run's store.
        notes: receives which documents are damaged; the newest intact one counts then. None: raise instead.

    Raises:
        Corrupt: the newest document is damaged, and `notes` is None.
    """
    numbers = sorted(int(match[1]) for key, _ in store.list("collected/") if (match := _KEY.fullmatch(key)))
    for number in reversed(numbers):
        try:
            document = _read(store, number)
        except Corrupt as error:
            if notes is None:
                raise
            notes.append(Skipped(key=collected_key(number), reason=error.message))
            continue
        names, forms = _expanded(document.earlier), set(document.earlier_forms)
        added = _expanded(document.added)
        if not _is_void(store, document, added, notes is not None):
            names, forms = names | added, forms | set(document.added_forms)
        return Collected(numbers[-1], frozenset(names), frozenset(forms))
    return Collected(numbers[-1] if numbers else 0)


def put_collected(
    store: Store, run: str, token: int, before: Collected, after: Collected, created: str = ""
) -> bool:
    """Announce a collection. Only now may it delete, and only if no claim is newer than `token`.

    Args:
        store: the run's store.
        run: its name.
        token: the newest claim, sealed.
        before: as it was read; what is in it and not in `after` is forgotten.
        after: all names and forms, those that are added included.
        created: wall clock, informational.

    Returns:
        False: another collection was announced in the meantime. Look at the store again.
    """
    document = Collection(
        run=run,
        number=before.number + 1,
        token=token,
        added=_ranges(after.names - before.names),
        earlier=_ranges(after.names & before.names),
        added_forms=tuple(sorted(after.forms - before.forms)),
        earlier_forms=tuple(sorted(after.forms & before.forms)),
        created=created,
    )
    return put_document(store, collected_key(document.number), encode(document))


def _read(store: Store, number: int) -> Collection:
    key = collected_key(number)
    found = decode(store.get(key), Collection, key)
    if found.number != number:
        raise Corrupt(f"{key}: expected number {number}, actual {found.number}", key=key)
    return found


def _is_void(store: Store, document: Collection, added: set[Name], lenient: bool) -> bool:
    """Whether a later attempt started from what the document names: it had looked before, and was seen."""
    for token in token_numbers(store)[1]:
        if token > document.token:
            try:
                head = read_seal(store, token).head
            except Corrupt:
                if not lenient:
                    raise
                return True  # it may have; to offer what may be on its way out is the smaller evil
            if head is not None and (head.token, head.sequence) in added:
                return True
    return False


def _ranges(names: Iterable[Name]) -> tuple[Range, ...]:
    found: list[Range] = []
    for token, sequence in sorted(names):
        if found and (found[-1].token, found[-1].last + 1) == (token, sequence):
            found[-1] = found[-1]._replace(last=sequence)
        else:
            found.append(Range(token, sequence, sequence))
    return tuple(found)


def _expanded(ranges: Iterable[Range]) -> set[Name]:
    return {(token, sequence) for token, first, last in ranges for sequence in range(first, last + 1)}
