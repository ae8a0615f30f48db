"""One look at everything that lies in a run's store, and at what of it makes up an intact checkpoint.

Manifests are read when they are asked for, and once. Packs are counted and measured, not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from training.checkpoint.care.pins import pinned
from training.checkpoint.chain import read_rebased
from training.checkpoint.collected import Collected, Name, read_collected
from training.checkpoint.history import read_committed
from training.checkpoint.manifest import Committed, Manifest, manifest_key, rebased_key
from training.checkpoint.store import Aged, Store
from training.checkpoint.token import Skipped, token_numbers
from training.errors import Corrupt

_MANIFEST = re.compile(r"manifests/([0-9]{6,})/([0-9]{8,})\.json", re.ASCII)
_PACK = re.compile(r"packs/([0-9]{6,})/([0-9]{8,})-r[0-9]{4,}-[0-9]{2,}\.pack", re.ASCII)
_FORM = re.compile(r"rebased/([0-9]{6,})/([0-9]{8,})\.json", re.ASCII)
_FORM_PACK = re.compile(r"rebased/([0-9]{6,})/([0-9]{8,})-([0-9a-z]+)-[0-9]{2,}\.pack", re.ASCII)


class Fault(NamedTuple):
    """Why a checkpoint cannot be restored."""

    key: str  # the object that is missing or damaged
    reason: str


class Listed(NamedTuple):
    """One pack, and the checkpoint that it belongs to by its key."""

    name: Name
    aged: Aged
    nonce: str = ""


@dataclass
class Survey:
    """What was found. Listings were taken in the order of the fields, tokens first.

    Attributes:
        claims, seals: token numbers.
        collected: what collections have announced.
        manifests, forms: of checkpoints, and their rebased forms.
        packs, form_packs: by key.
        pins: checkpoints that are pinned.
    """

    store: Store
    claims: set[int]
    seals: set[int]
    collected: Collected
    manifests: dict[Name, Aged]
    forms: dict[Name, Aged]
    packs: dict[str, Listed]
    form_packs: dict[str, Listed]
    pins: set[Name]
    _read: dict[Name, Committed | Fault] = field(default_factory=dict)
    _forms_read: dict[Name, Manifest | Fault] = field(default_factory=dict)
    _faults: dict[Name, Fault | None] = field(default_factory=dict)

    @property
    def newest_claim(self) -> int:
        """0 if nobody has claimed yet."""
        return max(self.claims, default=0)

    @property
    def newest_seal(self) -> int:
        """0 if nobody has sealed yet."""
        return max(self.seals, default=0)

    def committed(self, name: Name) -> Committed | Fault:
        """The manifest of a checkpoint."""
        if name not in self._read:
            try:
                self._read[name] = read_committed(self.store, *name)
            except Corrupt as error:
                self._read[name] = Fault(manifest_key(*name), error.message)
        return self._read[name]

    def parent(self, name: Name) -> Name | None:
        """The checkpoint before; None at the start of a run, or if the manifest is damaged."""
        found = self.committed(name)
        ref = found.manifest.parent if isinstance(found, Committed) else None
        return (ref.token, ref.sequence) if ref is not None else None

    def form(self, name: Name) -> Manifest | Fault | None:
        """The rebased form of a checkpoint, if it can be relied on, or why it cannot. None: there is none."""
        if name not in self.forms:
            return None
        if name not in self._forms_read:
            self._forms_read[name] = self._read_form(name)
        return self._forms_read[name]

    def has_form(self, name: Name) -> bool:
        """Whether there is a rebased form that can be relied on."""
        return isinstance(self.form(name), Manifest)

    def is_base(self, name: Name) -> bool:
        """Whether it can be restored alone: a base, or one with a rebased form that can be relied on."""
        found = self.committed(name)
        return isinstance(found, Committed) and (found.manifest.kind == "base" or self.has_form(name))

    def is_intact(self, name: Name) -> bool:
        """Whether it can be restored, as far as lists tell."""
        return self.fault(name) is None

    def original_fault(self, name: Name) -> Fault | None:
        """Why a checkpoint cannot be restored from its own packs and its parent. None: it can."""
        found = self.committed(name)
        if isinstance(found, Fault):
            return found
        fault = self._packs_fault(found.manifest, self.packs)
        if fault is not None or found.manifest.kind == "base":
            return fault
        parent, ref = self.parent(name), found.manifest.parent
        if parent is None or ref is None or parent >= name:
            return Fault(found.manifest.key, f"{found.manifest.key} is a delta and names no older parent")
        if parent in self.collected.names:
            return Fault(manifest_key(*parent), f"{manifest_key(*parent)} was collected")
        below = self.committed(parent)
        if isinstance(below, Committed) and below.ref != ref:
            key = manifest_key(*parent)
            return Fault(key, f"{key}: expected digest {ref.digest}, actual {below.ref.digest}")
        return self.fault(parent)

    def fault(self, name: Name) -> Fault | None:
        """Why a checkpoint cannot be restored, by either form. None: it can, as far as lists tell."""
        for link in reversed(list(self._unknown_links(name))):  # from below, so that nothing recurses deeply
            found = self.committed(link)
            if isinstance(found, Committed) and self.has_form(link):
                self._faults[link] = None
            else:
                self._faults[link] = self.original_fault(link)
        return self._faults[name]

    def needs(self, name: Name) -> Iterator[Name]:
        """A checkpoint and those below it whose bytes a restore reads, down to a base or a form to be relied on.

        What a manifest that is there and cannot be read is built on is not known: it may be anything older.
        """
        here: Name | None = name
        while here is not None:
            yield here
            found = self.committed(here)
            if isinstance(found, Fault):
                if here in self.manifests:
                    yield from (older for older in sorted(self.manifests, reverse=True) if older < here)
                return
            if found.manifest.kind == "base" or self.has_form(here):
                return
            older = self.parent(here)
            here = older if older is not None and older < here else None

    def _unknown_links(self, name: Name) -> Iterator[Name]:
        for link in self.needs(name):
            if link in self._faults:
                return
            yield link

    def _read_form(self, name: Name) -> Manifest | Fault:
        key, original = rebased_key(*name), self.committed(name)
        if isinstance(original, Fault):
            return Fault(key, f"{key} stands for a checkpoint that is lost: {original.reason}")
        try:
            form = read_rebased(self.store, original)
        except Corrupt as error:
            return Fault(key, error.message)
        if form.nonce in self.collected.forms:
            return Fault(key, f"{key} is being removed by a collection")
        return self._packs_fault(form, self.form_packs) or form

    def _packs_fault(self, manifest: Manifest, packs: dict[str, Listed]) -> Fault | None:
        for key, pack in zip(manifest.pack_keys(), manifest.packs, strict=True):
            found = packs.get(key)
            if found is None or found.aged.size_bytes != pack.size_bytes:
                actual = "missing" if found is None else f"{found.aged.size_bytes} bytes"
                return Fault(key, f"{key}: expected {pack.size_bytes} bytes, actual {actual}")
        return None


def survey(store: Store, notes: list[Skipped] | None = None) -> Survey:
    """List everything.

    Args:
        store: the run's store.
        notes: receives damaged documents of collections; None: raise instead.

    Raises:
        Corrupt: what was collected cannot be read, and `notes` is None.
    """
    claims, seals = token_numbers(store)
    collected = read_collected(store, notes)
    manifests = _listed(store, "manifests/", _MANIFEST)
    forms = _listed(store, "rebased/", _FORM)
    return Survey(
        store=store,
        claims=claims,
        seals=seals,
        collected=collected,
        manifests={name: aged for name, aged, _ in manifests},
        forms={name: aged for name, aged, _ in forms},
        packs={listed.aged.key: listed for listed in _listed(store, "packs/", _PACK)},
        form_packs={listed.aged.key: listed for listed in _listed(store, "rebased/", _FORM_PACK)},
        pins=pinned(store),
    )


def _listed(store: Store, prefix: str, pattern: re.Pattern[str]) -> list[Listed]:
    """Objects of ours; others are left alone, whatever they are."""
    found = []
    for aged in store.ages(prefix):
        if match := pattern.fullmatch(aged.key):
            nonce = match[3] if pattern is _FORM_PACK else ""
            found.append(Listed((int(match[1]), int(match[2])), aged, nonce))
    return found
