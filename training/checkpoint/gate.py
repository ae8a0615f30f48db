"""The health gate: a state with a number that is not finite is not committed, and what was found is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from training.checkpoint.finite import find_not_finite
from training.checkpoint.manifest import Position, Tensor
from training.checkpoint.quarantine import Incident, put_incident
from training.checkpoint.state.boxes import whole_key
from training.checkpoint.state.snapshot import Snapshot
from training.checkpoint.store import Store
from training.errors import Diverged, Unavailable

_FLOATS = ("float", "bfloat", "complex")


class HealthGate:
    """Looks at the snapshots of one attempt before anything of them is written.

    Args:
        paths: keys of tensors that must be finite, or of parts of the state: `optimizer/state` covers all below it.
        store: where incidents are kept.
        run: name of the run.
        now: wall clock, informational.
    """

    def __init__(self, paths: Iterable[str], store: Store, run: str, now: Callable[[], str]) -> None:
        self._paths = frozenset(paths)
        self._store, self._run, self._now = store, run, now
        self._layout_digest = ""
        self._tensors: list[Tensor] = []

    def check(self, snapshot: Snapshot, position: Position, token: int, sequence: int) -> None:
        """Raises `Diverged` and keeps an incident if one of the tensors is not finite."""
        if snapshot.layout_digest != self._layout_digest:
            mine = (entry for entry in snapshot.layout.tensors if entry.chunk in snapshot.chunks)
            self._tensors = [entry for entry in mine if self._covers(entry)]
            self._layout_digest = snapshot.layout_digest
        found = find_not_finite(snapshot, self._tensors)
        if found is None:
            return
        self.keep(found.key, str(found), position, position.step, token, sequence)
        raise Diverged(
            f"{found}, at step {position.step}",
            hint="the last checkpoint is healthy; lower the learning rate, or go on from there with "
            "health.on_divergence=rollback and health.skip_steps",
            run=self._run,
            token=token,
            sequence=sequence,
        )

    def keep(self, name: str, reason: str, position: Position, since_step: int, token: int, sequence: int) -> None:
        """Put an incident. Best effort: with the store away the next attempt runs into it again."""
        incident = Incident(
            run=self._run,
            token=token,
            sequence=sequence,
            name=name,
            reason=reason,
            epoch=position.epoch,
            step=position.step,
            since_step=since_step,
            created=self._now(),
        )
        with contextlib.suppress(Unavailable):
            put_incident(self._store, incident)

    def _covers(self, entry: Tensor) -> bool:
        parts = whole_key(entry.key).split("/")
        return entry.dtype.startswith(_FLOATS) and any(
            "/".join(parts[:count]) in self._paths for count in range(1, len(parts) + 1)
        )
