"""A range as seen from its parent: attempts are child flow runs, walked past when dead, never judged by their word.

The server is the journal and the store is the truth. Attempt n of a range has the idempotency key
`<run>:<start>-<stop>:a<n>`: a parent that starts again finds the child that is alive instead of starting another.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import psutil

from infra.beat import Progress
from infra.prefect_runs import FlowRunInfo
from tasks.order import RangeOrder, finished
from training.checkpoint.history import head_ref
from training.checkpoint.manifest import Ref
from training.checkpoint.store import Store
from training.checkpoint.token import token_numbers
from training.errors import KINDS, Fenced, Preempted, RetomaError, Unavailable, error_of_kind

DEPLOYMENT = "train-range/gpu"
DEAD = ("CRASHED", "CANCELLED", "CANCELLING", "FAILED", "COMPLETED")
POLL_SECONDS = 1.0
PRESENCE_SECONDS = 5.0
# Beyond the silence that the supervisor itself allows its training process.
SILENCE_MARGIN_SECONDS = 60.0
KEYS_AT_ONCE = 50


class GaveUp(Unavailable):
    """So many tries in a row committed nothing that another one at once is pointless."""

    @property
    def kind(self) -> str:
        """To a caller it is the same: retry later."""
        return Unavailable.__name__


class Runs(Protocol):
    """What is asked of the orchestrator; see `infra.prefect_runs.PrefectRuns`."""

    def find_by_key(self, keys: Iterable[str]) -> dict[str, FlowRunInfo]:
        """Flow runs by idempotency key."""

    def read(self, flow_run_id: str) -> FlowRunInfo:
        """One flow run as it is now."""

    def start(
        self, deployment: str, parameters: dict[str, Any], *, name: str, key: str, tags: Iterable[str]
    ) -> FlowRunInfo:
        """Create a flow run, or find the one with this key."""

    def crash(self, flow_run_id: str, message: str) -> None:
        """Set a flow run to Crashed."""

    def progress(self, run: str) -> Progress | None:
        """What the newest attempt reported last."""


def attempt_key(order: RangeOrder, attempt: int) -> str:
    """Idempotency key of an attempt."""
    return f"{order.run}:{order.start}-{order.stop}:a{attempt}"


def outcome_of(error: RetomaError) -> tuple[Literal["CRASHED", "CANCELLED", "FAILED"], str]:
    """State and message in which an attempt's flow run ends.

    Crashed is what the parent answers with another attempt; Cancelled says that another one does the work;
    Failed is final.
    """
    message = f"{error.kind}: {error}"
    if isinstance(error, Fenced):
        return "CANCELLED", message
    if isinstance(error, Unavailable | Preempted):
        return "CRASHED", message
    return "FAILED", message


def error_from(message: str) -> RetomaError:
    """The error that `outcome_of` put into a state's message, or a plain one."""
    kind, colon, rest = message.partition(": ")
    if not (colon and kind in KINDS):
        return RetomaError(message)
    text, _, hint = rest.partition("\n  hint: ")
    return error_of_kind(kind, text, hint=hint or None)


