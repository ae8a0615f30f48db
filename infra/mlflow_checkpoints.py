"""LoggedModels of MLflow: one for each committed checkpoint, READY once everything about it is registered."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from infra.mlflow_connection import Connection, Missing
from infra.mlflow_runs import Runs, check_run_name
from infra.mlflow_text import (
    NOTE,
    RUN,
    TAG_CHARACTERS,
    VOID,
    checkpoint_name,
    checkpoint_note,
    checkpoint_params,
    cut,
)
from training.checkpoint.manifest import Committed

_PAGE = 100
_NEWEST = 20


@dataclass(frozen=True)
class Registered:
    """A checkpoint as MLflow knows it.

    Attributes:
        model_id: id of the LoggedModel.
        ready: everything about it is registered: the run that wrote it, its metrics.
        void: why it is no longer part of the run's history; empty when it is.
    """

    model_id: str
    token: int
    sequence: int
    digest: str
    step: int
    store_url: str
    ready: bool
    void: str
    note: str


class Checkpoints:
    """The LoggedModels of one experiment. Their names are not unique in MLflow: the oldest of two counts."""

    def __init__(self, connection: Connection, runs: Runs) -> None:
        self._connection = connection
        self._runs = runs

    def all(self, run: str) -> dict[tuple[int, int], Registered]:
        """Every registered checkpoint of a run, by token and sequence."""
        rows = self._search(run, "")
        found: dict[tuple[int, int], list[Any]] = {}
        for row in rows:
            if (registered := _registered(row)) is not None:
                found.setdefault((registered.token, registered.sequence), []).append(row)
        return {place: self._oldest(models) for place, models in found.items()}

    def newest(self, run: str) -> Registered | None:
        """The newest ready checkpoint that is not void, by token and sequence."""
        found = []
        for kind in ("base", "delta"):  # a name sorts by age within its kind
            found += self._search(run, f" AND params.kind = '{kind}'", newest=_NEWEST)
        known = [r for r in map(_registered, found) if r]
        if len(known) >= _NEWEST and all(r.void or not r.ready for r in known):
            known = list(self.all(run).values())
        usable = [r for r in known if r.ready and not r.void]
        return max(usable, key=lambda r: (r.token, r.sequence), default=None)

    def create(self, committed: Committed, store_url: str, writer_run_id: str) -> Registered:
        """Create the entry of a checkpoint, not ready yet; or find the one that somebody else has just created."""
        name = checkpoint_name(committed)
        with self._connection.asking(f"registering checkpoint {name}") as client:
            made = client.create_logged_model(
                self._runs.experiment_id(),
                name=name,
                source_run_id=writer_run_id,
                tags={RUN: committed.manifest.run, NOTE: checkpoint_note(committed, store_url)},
                params=checkpoint_params(committed, store_url),
                model_type="checkpoint",
            )
        return self._oldest([made, *self._search(committed.manifest.run, f" AND name = '{name}'")])

    def finalize(self, registered: Registered) -> None:
        """Mark it ready. This is the registration's own commit: called last."""
        with self._connection.asking("finishing a registration") as client:
            client.finalize_logged_model(registered.model_id, "READY")

    def delete(self, registered: Registered) -> None:
        """Remove an entry that does not tell the truth."""
        with self._connection.asking("removing a wrong registration") as client:
            client.delete_logged_model(registered.model_id)

    def mark_void(self, registered: Registered, reason: str) -> None:
        """Say that the run does not build on it any more, and why."""
        note = f"**Not part of the run's history any more:** {reason}\n\n{registered.note}"
        with self._connection.asking("marking a checkpoint as void") as client:
            client.set_logged_model_tags(
                registered.model_id, {VOID: cut(reason, TAG_CHARACTERS), NOTE: cut(note, TAG_CHARACTERS)}
            )

    def _search(self, run: str, condition: str, newest: int | None = None) -> list[Any]:
        found: list[Any] = []
        page: str | None = None
        with self._connection.asking(f"looking for checkpoints of {run}") as client:
            while True:
                rows = client.search_logged_models(
                    [self._runs.experiment_id()],
                    filter_string=f"tags.`{RUN}` = '{check_run_name(run)}'{condition}",
                    max_results=newest or _PAGE,
                    order_by=[{"field_name": "name", "ascending": False}],
                    page_token=page,
                )
                found.extend(rows)
                page = rows.token
                if newest or not page:
                    return found

    def _oldest(self, rows: list[Any]) -> Registered:
        """The first of several entries for one checkpoint; the others are deleted."""
        unique = {row.model_id: row for row in rows}
        first, *others = sorted(unique.values(), key=lambda row: (row.creation_timestamp, row.model_id))
        for row in others:
            with (
                contextlib.suppress(Missing),
                self._connection.asking("removing a checkpoint made twice") as client,
            ):
                client.delete_logged_model(row.model_id)
        registered = _registered(first)
        assert registered is not None  # noqa: S101  rows were parsed before
        return registered


def _registered(model: Any) -> Registered | None:
    """None for a LoggedModel that is not one of our checkpoints."""
    params, tags = dict(model.params or {}), dict(model.tags or {})
    try:
        return Registered(
            model_id=model.model_id,
            token=int(params["token"]),
            sequence=int(params["sequence"]),
            digest=params["digest"],
            step=int(params["step"]),
            store_url=params["store"],
            ready=str(model.status) == "READY",
            void=tags.get(VOID, ""),
            note=tags.get(NOTE, ""),
        )
    except (KeyError, ValueError):
        return None
