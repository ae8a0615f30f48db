"""Heartbeats outwards: what a training process said, as a Prefect artifact for people and an event for watchers.

A background thread sends the newest state at a bounded rate. Prefect being slow or away costs the training
nothing: what could not be sent is replaced by what is newer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from uuid import UUID

from infra.facts import to_metadata
from training.config import Frozen

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

EVENT = "retoma.progress"
SEND_SECONDS = 2.0
CLIENT_TIMEOUT_SECONDS = 5.0
logger = logging.getLogger(__name__)


class Progress(Frozen):
    """Where one attempt at a range stands. Bytes, seconds, and optimizer steps."""

    run: str
    start: int
    stop: int
    epochs: int
    attempt: int
    flow_run_id: str
    host: str
    pid: int  # of the supervisor
    pid_started: float  # when that process was created, as psutil tells it
    phase: str = "starting"
    tries: int = 0  # tokens claimed by this attempt
    token: int | None = None
    restored: str | None = None
    skipped: int = 0
    epoch: int = 0
    step: int = 0
    total_steps: int | None = None
    steps_per_epoch: int | None = None
    loss: float | None = None
    samples_per_second: float | None = None
    checkpoint: str | None = None
    checkpoint_kind: str | None = None
    written_bytes: int | None = None
    state_bytes: int | None = None
    stall_seconds: float | None = None
    checkpoints: int = 0
    slow_rank: int | None = None  # holds up the others
    failed_saves: int = 0  # of this attempt; training goes on after a few
    beats: int = 0  # messages, and signs of life of their supervisor; a watcher sees by it whether there was any
    error: str | None = None

    @property
    def percent(self) -> float:
        """Share of the whole run, 0 to 100."""
        return 100.0 * min(1.0, self.step / self.total_steps) if self.total_steps else 0.0


def artifact_key(run: str) -> str:
    """Key of the progress artifacts of a run: each attempt adds one version."""
    return f"progress-{run}"


def describe(progress: Progress) -> str:
    """The artifact's text, markdown."""
    rows = {
        "phase": progress.phase,
        "range": f"epochs {progress.start} to {progress.stop} of {progress.epochs}",
        "attempt": f"{progress.attempt}, try {progress.tries}, token {progress.token}",
        "position": f"epoch {progress.epoch}, step {progress.step} of {progress.total_steps or '?'}",
        "loss": None if progress.loss is None else f"{progress.loss:.5g}",
        "samples/s": None if progress.samples_per_second is None else f"{progress.samples_per_second:,.0f}",
        "restored from": progress.restored,
        "last checkpoint": _describe_checkpoint(progress),
        "slow rank": None if progress.slow_rank is None else str(progress.slow_rank),
        "failed saves": str(progress.failed_saves) if progress.failed_saves else None,
        "error": progress.error,
    }
    lines = [f"| {name} | {_cell(value)} |" for name, value in rows.items() if value is not None]
    return "\n".join([f"**{progress.run}**", "", "| | |", "|---|---|", *lines])


def _describe_checkpoint(progress: Progress) -> str | None:
    if progress.checkpoint is None or not progress.state_bytes:
        return progress.checkpoint
    share = 100 * (progress.written_bytes or 0) / progress.state_bytes
    return (
        f"{progress.checkpoint_kind} {progress.checkpoint}, {progress.written_bytes:,} bytes "
        f"({share:.1f} % of the state), stall {1000 * (progress.stall_seconds or 0):.1f} ms"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


class Reporter:
    """Sends `Progress` to Prefect from a thread of its own.

    Args:
        flow_run_id: the flow run whose page shows it; the event's resource.
        send_seconds: least time between two sendings.
        connect: opens a client; by default with short timeouts, to the server of the environment.
        emit: emits an event; by default Prefect's.
    """

    def __init__(
        self,
        flow_run_id: str,
        *,
        send_seconds: float = SEND_SECONDS,
        connect: Callable[[], SyncPrefectClient] | None = None,
        emit: Callable[..., Any] | None = None,
    ) -> None:
        self._flow_run_id = flow_run_id
        self._send_seconds = send_seconds
        self._connect = connect or short_client
        self._emit = emit
        self._client: SyncPrefectClient | None = None  # kept: opening one costs 30 ms of a core
        self._artifact_id: UUID | None = None
        self._newest: Progress | None = None
        self._beats_sent = 0  # before the first message nothing is sent: whoever watches would count from then
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="retoma-beat", daemon=True)
        self._thread.start()

    def report(self, progress: Progress) -> None:
        """Send this soon, unless something newer comes first. Returns at once."""
        with self._changed:
            self._newest = progress
            self._changed.notify()

    def close(self, timeout_seconds: float = 3.0) -> None:
        """Send what is pending and end the thread; after `timeout_seconds` it is left to itself."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        failures = 0
        while (progress := self._take()) is not None:
            try:
                self._send(progress)
                failures = 0
            except Exception as error:  # noqa: BLE001  # reporting must not stop what it reports on
                failures += 1
                level = logging.WARNING if failures == 1 else logging.DEBUG
                logger.log(level, "progress could not be sent to Prefect: %s", error)
                self._disconnect()
            self._pause()
        self._disconnect()

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.__exit__(None, None, None)

    def _take(self) -> Progress | None:
        with self._changed:
            self._changed.wait_for(lambda: self._newest is not None or self._closing)
            progress, self._newest = self._newest, None
            return progress

    def _pause(self) -> None:
        until = time.monotonic() + self._send_seconds
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=until - time.monotonic())

    def _send(self, progress: Progress) -> None:
        if progress.beats != self._beats_sent:
            self._beats_sent = progress.beats
            self._emit_beat(progress)
        self._write_artifact(progress)

    def _emit_beat(self, progress: Progress) -> None:
        if self._emit is None:
            from prefect.events import emit_event  # Prefect takes a second to import

            self._emit = emit_event
        self._emit(
            event=EVENT,
            resource={
                "prefect.resource.id": f"prefect.flow-run.{self._flow_run_id}",
                "retoma.run": progress.run,
            },
            payload=progress.model_dump(mode="json"),
        )

    def _write_artifact(self, progress: Progress) -> None:
        from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate

        fields: dict[str, Any] = {
            "data": round(progress.percent, 2),
            "description": describe(progress),
            "metadata_": to_metadata(progress),
        }
        if self._client is None:
            self._client = self._connect().__enter__()
        if self._artifact_id is None:
            made = ArtifactCreate(
                key=artifact_key(progress.run), type="progress", flow_run_id=UUID(self._flow_run_id), **fields
            )
            self._artifact_id = self._client.create_artifact(made).id
        else:
            self._client.update_artifact(self._artifact_id, ArtifactUpdate(**fields))


def short_client() -> SyncPrefectClient:
    """A client that gives up on a request after a few seconds."""
    from prefect.client.orchestration import get_client

    return get_client(httpx_settings={"timeout": CLIENT_TIMEOUT_SECONDS}, sync_client=True)
