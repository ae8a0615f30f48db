"""Publishing a run to MLflow: once, by anyone who reconciles; or in the background of a range's supervisor."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from infra.mlflow_registry import MlflowRegistry
from infra.mlflow_runs import RunStatus
from tasks.reconcile import PublishReport, Reconciler
from tasks.verdict import Ended
from training.checkpoint.store import Store, open_store
from training.config import JobConfig
from training.errors import RetomaError, Unavailable

__all__ = ["PublishReport", "Publisher", "publish"]

BETWEEN_SECONDS = 1.0  # commits that come faster are registered together
PICTURE_SECONDS = 20.0  # the lineage page is refreshed at most this often while training goes on
RETRY_SECONDS = (2.0, 5.0, 15.0, 30.0)
CLOSE_SECONDS = 20.0
logger = logging.getLogger(__name__)


def publish(store: Store, registry: MlflowRegistry, run: str, final: bool = False) -> PublishReport:
    """Register everything of a run that is committed and not registered. Repeating it changes nothing.

    Args:
        store: the run's store.
        registry: where to register.
        run: name of the run.
        final: nobody works on the run any more; attempts that still show RUNNING are ended.

    Raises:
        Unavailable: the store or MLflow did not answer. What was done stays; run it again.
        Invalid: MLflow refuses, or the store holds another run.
    """
    return Reconciler(store, registry, run).reconcile(final=final)


class Publisher:
    """Registers a run's checkpoints from a thread of its own while training goes on.

    No method waits for MLflow but `close`, and none raises because MLflow is away: what it misses is registered
    when it answers again, or by the next `publish`.

    Args:
        store_url: the run's store.
        registry: where to register; None: nowhere, everything is a no-op.
        run: name of the run.
        config, data_version: see `MlflowRegistry.open_run`; for when the run's starter could not reach MLflow.
        between_seconds: shortest time between two registrations.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store_url: str,
        registry: MlflowRegistry | None,
        run: str,
        *,
        config: JobConfig | None = None,
        data_version: Mapping[str, Any] | None = None,
        between_seconds: float = BETWEEN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._between_seconds = between_seconds
        self._clock = clock
        self._reconciler = (
            Reconciler(open_store(store_url), registry, run, config, data_version) if registry else None
        )
        self._changed = threading.Condition()
        self._due = False
        self._closing = False
        self._started: dict[int, dict[str, Any]] = {}
        self._ended: dict[int, Ended] = {}
        self._profiles: list[str] = []
        self._failures = 0
        self._error: str | None = None
        self._pictured_seconds = -PICTURE_SECONDS
        self._thread = threading.Thread(target=self._work, name="retoma-publisher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        if self._reconciler is not None:
            self._thread.start()

    def notify(self) -> None:
        """Say that a checkpoint was committed. Returns at once."""
        with self._changed:
            self._due = True
            self._changed.notify_all()

    def profiled(self, path: str) -> None:
        """Say that a profile was written. Returns at once; the file must stay until `close`."""
        with self._changed:
            self._profiles.append(path)
        self.notify()

    def attempt_started(self, token: int, start: int, stop: int, who: Mapping[str, Any]) -> None:
        """Say who works on the epochs `[start, stop)` with this token. Returns at once."""
        with self._changed:
            self._started[token] = {**who, "range": f"{start}-{stop}"}
        self.notify()

    def attempt_ended(self, token: int, status: RunStatus, reason: str = "") -> None:
        """Say how an attempt ended. Returns at once; remembered until MLflow has it."""
        with self._changed:
            self._ended[token] = Ended(status, reason)
        self.notify()

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> PublishReport:
        """Register what is left, within the time, and end the thread.

        Returns:
            What MLflow has now, what it lacks, and why. Never raises because MLflow or the store is away.
        """
        if self._reconciler is None:
            return PublishReport(run=self._run, error="no MLflow is configured")
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)
        if self._thread.is_alive():  # in a request that MLflow does not answer; it dies with the process
            self._error = self._error or f"MLflow did not answer within {timeout_seconds:g} s"
        if self._profiles:
            logger.warning(
                "%s profiles of run %s did not reach MLflow and are lost", len(self._profiles), self._run
            )
        if self._error:
            with contextlib.suppress(RetomaError):
                self._reconciler.note_unregistered()
        return self._reconciler.report(self._error)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due or self._closing, timeout=self._pause_seconds())
                last = self._closing
                self._due = False
            self._reconcile(last=last)
            if last:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closing, timeout=self._between_seconds + self._back_off())

    def _pause_seconds(self) -> float | None:
        """None: until something happens. After a failure, or with a page that is not fresh: not for ever."""
        return 0.0 if self._failures else PICTURE_SECONDS

    def _back_off(self) -> float:
        return RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS)) - 1] if self._failures else 0.0

    def _reconcile(self, *, last: bool) -> None:
        assert self._reconciler is not None  # noqa: S101  no thread without it
        with self._changed:
            started, ended = dict(self._started), dict(self._ended)
        now = self._clock()
        picture = last or bool(ended) or now - self._pictured_seconds >= PICTURE_SECONDS
        try:
            self._reconciler.reconcile(ended, started, picture=picture)
        except Exception as error:  # noqa: BLE001  no fault of publishing may end a training
            self._note_failure(error)
            return
        self._failures, self._error = 0, None
        if picture:
            self._pictured_seconds = now
        with self._changed:  # what was told in the meantime stays
            self._started = {k: v for k, v in self._started.items() if started.get(k) != v}
            self._ended = {k: v for k, v in self._ended.items() if ended.get(k) != v}
        self._upload_profiles()

    def _upload_profiles(self) -> None:
        """Those that MLflow is away for wait; one that it does not take is left out."""
        assert self._reconciler is not None  # noqa: S101  no thread without it
        while self._profiles:
            try:
                self._reconciler.add_profile(self._profiles[0])
            except Unavailable as error:
                self._note_failure(error)
                return
            except Exception as error:  # noqa: BLE001  no fault of publishing may end a training
                logger.warning("run %s: %s is left out: %s", self._run, self._profiles[0], error)
            del self._profiles[0]

    def _note_failure(self, error: Exception) -> None:
        text = error.message if isinstance(error, RetomaError) else repr(error)
        if text != self._error:  # once for each kind of trouble, not at each try
            known = isinstance(error, Unavailable)
            logger.warning("publishing run %s waits: %s", self._run, text, exc_info=None if known else error)
        self._failures += 1
        self._error = text
