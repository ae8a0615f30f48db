"""Collection: deletes what no checkpoint needs, and never what one could come to need.

    survey -> choose -> announce -> look again -> manifests -> packs

The announcement is put before the second look. An attempt claims before it reads announcements, so that either it
leaves alone what is named there, or the look finds its claim and nothing is deleted. The same holds for pins, and
for compactions that finish late. Ages only spare; nothing is safe because of an age.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from training.checkpoint.care.pins import pinned
from training.checkpoint.care.retention import choose
from training.checkpoint.care.survey import Listed, Survey, survey
from training.checkpoint.care.sweep import Sweep, sweep
from training.checkpoint.chain import read_rebased
from training.checkpoint.collected import Collected, Name, put_collected
from training.checkpoint.history import candidates
from training.checkpoint.manifest import Committed, manifest_key, rebased_key
from training.checkpoint.store import NotFound, Store, Unfinished
from training.checkpoint.token import Skipped, claim_key, run_of
from training.errors import Corrupt, Unavailable

GRACE_SECONDS = 24 * 3600.0
KEEP_BASES = 2
_TRIES = 3


class Kept(NamedTuple):
    """A checkpoint that stays, and why."""

    token: int
    sequence: int
    reason: str


class Deleted(NamedTuple):
    """Objects of one kind."""

    kind: str
    objects: int
    size_bytes: int


@dataclass(frozen=True)
class CollectionReport:
    """What a collection did, or would do.

    Attributes:
        kept: newest first.
        collected: checkpoints that are gone, newest first.
        deleted: by kind; `unfinished` counts writes that were aborted, of unknown size.
        reason: why nothing was deleted, if something stood against it; empty otherwise.
        in_flight: packs of a save that may be going on.
    """

    url: str
    run: str | None
    dry_run: bool
    kept: tuple[Kept, ...] = ()
    collected: tuple[Name, ...] = ()
    deleted: tuple[Deleted, ...] = ()
    reason: str = ""
    in_flight: int = 0
    seconds: float = 0.0

    @property
    def freed_bytes(self) -> int:
        """Of all objects."""
        return sum(deleted.size_bytes for deleted in self.deleted)


@dataclass
class _Plan:
    survey: Survey
    live: dict[Name, str]
    garbage: Sweep
    refusal: str = ""

    def is_there(self, name: Name) -> bool:
        """Not so for an alias of nothing."""
        return name in self.survey.manifests or isinstance(self.survey.committed(name), Committed)

    def announced(self) -> Collected:
        """What will have been collected: what goes now, and all before it."""
        before, garbage = self.survey.collected, self.garbage
        forms = frozenset(listed.nonce for listed in garbage.form_packs)
        there = frozenset(listed.nonce for listed in self.survey.form_packs.values())
        return replace(before, names=before.names | garbage.manifests.keys(), forms=(before.forms & there) | forms)


def collect(
    store: Store,
    *,
    keep: int = KEEP_BASES,
    grace_seconds: float = GRACE_SECONDS,
    aliases: Iterable[Name] = (),
    running: bool = True,
    dry_run: bool = False,
    created: str = "",
) -> CollectionReport:
    """Remove what is neither kept nor needed nor young. May run beside a training, and beside others of its kind.

    Kept are the head, everything down to the `keep`-th newest intact base (a rebased form is one), pinned and
    aliased checkpoints, and all that these need. A crash at any point leaves a store that restores.

    Args:
        store: the run's store.
        keep: newest bases; at least 1.
        grace_seconds: nothing younger is removed, by the store's own clock.
        aliases: (token, sequence) of checkpoints that the registry points at.
        running: whether an attempt may be at work. False lets the checkpoint before the head go, too, and does not
            wait for an attempt that has claimed and not sealed; only say so when the run has ended.
        dry_run: delete nothing; tell what would be.
        created: wall clock, informational.

    Raises:
        Corrupt: a document that decides is damaged. Nothing was deleted.
        Unavailable: the store did not answer. What was deleted up to there was garbage.
    """
    started = time.perf_counter()
    wanted = set(aliases)
    report = CollectionReport(store.url, run_of(store), dry_run)
    for _ in range(_TRIES):
        plan = _plan(store, keep, grace_seconds, wanted, running)
        report = _described(report, plan)
        if plan.refusal or dry_run:
            counts = () if plan.refusal else _counts(plan.garbage, _unfinished(store, grace_seconds))
            return replace(report, deleted=counts, seconds=time.perf_counter() - started)
        if not _announce(store, plan, report.run, created):
            continue
        reason = _look(store, plan)
        if reason:
            return replace(report, collected=(), reason=reason, seconds=time.perf_counter() - started)
        report = _described(report, plan)
        counts = _delete(store, plan, _unfinished(store, grace_seconds))
        return replace(report, deleted=counts, seconds=time.perf_counter() - started)
    raise Unavailable(f"{store.url}: other collections were at work at the same time", hint="try again later")


def _described(report: CollectionReport, plan: _Plan) -> CollectionReport:
    return replace(
        report,
        kept=tuple(Kept(*name, plan.live[name]) for name in sorted(plan.live, reverse=True) if plan.is_there(name)),
        collected=() if plan.refusal else tuple(plan.garbage.manifests),
        reason=plan.refusal,
        in_flight=plan.garbage.in_flight,
    )


def _plan(store: Store, keep: int, grace_seconds: float, aliases: set[Name], running: bool) -> _Plan:
    seen = survey(store)
    token = seen.newest_claim
    if token == 0:
        return _Plan(seen, {}, Sweep(), "" if not seen.manifests else "the store has checkpoints and no claim")
    if running and token != seen.newest_seal:
        return _Plan(seen, {}, Sweep(), f"token {token} has not said yet which checkpoint it starts from")
    notes: list[Skipped] = []
    # what was committed since the survey is built on its head, or on the one before
    history = (n for n in candidates(store, notes=notes, collected=seen.collected) if n in seen.manifests)
    live = choose(
        seen,
        history,
        keep=keep,
        pins=seen.pins,
        aliases=aliases,
        young=[name for name, aged in seen.manifests.items() if not aged.age_seconds >= grace_seconds],
        writing=token if running else None,
    )
    if notes:
        raise Corrupt(
            f"{notes[0].key} is damaged, so that nobody can say what may go: {notes[0].reason}",
            hint="see `retoma verify`; the next attempt at this run writes a new seal",
            key=notes[0].key,
        )
    return _Plan(seen, live, _old(sweep(seen, live.keys()), grace_seconds))


def _old(garbage: Sweep, grace_seconds: float) -> Sweep:
    """Without what is within the grace period. An age that is no number is young."""
    return Sweep(
        garbage.manifests,  # the young ones are live
        {name: aged for name, aged in garbage.forms.items() if aged.age_seconds >= grace_seconds},
        [listed for listed in garbage.packs if listed.aged.age_seconds >= grace_seconds],
        [listed for listed in garbage.form_packs if listed.aged.age_seconds >= grace_seconds],
        garbage.in_flight,
    )


def _announce(store: Store, plan: _Plan, run: str | None, created: str) -> bool:
    """Put the document, if there is anything new in it. False: another collection was first."""
    before, after = plan.survey.collected, plan.announced()
    if after.names == before.names and after.forms <= before.forms:
        return True
    if store.exists(claim_key(plan.survey.newest_claim + 1)):
        return False
    return put_collected(store, run or "", plan.survey.newest_claim, before, after, created)


def _look(store: Store, plan: _Plan) -> str:
    """After the announcement: is there anybody who may not have seen it? Returns why nothing may be deleted."""
    token = plan.survey.newest_claim + 1
    if store.exists(claim_key(token)):
        return f"token {token} was claimed in the meantime"
    late = pinned(store) - plan.survey.pins
    if late:
        for name in late:
            for link in plan.survey.needs(name):
                plan.live.setdefault(link, "pinned")
        plan.garbage = _without(plan.garbage, plan.live)
    return ""


def _without(garbage: Sweep, live: dict[Name, str]) -> Sweep:
    return Sweep(
        {name: aged for name, aged in garbage.manifests.items() if name not in live},
        {name: aged for name, aged in garbage.forms.items() if name not in live},
        [listed for listed in garbage.packs if listed.name not in live],
        [listed for listed in garbage.form_packs if listed.name not in live],
        garbage.in_flight,
    )


def _delete(store: Store, plan: _Plan, unfinished: list[Unfinished]) -> tuple[Deleted, ...]:
    """Manifests before packs. A kill in between leaves garbage, which the next collection finds."""
    garbage = plan.garbage
    for name in garbage.manifests:
        store.delete(manifest_key(*name))
    for name in garbage.forms:
        store.delete(rebased_key(*name))
    garbage.packs = [one for one in garbage.packs if not _has_owner(store, plan.survey, one)]
    for listed in garbage.packs:
        store.delete(listed.aged.key)
    nonces = {(one.name, one.nonce): _is_in_use(store, plan, one) for one in garbage.form_packs}
    garbage.form_packs = [one for one in garbage.form_packs if not nonces[one.name, one.nonce]]
    for listed in garbage.form_packs:
        store.delete(listed.aged.key)
    for write in unfinished:
        store.abort(write)
    return _counts(garbage, unfinished)


def _has_owner(store: Store, seen: Survey, listed: Listed) -> bool:
    """Whether a manifest has come that was not there when the store was surveyed."""
    return listed.name not in seen.manifests and store.exists(manifest_key(*listed.name))


def _is_in_use(store: Store, plan: _Plan, listed: Listed) -> bool:
    """Whether a compaction has finished late, before it could see that its packs were announced."""
    original = plan.survey.committed(listed.name) if listed.name in plan.live else None
    if not isinstance(original, Committed):
        return False  # what it is a form of goes, too
    try:
        return read_rebased(store, original).nonce == listed.nonce
    except NotFound:
        return False
    except Corrupt:
        return True  # or it is not known


def _counts(garbage: Sweep, unfinished: list[Unfinished]) -> tuple[Deleted, ...]:
    packs = [listed.aged for listed in (*garbage.packs, *garbage.form_packs)]
    rows = (
        ("manifests", garbage.manifests.values()),
        ("rebased manifests", garbage.forms.values()),
        ("packs", packs),
    )
    counts = [Deleted(kind, len(found), sum(aged.size_bytes for aged in found)) for kind, found in rows]
    return (*counts, Deleted("unfinished writes", len(unfinished), 0))


def _unfinished(store: Store, grace_seconds: float) -> list[Unfinished]:
    return [write for write in store.unfinished() if write.age_seconds >= grace_seconds]
