"""A range as seen from its parent: attempts are child flow runs, walked past when dead, never judged by their word.

The server is the journal and the store is the truth. Attempt n of a range has the idempotency key
`<run>:<start>-<stop>:a<n>`: a parent that starts again finds the child that is alive instead of starting another.

Whether a child is dead, the server says: by its worker, or by the automations of `infra.automations`. The parent
has no watch of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from infra.beat import Progress
from infra.prefect_runs import FlowRunInfo
from tasks.budget import check_budget
from tasks.order import RangeOrder, finished
from tasks.runs import attempts_text
from training.checkpoint.document import wall_clock
from training.checkpoint.end import End, put_end
from training.checkpoint.history import read_attempts
from training.checkpoint.store import Store
from training.checkpoint.token import read_claim, token_numbers
from training.errors import KINDS, Corrupt, Fenced, Preempted, RetomaError, Unavailable, error_of_kind

DEPLOYMENT = "train-range/gpu"
DEAD = ("CRASHED", "CANCELLED", "CANCELLING", "FAILED", "COMPLETED")
POLL_SECONDS = 1.0
OWN_STATE_SECONDS = 5.0
KEYS_AT_ONCE = 50


class Superseded(Fenced):
    """The server does not count this parent as running any more: cancelled, or another one goes on."""


class Runs(Protocol):
    """What is asked of the orchestrator; see `infra.prefect_runs.PrefectRuns`."""

    def find_by_key(self, keys: Iterable[str]) -> dict[str, FlowRunInfo]:
        """Flow runs by idempotency key."""

    def live_with_tag(self, tag: str) -> list[FlowRunInfo]:
        """Flow runs with a tag that are not over."""

    def read(self, flow_run_id: str) -> FlowRunInfo:
        """One flow run as it is now."""

    def start(
        self, deployment: str, parameters: dict[str, Any], *, name: str, key: str, tags: Iterable[str]
    ) -> FlowRunInfo:
        """Create a flow run, or find the one with this key."""

    def cancel(self, flow_run_id: str) -> None:
        """Ask for a flow run to be cancelled."""

    def progress(self, run: str) -> Progress | None:
        """What the newest attempt reported last."""

    def put_artifact(self, key: str, kind: Literal["markdown"], data: str, *, flow_run_id: str) -> None:
        """Show something on a flow run's page."""


def run_tag(run: str) -> str:
    """Tag of all flow runs of a run."""
    return f"run:{run}"


def attempt_key(order: RangeOrder, attempt: int) -> str:
    """Idempotency key of an attempt."""
    return f"{order.run}:{order.start}-{order.stop}:a{attempt}"


def is_range(flow_run: FlowRunInfo) -> bool:
    """Whether it is an attempt at a range, and not a parent."""
    return "order" in flow_run.parameters


def is_companion(flow_run: FlowRunInfo) -> bool:
    """Whether it lends a node to a range."""
    return "call" in flow_run.parameters


def cancel_ranges(runs: Runs, run: str) -> None:
    """Cancel every living range of a run; Prefect cancels those of one generation of its parent only."""
    for found in runs.live_with_tag(run_tag(run)):
        if (is_range(found) or is_companion(found)) and found.state != "CANCELLING":
            runs.cancel(found.id)


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
        parent: our own flow run.
    """

    def __init__(
        self,
        order: RangeOrder,
        *,
        runs: Runs,
        store: Store,
        logger: logging.Logger | logging.LoggerAdapter[Any],
        parent: str,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._order, self._runs, self._store, self._parent = order, runs, store, parent
        self._logger, self._sleep, self._clock = logger, sleep, clock
        self._asked = clock()
        self._unclaimed = 0  # attempts in a row that died before they claimed a token

    def follow(self) -> None:
        """Return when the store holds the range.

        Raises:
            GaveUp: too many tries in a row committed nothing.
            Superseded: this parent is no longer wanted. It must leave without saying how it ended.
            Fenced: somebody outside this parent has taken the run over.
            RetomaError: what an attempt failed with for good.
        """
        attempt = 0
        while not self._is_finished():
            attempt, child = self._next_child(attempt)
            child = self._wait(child)
            if not self._is_finished():
                self._judge(attempt, child)
        self._show_attempts()

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
        self._leave_if_unwanted()
        check_budget(self._store, self._order, self._unclaimed)
        order = self._order.model_copy(update={"attempt": attempt})
        return self._runs.start(
            DEPLOYMENT,
            {"order": order.model_dump(mode="json")},
            name=f"{order.run}-{order.start}-{order.stop}-a{attempt}",
            key=attempt_key(order, attempt),
            tags=["retoma", run_tag(order.run)],
        )

    def _wait(self, child: FlowRunInfo) -> FlowRunInfo:
        while child.state not in DEAD:
            self._sleep(POLL_SECONDS)
            if self._clock() - self._asked > OWN_STATE_SECONDS:
                self._leave_if_unwanted()
            child = self._runs.read(child.id)
        return child

    def _leave_if_unwanted(self) -> None:
        """A parent that was frozen, or whose worker is gone, hears nothing of its verdict: it has to look."""
        own = self._runs.read(self._parent)
        self._asked = self._clock()
        if own.state == "RUNNING":
            return
        if own.state in ("CANCELLING", "CANCELLED"):
            cancel_ranges(self._runs, self._order.run)
        raise Superseded(f"this flow run is {own.state.lower()}: {own.message}", run=self._order.run)

    def _judge(self, attempt: int, child: FlowRunInfo) -> None:
        """Return when another attempt is due; raise when not."""
        error = error_from(child.message)
        if child.state == "FAILED":
            self._show_attempts()
            raise error
        if isinstance(error, Fenced):
            following = attempt_key(self._order, attempt + 1)
            if following not in self._runs.find_by_key([following]):
                raise error
            return
        text = f"attempt {attempt} of epochs {self._order.start} to {self._order.stop} ended {child.state}"
        self._logger.warning("%s: %s", text, child.message)
        if self._end(child, error) or isinstance(error, Preempted):
            self._unclaimed = 0
        else:
            self._unclaimed += 1
        self._show_attempts()

    def _show_attempts(self) -> None:
        """On the parent's page: what became of each attempt so far."""
        try:
            table = attempts_text(read_attempts(self._store))
            self._runs.put_artifact(f"attempts-{self._order.run}", "markdown", table, flow_run_id=self._parent)
        except RetomaError as problem:
            self._logger.warning("the table of attempts could not be shown: %s", problem.message)

    def _end(self, child: FlowRunInfo, error: RetomaError) -> bool:
        """Say how the attempt's newest token ended, unless somebody has said so. False: it claimed none."""
        token = max(token_numbers(self._store)[0], default=0)
        try:
            claimed = token > 0 and read_claim(self._store, token).who.get("flow_run_id") == child.id
        except Corrupt:
            return False
        if not claimed:
            return False
        heard = self._runs.progress(self._order.run)
        if heard is not None and heard.token != token:
            heard = None
        put_end(
            self._store,
            End(
                run=self._order.run,
                token=token,
                # a plain error is what Prefect says of a process that it lost
                kind=error.kind if error.kind in KINDS else Unavailable.__name__,
                reason=f"{child.state_name or child.state}: {child.message}",
                by="parent",
                epoch=heard.epoch if heard else 0,
                step=heard.step if heard else 0,
                created=wall_clock(),
            ),
        )
        return True

    def _is_finished(self) -> bool:
        return finished(self._store, self._order.run, self._order.stop) is not None
