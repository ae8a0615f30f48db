"""Whether what lies in a store can be restored, before somebody has to.

Reads documents and listings; with `data` every byte of every checkpoint. Changes nothing and claims nothing: it may
run beside a training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from training.checkpoint.care.pins import pin_key, read_pin
from training.checkpoint.care.states import Faults, NodeKey, check_data, check_digests, nodes_of
from training.checkpoint.care.survey import Fault, Survey, survey
from training.checkpoint.care.sweep import Sweep, sweep
from training.checkpoint.collected import Name
from training.checkpoint.history import candidates
from training.checkpoint.manifest import Committed, manifest_key, rebased_key
from training.checkpoint.store import Store, Unfinished
from training.checkpoint.token import Skipped, claim_key, read_claim, read_seal, run_of, seal_key
from training.errors import Corrupt

Severity = Literal["garbage", "damaged", "head"]
_COLLECT = "retoma gc removes it once it is older than the grace period"
_GOES_ON = "the next attempt at this run goes on without it"
_BACKUP = "the head does not need it; restore the object from a backup of the store if you want it back"


@dataclass(frozen=True)
class Problem:
    """One thing that is not as it should be.

    Attributes:
        key: the object.
        severity: `garbage` takes space and harms nobody; `damaged` cannot be restored or read, and the head can;
            `head`: a resume would not get the newest checkpoint.
        what: one sentence.
        hint: what to do.
    """

    key: str
    severity: Severity
    what: str
    hint: str


@dataclass(frozen=True)
class CheckpointState:
    """One checkpoint of the history, or a pinned one.

    Attributes:
        reason: why it is not intact; empty if it is.
        links: checkpoints that a restore reads.
        rebased: whether it has a shorter form that can be relied on.
    """

    token: int
    sequence: int
    kind: str
    intact: bool
    reason: str
    links: int
    rebased: bool
    pinned: bool


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        head: newest checkpoint that the history admits; None if there is none.
        restorable: the newest that is intact: what a resume would start from.
        checkpoints: newest first.
        in_flight: packs of a save that may be going on.
        data: whether bytes were read, and `read_bytes` how many.
    """

    url: str
    run: str | None
    head: Name | None
    restorable: Name | None
    checkpoints: tuple[CheckpointState, ...]
    problems: tuple[Problem, ...]
    in_flight: int
    data: bool
    read_bytes: int
    seconds: float

    @property
    def intact(self) -> bool:
        """Whether everything can be restored; garbage does not count."""
        return all(problem.severity == "garbage" for problem in self.problems)

    @property
    def head_is_intact(self) -> bool:
        """Whether a resume gets the newest checkpoint."""
        return self.head == self.restorable


def verify(store: Store, *, data: bool = False, threads: int = 1) -> Report:
    """Look at everything in a run's store.

    Args:
        store: the run's store.
        data: also read every pack of every checkpoint, decode it, and compare all digests.
        threads: that decode.

    Raises:
        Unavailable: the store did not answer. What is damaged is in the report, never raised.
    """
    started = time.perf_counter()
    notes: list[Skipped] = []
    run = run_of(store, notes)
    history = list(candidates(store, notes=notes))  # first: a training that goes on adds to what is listed next
    seen = survey(store, notes)
    names = list(dict.fromkeys([*history, *sorted(seen.pins & seen.manifests.keys())]))
    faults, read_bytes = _check(seen, names, data, threads)
    verdicts = {name: _verdict(seen, name, faults) for name in names}
    head = history[0] if history else None
    restorable = next((name for name in history if verdicts[name] is None), None)
    problems = [
        *_of_notes(notes),
        *_of_checkpoints(verdicts, head, restorable),
        *_of_forms(seen, names, faults),
        *_of_documents(store, seen),
        *_of_pins(store, seen),
    ]
    needed = {link for name in names for link in seen.needs(name)} | set(names)
    garbage = sweep(seen, needed)
    unfinished = store.unfinished()
    problems += _of_garbage(seen, garbage, unfinished)
    return Report(
        url=store.url,
        run=run,
        head=head,
        restorable=restorable,
        checkpoints=tuple(_state(seen, name, verdicts[name]) for name in names),
        problems=tuple(dict.fromkeys(problems)),
        in_flight=garbage.in_flight,
        data=data,
        read_bytes=read_bytes,
        seconds=time.perf_counter() - started,
    )


