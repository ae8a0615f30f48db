"""Which checkpoints a run has: candidates to restore from, newest first, and the lineage for people.

Newest sealed token -> its manifests, newest first -> the head that its seal names -> the manifests of that
token up to there -> ... A manifest of an older token beyond a sealed head is void and never appears, nor does one
that a collection has announced to remove.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from training.checkpoint.collected import Collected, read_collected
from training.checkpoint.end import End, read_ends
from training.checkpoint.manifest import Committed, Ref, decode_manifest, manifest_key
from training.checkpoint.store import Store
from training.checkpoint.token import (
    Claim,
    Seal,
    Skipped,
    claim_key,
    read_claim,
    read_seal,
    seal_key,
    token_numbers,
)
from training.errors import Corrupt

_MANIFEST_KEY = re.compile(r"manifests/[0-9]{6,}/([0-9]{8,})\.json", re.ASCII)
_ALL = 2**62  # a limit that admits every sequence

Known = Mapping[tuple[int, int], Committed]


@dataclass(frozen=True)
class Attempt:
    """One token: who claimed it, what it started from, how many manifests lie under it (void ones included).

    `end` is how it ended, if somebody said.
    """

    token: int
    claim: Claim | None
    seal: Seal | None
    manifests: int
    end: End | None = None


@dataclass
class Lineage:
    """A run's history for people and for the registry. Manifests are checked, packs are not read.

    Attributes:
        chain: committed checkpoints from the oldest to the head.
        attempts: all tokens, oldest first.
        problems: what is missing or damaged.
        collected: the checkpoint before the oldest of the chain, if a collection removed it.
    """

    chain: list[Committed] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    problems: list[Skipped] = field(default_factory=list)
    collected: Ref | None = None

    @property
    def head(self) -> Committed | None:
        """The newest committed checkpoint."""
        return self.chain[-1] if self.chain else None


def read_committed(store: Store, token: int, sequence: int, run: str | None = None) -> Committed:
    """One manifest. Raises `Corrupt` if it is missing or damaged."""
    return decode_manifest(store.get(manifest_key(token, sequence)), token, sequence, run)


def read_parent(store: Store, child: Committed, known: Known | None = None) -> Committed:
    """The parent of a checkpoint, held against the digest that the child recorded.

    Raises:
        Corrupt: missing, damaged, or not the manifest that the child was built on.
    """
    ref = child.manifest.parent
    if ref is None:
        raise Corrupt(f"{child.manifest.key} has no parent", key=child.manifest.key)
    if (ref.token, ref.sequence) >= (child.ref.token, child.ref.sequence):
        raise Corrupt(f"{child.manifest.key} names a parent that is not older", key=child.manifest.key)
    found = (known or {}).get((ref.token, ref.sequence)) or read_committed(
        store, ref.token, ref.sequence, child.manifest.run
    )
    if found.ref.digest != ref.digest:
        key = manifest_key(ref.token, ref.sequence)
        raise Corrupt(f"{key}: expected digest {ref.digest}, actual {found.ref.digest}", key=key)
    return found


def sequences(store: Store, token: int) -> list[int]:
    """Sequences that have a manifest under a token, ascending."""
    matches = (_MANIFEST_KEY.fullmatch(key) for key, _ in store.list(f"manifests/{token:06d}/"))
    return sorted(int(match[1]) for match in matches if match)


def candidates(
    store: Store,
    before: int | None = None,
    notes: list[Skipped] | None = None,
    collected: Collected | None = None,
) -> Iterator[tuple[int, int]]:
    """(token, sequence) of every checkpoint that the history admits, newest first.

    Args:
        store: the run's store.
        before: look only at tokens below this one (the attempt that asks).
        notes: receives what is missing or damaged on the way.
        collected: what was collected; default: read it. An attempt must read it after its claim.
    """
    notes = notes if notes is not None else []
    collected = collected if collected is not None else read_collected(store, notes)
    gone: list[tuple[int, int]] = []
    offered = False
    for name in _admitted(store, before, notes):
        if name in collected.names:
            gone.append(name)
        else:
            offered = True
            yield name
    if not offered:  # a run that has lost all that was kept must not look like a new one
        yield from gone


def _admitted(store: Store, before: int | None, notes: list[Skipped]) -> Iterator[tuple[int, int]]:
    claims, seals = token_numbers(store)
    newest = max(claims | seals, default=0) if before is None else before - 1
    limit: tuple[int, int] | None = None
    for token in range(newest, 0, -1):
        if limit and token > limit[0]:
            continue
        found = [n for n in sequences(store, token) if limit is None or token < limit[0] or n <= limit[1]]
        if limit and token == limit[0] and limit[1] not in found and limit[1] != _ALL:
            found.append(limit[1])  # a sealed head is a checkpoint, also when its manifest is lost
        if token not in seals and not found:
            continue  # died between claim and seal: it has no manifests
        yield from ((token, sequence) for sequence in reversed(found))
        try:
            head = read_seal(store, token).head
        except Corrupt as error:
            notes.append(Skipped(key=seal_key(token), reason=str(error)))
            limit = _start_of(store, token, found) or (token - 1, _ALL)
            continue
        if head is None:
            return
        limit = (head.token, head.sequence)


def _start_of(store: Store, token: int, found: list[int]) -> tuple[int, int] | None:
    """Where a token started, told by its manifests when its seal is lost."""
    for sequence in found:
        try:
            parent = read_committed(store, token, sequence).manifest.parent
        except Corrupt:
            continue
        return (parent.token, parent.sequence) if parent and parent.token < token else None
    return None


def read_lineage(store: Store, known: Known | None = None) -> Lineage:
    """The chain from the head back to the run's first checkpoint, and all attempts.

    Args:
        store: the run's store.
        known: manifests read earlier by (token, sequence); they are immutable and not read again.
    """
    lineage = Lineage()
    collected = read_collected(store, lineage.problems)
    newest = _newest_readable(store, lineage.problems, collected)
    while newest is not None:
        lineage.chain.append(newest)
        parent = newest.manifest.parent
        if parent is None:
            break
        if (parent.token, parent.sequence) in collected.names:
            lineage.collected = parent
            break
        try:
            newest = read_parent(store, newest, known)
        except Corrupt as error:
            lineage.problems.append(Skipped(key=error.key or "", reason=str(error)))
            break
    lineage.chain.reverse()
    lineage.attempts = _attempts(store, lineage.problems)
    return lineage


def _newest_readable(store: Store, problems: list[Skipped], collected: Collected | None = None) -> Committed | None:
    for token, sequence in candidates(store, notes=problems, collected=collected):
        try:
            return read_committed(store, token, sequence)
        except Corrupt as error:
            problems.append(Skipped(key=manifest_key(token, sequence), reason=str(error)))
    return None


def _attempts(store: Store, problems: list[Skipped]) -> list[Attempt]:
    claims, seals = token_numbers(store)
    ends = read_ends(store, problems)
    attempts = []
    for token in sorted(claims | seals):
        claim, seal = None, None
        try:
            claim = read_claim(store, token) if token in claims else None
            seal = read_seal(store, token) if token in seals else None
        except Corrupt as error:
            problems.append(Skipped(key=error.key or claim_key(token), reason=str(error)))
        attempts.append(Attempt(token, claim, seal, len(sequences(store, token)), ends.get(token)))
    return attempts


def read_attempts(store: Store) -> Lineage:
    """All attempts; of the chain only what they started from. Cheap, however many checkpoints there are."""
    lineage = Lineage()
    lineage.attempts = _attempts(store, lineage.problems)
    heads = {attempt.seal.head for attempt in lineage.attempts if attempt.seal and attempt.seal.head}
    for head in sorted(heads, key=lambda head: (head.token, head.sequence)):
        try:
            lineage.chain.append(read_committed(store, head.token, head.sequence))
        except Corrupt:  # collected, or lost: a position less
            continue
    return lineage


def head_ref(store: Store) -> Ref | None:
    """Reference of the newest readable checkpoint, without claiming anything."""
    newest = _newest_readable(store, [])
    return newest.ref if newest else None
