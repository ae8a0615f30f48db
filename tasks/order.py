"""What one attempt at a range is told, what it gives back, and whom it talks to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from infra.mlflow_runs import RunStatus
from tasks.data import DataVersion
from training.checkpoint.history import head_ref, read_committed
from training.checkpoint.manifest import Committed, Position, Ref
from training.checkpoint.store import Store
from training.config import Frozen, JobConfig
from training.ports import EVALUATION_DUE


class RangeOrder(Frozen):
    """What an attempt is told: plain values that pass through the orchestrator."""

    run: str
    start: int
    stop: int
    attempt: int
    config: JobConfig
    requested: str  # digest of the identity that the user asked for, before the job's defaults were filled in
    store_url: str
    data_version: DataVersion | None = None


class RangeResult(Frozen):
    """A range that is done."""

    checkpoint: Ref
    position: Position
    tries: int  # tokens claimed by this attempt; 0: the store already had it


class Pointer(Protocol):
    """A registered checkpoint."""

    @property
    def store_url(self) -> str:
        """Store root of its run."""

    @property
    def token(self) -> int:
        """Token that committed it."""

    @property
    def sequence(self) -> int:
        """Its number."""

    @property
    def digest(self) -> str:
        """Digest of its manifest."""


class Registry(Protocol):
    """The question that a range asks of MLflow."""

    def newest(self, run: str) -> Pointer | None:
        """The run's newest registered checkpoint. Raises `Unavailable`."""


class Publisher(Protocol):
    """What is told to MLflow in the background. None of it raises or waits."""

    def attempt_started(self, token: int, start: int, stop: int, who: Mapping[str, Any]) -> None:
        """A token was claimed."""

    def attempt_ended(self, token: int, status: RunStatus, reason: str) -> None:
        """Its training process is dead. Status: FINISHED, FAILED or KILLED."""

    def notify(self) -> None:
        """The store has something new."""

    def profiled(self, path: str) -> None:
        """A file is to be an artifact of the run, below `profile`; it stays where it is until `close`."""


def finished(store: Store, run: str, stop: int) -> Committed | None:
    """The head of the run, if everything up to the end of epoch `stop` is done; None otherwise."""
    ref = head_ref(store)
    if ref is None:
        return None
    head = read_committed(store, ref.token, ref.sequence, run)
    due = bool(head.manifest.meta.get(EVALUATION_DUE)) and head.manifest.position.epoch == stop
    return head if head.manifest.position.epoch >= stop and not due else None