class RangeFollower:
    """Brings one range to its end through as many attempts as it takes.

    Args:
        order: the range; its `attempt` is filled in here.
        runs: the orchestrator.
        store: the run's store.
    """

    def __init__(
        self,
        order: RangeOrder,
        *,
        runs: Runs,
        store: Store,
        logger: logging.Logger | logging.LoggerAdapter[Any],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._order, self._runs, self._store = order, runs, store
        self._logger, self._sleep, self._clock = logger, sleep, clock
        self._failures = 0  # tries in a row that committed nothing

    def follow(self) -> None:
        """Return when the store holds the range.

        Raises:
            GaveUp: too many tries in a row committed nothing.
            Fenced: somebody outside this parent has taken the run over.
            RetomaError: what an attempt failed with for good.
        """
        attempt = 0
        while not self._is_finished():
            attempt, child = self._next_child(attempt)
            before = self._mark()
            child = self._wait(child)
            if self._is_finished():
                return
            self._judge(attempt, child, before)

    def _next_child(self, after: int) -> tuple[int, FlowRunInfo]:
        """The first attempt that is not dead already, found or started."""
        attempt = after + 1
        while True:
            numbers = range(attempt, attempt + KEYS_AT_ONCE)
            found = self._runs.find_by_key([attempt_key(self._order, number) for number in numbers])
            for number in numbers:
                child = found.get(attempt_key(self._order, number))
                if child is None:
                    return number, self._start(number)
                if child.state not in DEAD:
                    self._logger.info("attempt %s is alive: attached to it again", number)
                    return number, child
            attempt += KEYS_AT_ONCE

    def _start(self, attempt: int) -> FlowRunInfo:
        order = self._order.model_copy(update={"attempt": attempt})
        return self._runs.start(
            DEPLOYMENT,
            {"order": order.model_dump(mode="json")},
            name=f"{order.run}-{order.start}-{order.stop}-a{attempt}",
            key=attempt_key(order, attempt),
            tags=["retoma", f"run:{order.run}"],
        )

    def _wait(self, child: FlowRunInfo) -> FlowRunInfo:
        watch = _Watch(self._order, self._runs, self._store, self._clock)
        while child.state not in DEAD:
            self._sleep(POLL_SECONDS)
            child = self._runs.read(child.id)
            if child.state == "RUNNING" and (reason := watch.why_gone(child)):
                self._logger.warning("attempt %s is presumed dead: %s", child.name, reason)
                self._runs.crash(child.id, f"presumed dead: {reason}")
                child = self._runs.read(child.id)
        return child

    def _judge(self, attempt: int, child: FlowRunInfo, before: tuple[Ref | None, int]) -> None:
        """Return when another attempt is due; raise when not."""
        if child.state == "FAILED":
            raise error_from(child.message)
        error = error_from(child.message)
        if isinstance(error, Fenced):
            following = attempt_key(self._order, attempt + 1)
            if following not in self._runs.find_by_key([following]):
                raise error
            return
        head, tokens = self._mark()
        if head != before[0]:
            self._failures = 0
        else:
            self._failures += max(1, tokens - before[1])
        text = f"attempt {attempt} of epochs {self._order.start} to {self._order.stop} ended {child.state}"
        self._logger.warning("%s: %s", text, child.message)
        if self._failures >= self._order.config.attempts_per_range:
            raise GaveUp(
                f"{self._failures} tries in a row without a new checkpoint; the last one: {child.message}",
                hint="cure the cause, then start the same run again: it goes on where it was",
                run=self._order.run,
            )

    def _is_finished(self) -> bool:
        return finished(self._store, self._order.run, self._order.stop) is not None

    def _mark(self) -> tuple[Ref | None, int]:
        """Head and newest token: what has changed at the end of an attempt was its doing."""
        claims, _ = token_numbers(self._store)
        return head_ref(self._store), max(claims, default=0)


class _Watch:
    """Finds an attempt that its worker can no longer report: its process is gone, or nothing moves any more.

    A wrong verdict costs one attempt: the token of the next one fences the old.
    """

    def __init__(self, order: RangeOrder, runs: Runs, store: Store, clock: Callable[[], float]) -> None:
        self._order, self._runs, self._store, self._clock = order, runs, store, clock
        self._looked = self._moved = clock()
        self._seen: object = None
        self._missed = 0

    def why_gone(self, child: FlowRunInfo) -> str | None:
        """The reason to give it up, None as long as there is none. Looks only every few seconds."""
        now = self._clock()
        if now - self._looked < PRESENCE_SECONDS:
            return None
        self._looked = now
        progress = self._runs.progress(self._order.run)
        if progress is None or progress.flow_run_id != child.id:
            return None
        # one more look later: its worker reports a process that has just ended by itself
        self._missed = self._missed + 1 if is_gone(progress) else 0
        if self._missed > 1:
            return f"process {progress.pid} of {progress.host} does not exist any more"
        seen = (progress.beats, progress.phase, head_ref(self._store))
        if seen != self._seen or progress.phase not in ("restoring", "training"):
            self._seen, self._moved = seen, now
        silence_seconds = self._order.config.supervisor.silence_seconds + SILENCE_MARGIN_SECONDS
        if now - self._moved > silence_seconds:
            return f"neither progress nor checkpoint for {silence_seconds:g} s"
        return None


class Reporter(Protocol):
    """Whoever said which process it is."""

    @property
    def host(self) -> str:
        """Name of its machine or container."""

    @property
    def pid(self) -> int:
        """Process number there."""

    @property
    def pid_started(self) -> float:
        """When that process was created."""


def is_gone(reporter: Reporter) -> bool:
    """Whether the process that reported ran on this machine and does not exist any more."""
    if reporter.host != socket.gethostname():
        return False
    try:
        return abs(psutil.Process(reporter.pid).create_time() - reporter.pid_started) > 1.0
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
