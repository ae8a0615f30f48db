"""Bring MLflow up to what a run's store says. The store is the truth; nothing here is written to it.

Each step can be repeated, and each ends a registration only after all before it: a checkpoint is READY once the run
that wrote it, its metrics and its place in the lineage are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from infra.mlflow_checkpoints import Registered
from infra.mlflow_lineage_page import lineage_page, lineage_table
from infra.mlflow_metrics import MetricLog, efficiency_of, points_of
from infra.mlflow_registry import MlflowRegistry
from infra.mlflow_runs import RunRecord
from infra.mlflow_text import IDENTITY, NOTE, WORLD_SIZE, attempt_tags, run_note
from tasks.verdict import Ended, left_out, outcome
from training.checkpoint.collected import read_collected
from training.checkpoint.document import digest
from training.checkpoint.end import end_numbers
from training.checkpoint.history import Lineage, read_lineage, sequences
from training.checkpoint.manifest import Committed, manifest_key
from training.checkpoint.outcomes import outcomes
from training.checkpoint.store import Store
from training.checkpoint.token import token_numbers
from training.config import Frozen, JobConfig
from training.errors import Invalid
from training.ports import SPEED

PROFILE_FOLDER = "profile"  # of the parent run's artifacts
_LINEAGE = "retoma.lineage"

Place = tuple[int, int]


class PublishReport(Frozen):
    """What MLflow knows of a run now.

    Attributes:
        registered: checkpoints that were registered since the publisher started.
        total: checkpoints of the run's history that are registered.
        missing: those that are committed but not registered yet.
        error: why something is missing; None when nothing went wrong.
    """

    run: str
    registered: int = 0
    total: int = 0
    missing: tuple[str, ...] = ()
    error: str | None = None


class Reconciler:
    """One run's registration, with a memory of what is already there. For one thread at a time.

    Args:
        store: the run's store.
        registry: where to register.
        run: name of the run.
        config: registers parameters and `config.yaml` too, if whoever started the run could not.
        data_version: the data set of `config`.
    """

    def __init__(
        self,
        store: Store,
        registry: MlflowRegistry,
        run: str,
        config: JobConfig | None = None,
        data_version: Mapping[str, Any] | None = None,
    ) -> None:
        self._store = store
        self._registry = registry
        self._run = run
        self._config = config
        self._data = dict(data_version or {})
        self._known: dict[Place, Committed] = {}
        self._registered = 0
        self._missing: tuple[str, ...] = ()
        self._seen: object = None  # the store as it was registered last
        self._drawn: object = None  # and as it was drawn last
        self._forget()

    def reconcile(
        self,
        ended: Mapping[int, Ended] | None = None,
        started: Mapping[int, Mapping[str, Any]] | None = None,
        *,
        final: bool = False,
        picture: bool = True,
    ) -> PublishReport:
        """Register whatever is not registered yet. A few listings of the store, and no traffic, if nothing is new.

        Args:
            ended: how attempts ended, by token.
            started: what a supervisor knows of an attempt beyond its claim, by token.
            final: nobody works on the run any more: no attempt is left RUNNING.
            picture: refresh the lineage page as well, if it has changed.

        Raises:
            Unavailable: the store or MLflow did not answer; what was done stays done.
            Invalid: MLflow refuses.
        """
        seen = _fingerprint(self._store)
        drawn = self._drawn == seen or not picture
        if seen == self._seen and drawn and not (ended or started or final):
            return self.report()
        lineage = read_lineage(self._store, self._known)
        self._known = {(c.ref.token, c.ref.sequence): c for c in lineage.chain}
        certain = self._certain(lineage, final=final)
        self._missing = tuple(str(c.ref) for c in lineage.chain if not self._is_ready(c))
        try:
            self._load(lineage)
            self._open_attempts(lineage, started or {})
            for committed in certain:
                self._register(committed)
            self._link_inputs(lineage)
            self._mark_void(lineage)
            self._set_statuses(lineage, ended or {}, final=final)
            if picture or final:
                self._draw(lineage)
                self._drawn = seen
        except Invalid:
            self._forget()  # somebody has deleted something there: look again next time
            raise
        finally:
            self._missing = tuple(str(c.ref) for c in lineage.chain if not self._is_ready(c))
        self._seen = seen
        return self.report()

    def add_profile(self, path: str) -> None:
        """Upload a rank's profile. After `reconcile`. Raises `Unavailable`, `Invalid`."""
        assert self._parent is not None  # noqa: S101  loaded before
        self._registry.runs.put_file(self._parent, PROFILE_FOLDER, path)

    def report(self, error: str | None = None) -> PublishReport:
        """What is known to be registered. No traffic."""
        total = sum(self._is_ready(committed) for committed in list(self._known.values()))
        return PublishReport(
            run=self._run, registered=self._registered, total=total, missing=self._missing, error=error
        )

    def note_unregistered(self) -> None:
        """Look into the store again for what is missing, without MLflow."""
        lineage = read_lineage(self._store, dict(self._known))
        self._missing = tuple(str(c.ref) for c in lineage.chain if not self._is_ready(c))

    def _forget(self) -> None:
        self._parent: RunRecord | None = None
        self._attempts: dict[int, RunRecord] = {}
        self._checkpoints: dict[Place, Registered] = {}
        self._logged: dict[str, MetricLog] = {}
        self._one_rank: dict[str, float | None] = {}  # by the identity of the job
        self._seen = None
        self._drawn = None

    def _is_ready(self, committed: Committed) -> bool:
        found = self._checkpoints.get((committed.ref.token, committed.ref.sequence))
        return found is not None and found.ready and found.digest == committed.ref.digest

    def _certain(self, lineage: Lineage, *, final: bool) -> list[Committed]:
        """The part of the chain that no attempt can leave out any more.

        While a newer attempt is between its claim and its seal, it is open where it will start from. Claims are
        listed after the manifests were: a claim that comes later sees all of these.
        """
        claims, seals = token_numbers(self._store)
        newest = max(claims | seals, default=0)
        if final or newest in seals:
            return lineage.chain
        limit: Place = (0, 0)
        for attempt in lineage.attempts:
            if attempt.seal and attempt.seal.head:
                limit = (attempt.seal.head.token, attempt.seal.head.sequence)
        return [c for c in lineage.chain if c.ref.token == newest or (c.ref.token, c.ref.sequence) <= limit]

    def _load(self, lineage: Lineage) -> None:
        """What MLflow has already; asked once."""
        if self._parent is not None:
            return
        registry, head = self._registry, lineage.head
        job = head.manifest.job if head else {}
        if self._config is not None:
            registry.open_run(self._run, self._config, self._data, self._store.url)
            job = {"name": self._config.short_name, "identity": {"job": self._config.job}}
        self._data = self._data or (dict(head.manifest.data) if head else {})
        parent = registry.ensure_run(self._run, self._store.url, job, self._data)
        self._attempts = registry.runs.attempts(self._run)
        self._checkpoints = registry.checkpoints.all(self._run)
        self._parent = parent

    def _open_attempts(self, lineage: Lineage, started: Mapping[int, Mapping[str, Any]]) -> None:
        assert self._parent is not None  # noqa: S101  loaded before
        runs, ends = self._registry.runs, outcomes(lineage)
        for attempt in lineage.attempts:
            token = attempt.token
            if token not in self._attempts:
                self._attempts[token] = runs.create_attempt(self._run, self._parent.id, attempt)
            facts = started.get(token, {}).items()  # plain ones, as `attempt_tags` takes them from the claim
            more = {f"retoma.{key}": str(value) for key, value in facts if isinstance(value, str | int | float)}
            record = runs.add_dataset(self._attempts[token], self._data)
            self._attempts[token] = runs.update(record, {**more, **attempt_tags(attempt, ends[token])})

    def _register(self, committed: Committed) -> None:
        place = (committed.ref.token, committed.ref.sequence)
        if self._is_ready(committed):
            return
        checkpoints, runs = self._registry.checkpoints, self._registry.runs
        entry = self._checkpoints.get(place)
        if entry is not None and entry.digest != committed.ref.digest:
            checkpoints.delete(entry)
            del self._checkpoints[place]
            entry = None
        attempt = self._describe_attempt(committed)
        entry = entry or checkpoints.create(committed, self._store.url, attempt.id)
        self._checkpoints[place] = entry
        assert self._parent is not None  # noqa: S101  loaded before
        runs.add_output(attempt, entry.model_id, committed.manifest.position.step)
        points = points_of(committed) + efficiency_of(committed, self._one_rank_speed(committed))
        for record in (attempt, self._parent):
            self._logged.setdefault(record.id, MetricLog(runs, record)).log(points)
        checkpoints.finalize(entry)  # the registration's commit
        self._checkpoints[place] = replace(entry, ready=True)
        self._registered += 1

    def _describe_attempt(self, committed: Committed) -> RunRecord:
        """What makes an attempt comparable to others is known with its first checkpoint."""
        manifest, token = committed.manifest, committed.ref.token
        tags = {WORLD_SIZE: str(manifest.world_size)}
        if identity := manifest.job.get("digest"):
            tags[IDENTITY] = str(identity)
        self._attempts[token] = self._registry.runs.update(self._attempts[token], tags)
        return self._attempts[token]

    def _one_rank_speed(self, committed: Committed) -> float | None:
        """What one rank alone has reached, of which a group is a multiple. Asked once, for a group only."""
        identity = str(committed.manifest.job.get("digest", ""))
        if committed.manifest.world_size == 1 or not identity:
            return None
        if identity not in self._one_rank:
            self._one_rank[identity] = self._registry.runs.one_rank_value(identity, SPEED)
        return self._one_rank[identity]

    def _link_inputs(self, lineage: Lineage) -> None:
        for attempt in lineage.attempts:
            head = attempt.seal.head if attempt.seal else None
            entry = self._checkpoints.get((head.token, head.sequence)) if head else None
            if entry is not None:
                record = self._attempts[attempt.token]
                self._attempts[attempt.token] = self._registry.runs.add_input(record, entry.model_id)

    def _mark_void(self, lineage: Lineage) -> None:
        """Entries that the run does not build on: left out by a seal, or gone from the store."""
        chain = {(c.ref.token, c.ref.sequence) for c in lineage.chain}
        collected = read_collected(self._store, []).names
        for place, entry in self._checkpoints.items():
            if place in chain or entry.void:
                continue
            reason = left_out(place, lineage.attempts)
            if reason is None and place in collected:
                reason = "collected: its bytes are gone, newer checkpoints are there"
            elif reason is None and not self._store.exists(manifest_key(*place)):
                reason = "its manifest is no longer in the store"
            if reason:
                self._registry.checkpoints.mark_void(entry, reason)
                self._checkpoints[place] = replace(entry, void=reason)

    def _set_statuses(self, lineage: Lineage, ended: Mapping[int, Ended], *, final: bool) -> None:
        newest = max((attempt.token for attempt in lineage.attempts), default=0)
        for attempt in lineage.attempts:
            record, told = self._attempts[attempt.token], ended.get(attempt.token)
            if told is None and record.status == "RUNNING" and (final or attempt.token < newest):
                told = outcome(attempt, self._known, superseded=attempt.token < newest)
            if told is not None:
                self._attempts[attempt.token] = self._registry.runs.set_status(record, *told)

    def _draw(self, lineage: Lineage) -> None:
        assert self._parent is not None  # noqa: S101  loaded before
        runs = self._registry.runs
        page = lineage_page(self._run, self._store.url, lineage)
        drawn = digest(page.encode())
        if self._parent.tags.get(_LINEAGE) == drawn:
            return
        runs.put_text(self._parent, "lineage.html", page)
        runs.put_text(self._parent, "lineage.json", json.dumps(lineage_table(lineage)))
        tags = {
            NOTE: run_note(self._run, self._store.url, lineage.chain, lineage.attempts),
            "mlflow.loggedArtifacts": json.dumps([{"path": "lineage.json", "type": "table"}]),
            _LINEAGE: drawn,
        }
        self._parent = runs.update(self._parent, tags)


def _fingerprint(store: Store) -> object:
    """Changes with every claim, seal, end, commit and collection."""
    claims, seals = token_numbers(store)
    newest = max(claims | seals, default=0)
    older = max((token for token in seals if token < newest), default=0)  # of a claim without a seal
    collections = [key for key, _ in store.list("collected/")]
    commits = sequences(store, newest), sequences(store, older)
    return sorted(claims), sorted(seals), end_numbers(store), commits, collections