def _check(seen: Survey, names: list[Name], data: bool, threads: int) -> tuple[Faults, int]:
    nodes = nodes_of(seen, names)
    faults, read_bytes = check_digests(nodes), 0
    if data:
        found, read_bytes = check_data(seen, nodes, threads)
        faults = {**found, **faults}
    return faults, read_bytes


def _verdict(seen: Survey, name: Name, faults: Faults) -> Fault | None:
    """Why a checkpoint cannot be restored, in the better of its two forms."""
    rebased = faults.get(NodeKey(name, True))
    if seen.has_form(name) and rebased is None:
        return None
    return seen.original_fault(name) or faults.get(NodeKey(name, False)) or seen.fault(name)


def _state(seen: Survey, name: Name, fault: Fault | None) -> CheckpointState:
    found = seen.committed(name)
    return CheckpointState(
        token=name[0],
        sequence=name[1],
        kind=found.manifest.kind if isinstance(found, Committed) else "",
        intact=fault is None,
        reason=fault.reason if fault is not None else "",
        links=len(list(seen.needs(name))),
        rebased=seen.has_form(name),
        pinned=name in seen.pins,
    )


def _of_notes(notes: list[Skipped]) -> Iterator[Problem]:
    for note in notes:
        if not note.key.startswith("tokens/"):  # those are looked at one by one
            yield Problem(note.key, "damaged", note.reason, _GOES_ON)


def _of_checkpoints(
    verdicts: dict[Name, Fault | None], head: Name | None, restorable: Name | None
) -> Iterator[Problem]:
    """One problem for each damaged object, with all checkpoints that it takes along."""
    hit: dict[Fault, list[Name]] = {}
    for name, fault in verdicts.items():
        if fault is not None:
            hit.setdefault(fault, []).append(name)
    for fault, names in hit.items():
        labels = ", ".join(f"{token}/{sequence}" for token, sequence in names[:5])
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        what = f"{fault.reason}; cannot be restored: {labels}{more}"
        if head not in names:
            yield Problem(fault.key, "damaged", what, _BACKUP)
        elif restorable is None:
            yield Problem(fault.key, "head", what, "no checkpoint is intact: restore the object from a backup")
        else:
            hint = (
                f"a resume would go back to {restorable[0]}/{restorable[1]}; restore the object from a backup first"
            )
            yield Problem(fault.key, "head", what, hint)


def _of_forms(seen: Survey, names: list[Name], faults: Faults) -> Iterator[Problem]:
    for name in sorted(seen.forms.keys() & set(names)):
        form = seen.form(name)
        fault = form if isinstance(form, Fault) else faults.get(NodeKey(name, True))
        if fault is not None:
            what = f"the rebased form of {name[0]}/{name[1]} is damaged: {fault.reason}"
            yield Problem(fault.key, "damaged", what, "a restore reads the original chain, as long as it is there")


def _of_documents(store: Store, seen: Survey) -> Iterator[Problem]:
    for token in sorted(seen.claims | seen.seals):
        for there, key, read in (
            (token in seen.claims, claim_key(token), read_claim),
            (token in seen.seals, seal_key(token), read_seal),
        ):
            if there:
                try:
                    read(store, token)
                except Corrupt as error:
                    yield Problem(key, "damaged", error.message, _GOES_ON)


def _of_pins(store: Store, seen: Survey) -> Iterator[Problem]:
    for name in sorted(seen.pins):
        key = pin_key(*name)
        if name not in seen.manifests:
            yield Problem(key, "damaged", "it pins a checkpoint that is not there", "remove the pin: retoma unpin")
        try:
            read_pin(store, *name)
        except Corrupt as error:
            yield Problem(key, "garbage", error.message, "it keeps its checkpoint all the same")


def _of_garbage(seen: Survey, garbage: Sweep, unfinished: list[Unfinished]) -> Iterator[Problem]:
    for name in garbage.manifests:
        why = (
            "was collected, not to the end" if name in seen.collected.names else "is void: no later attempt saw it"
        )
        yield Problem(manifest_key(*name), "garbage", f"checkpoint {name[0]}/{name[1]} {why}", _COLLECT)
    for name in garbage.forms:
        yield Problem(rebased_key(*name), "garbage", f"the form of {name[0]}/{name[1]}, which is gone", _COLLECT)
    for listed in (*garbage.packs, *garbage.form_packs):
        yield Problem(
            listed.aged.key, "garbage", f"no checkpoint needs its {listed.aged.size_bytes} bytes", _COLLECT
        )
    for write in unfinished:
        what = f"a write that was begun {write.age_seconds:.0f} s ago and is not finished"
        yield Problem(write.key or write.name, "garbage", what, _COLLECT)
