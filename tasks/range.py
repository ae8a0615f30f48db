"""One orchestrated attempt at an epoch range: verify, claim, start the training process, restart it in place.

The supervisor imports no torch. What it decides by is the store: a range that the store holds is done, whoever
says otherwise.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from infra.beat import Progress
from infra.mlflow_runs import RunStatus
from tasks.budget import check_budget, may_roll_back
from tasks.companions import Company
from tasks.data import verify_data
from tasks.departure import Departure, Leave
from tasks.ending import Ending
from tasks.hearing import Hearing
from tasks.order import Publisher, RangeOrder, RangeResult, Registry, finished
from tasks.supervise import GROUP_COMMAND, TRAINING_COMMAND, Child
from training.checkpoint.document import wall_clock
from training.checkpoint.end import DONE, End, end_numbers, put_end
from training.checkpoint.history import head_ref, read_committed
from training.checkpoint.manifest import Ref
from training.checkpoint.store import open_store
from training.checkpoint.token import check_not_fenced, claim, mark_run, prove_put_if_absent
from training.errors import Diverged, Fenced, Invalid, Preempted, RetomaError, Unavailable
from training.ports import Done, Gathering, Message, Present, RangeSpec, Saved

# The same again on any node, so another try would only cost time; Fenced: another attempt does the work;
# Preempted: this node is about to go.
FINAL = (Invalid, Diverged, Fenced, Preempted)
# Raised by the process, but about the machine: the same words twice do not prove a mistake in the job.
MACHINE_ERRORS = ("AcceleratorError", "OutOfMemoryError", "DistBackendError", "OSError", "MemoryError")
PREDECESSORS = 16
# How long a group that could begin waits for more nodes: to be started, or to come back to another generation.
FIRST_CALL_SECONDS, LAST_CALL_SECONDS = 15.0, 2.0


@dataclass(kw_only=True)
class RangeSupervisor:
    """One attempt at a range on this node. Use it from the main thread, see `tasks.supervise`."""

    order: RangeOrder
    root: Path
    flow_run_id: str
    registry: Registry | None
    publisher: Publisher
    on_progress: Callable[[Progress], None]
    logger: logging.Logger | logging.LoggerAdapter[Any]
    command: Sequence[str] | None = None  # default: by the number of ranks
    company: Company | None = None  # who calls other nodes, where the group has several
    profile_folder: Path | None = None  # of the profiles, until they are published

    def __post_init__(self) -> None:
        order = self.order
        self.store = open_store(order.store_url)
        self.token: int | None = None  # held now; read by the watch
        self.unwanted: RetomaError | None = None
        self.child: Child | None = None
        self.expected: Ref | None = None
        self.best_step = 0  # of a committed checkpoint
        self.restarts_left = order.config.supervisor.restarts_in_place
        self.last_failure: tuple[str, str] | None = None
        progress = Progress(
            run=order.run,
            start=order.start,
            stop=order.stop,
            epochs=order.config.epochs,
            attempt=order.attempt,
            flow_run_id=self.flow_run_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            pid_started=psutil.Process().create_time(),
        )
        self.hearing = Hearing(progress, self.on_progress, self.publisher, self.logger)

    @property
    def progress(self) -> Progress:
        """Where the attempt stands."""
        return self.hearing.progress

    def run(self) -> RangeResult:
        """Run the range to its end.

        Raises:
            Fenced: another attempt has taken over; it does the work.
            Unavailable, Preempted: this node, or the store, failed; another attempt may do better.
            Invalid, Diverged, RetomaError: another attempt would end the same way.
        """
        mark_run(self.store, self.order.run)
        prove_put_if_absent(self.store, self.order.run)
        if head := finished(self.store, self.order.run, self.order.stop):
            self.hearing.report(phase="done")
            self.logger.info("epochs %s to %s are in the store already", self.order.start, self.order.stop)
            return RangeResult(checkpoint=head.ref, position=head.manifest.position, tries=0)
        data_folder = self._verify_data()
        self._ask_registry()
        while True:
            ending = self._try(data_folder)
            if ending.done is not None:
                self.hearing.report(phase="done")
                return RangeResult(
                    checkpoint=ending.done.checkpoint, position=ending.done.position, tries=self.progress.tries
                )
            if self.unwanted is not None:
                raise self.unwanted
            self._restart_or_raise(ending)

    def run_until_asked(self, departure: Departure) -> RangeResult:
        """`run`, unless somebody asks this process to leave: then the training process saves and ends.

        Raises:
            Preempted: it left, and there is more to do.
        """
        try:
            with departure:
                return self.run()
        except Leave as leave:
            return self._left(str(leave))

    def _left(self, why: str) -> RangeResult:
        if self.unwanted is not None:
            raise self.unwanted
        with suppress(RetomaError):
            if head := finished(self.store, self.order.run, self.order.stop):  # the last save was the end of it
                self.hearing.report(phase="done")
                return RangeResult(checkpoint=head.ref, position=head.manifest.position, tries=self.progress.tries)
        kept = self.progress.checkpoint or self.progress.restored or "nothing"
        error = Preempted(f"asked to leave ({why}); {kept} is committed", hint="another attempt goes on from there")
        self.hearing.report(phase="preempted", error=error.message)
        with suppress(RetomaError):
            self.note_end(error)
        raise error

    def give_up(self, error: RetomaError) -> None:
        """Kill the training process; `run` ends with this error. From any thread."""
        self.unwanted = error
        self.kill(error.message)

    def kill(self, why: str) -> None:
        """Kill the training process, if there is one. From any thread."""
        if self.child is not None:
            self.child.kill(why)

    def note_end(self, error: RetomaError | None, ending: Ending | None = None) -> None:
        """Say in the store how this attempt ended, if it holds a token; None: it is done. Raises `Unavailable`."""
        if self.token is None:
            return
        failed = ending.failed if ending else None
        put_end(
            self.store,
            End(
                run=self.order.run,
                token=self.token,
                kind=DONE if error is None else failed.error if failed else error.kind,
                reason=error.message if error else "",
                by="supervisor",
                epoch=self.progress.epoch,
                step=self.progress.step,
                silent_seconds=ending.silent_seconds if ending else None,
                stack=ending.stack if ending else None,
                created=wall_clock(),
            ),
        )

    def _verify_data(self) -> Path | None:
        version = self.order.data_version
        if version is None:
            return None
        self.hearing.report(phase="verifying data")
        return verify_data(self.root, version)

    def _ask_registry(self) -> None:
        """What MLflow knows as newest, held against the store. The store wins; a difference is worth a line."""
        head = head_ref(self.store)
        if head is not None:
            committed = read_committed(self.store, head.token, head.sequence, self.order.run)
            self.best_step = committed.manifest.position.step
        if self.registry is None:
            return
        try:
            known = self.registry.newest(self.order.run)
        except (Unavailable, Invalid) as error:
            self.logger.warning("MLflow does not tell, going on from the store alone: %s", error.message)
            return
        if known is not None:
            self.expected = Ref(token=known.token, sequence=known.sequence, digest=known.digest)
            if known.store_url not in (self.store.url, self.order.store_url):
                self.logger.warning("MLflow says that the store is %s: it moved?", known.store_url)
        if self.expected != head:
            self.logger.warning("MLflow knows %s as newest, the store has %s: the store wins", self.expected, head)

    def _try(self, data_folder: Path | None) -> Ending:
        """One token, one training process."""
        order = self.order
        tries = self.progress.tries + 1
        who = self._who(tries)
        if self.token is not None:
            check_not_fenced(self.store, self.token, order.run)  # a claim would take the run away from others
        self.token = None  # or the watch would take our own claim for another's
        token = claim(self.store, order.run, who, created=datetime.now(UTC).isoformat(timespec="seconds"))
        self.token = token
        if tries == 1:
            self._note_predecessors(token)
        self.hearing.report(phase="starting", token=token, tries=tries)
        self.publisher.attempt_started(token, order.start, order.stop, who)
        spec = RangeSpec(
            run=order.run,
            start=order.start,
            stop=order.stop,
            token=token,
            store_url=order.store_url,
            config=order.config,
            data_folder=str(data_folder) if data_folder else None,
            data_version=order.data_version.model_dump() if order.data_version else {},
            expected=self.expected,
            gathering=self._gathering(tries),
            profile_folder=str(self.profile_folder) if self.profile_folder else None,
        )
        self.child = Child(
            self.command or (GROUP_COMMAND if order.config.parallel.world > 1 else TRAINING_COMMAND),
            spec.model_dump_json(),
            on_message=self._hear,
            show=lambda line: self.logger.info("| %s", line),
            limits=order.config.supervisor,
            vouch=self.hearing.vouch,
            cwd=self.root,
        )
        try:
            ending = self.child.run()
        except BaseException as error:
            why = str(error) or type(error).__name__
            self.publisher.attempt_ended(token, "KILLED", f"the supervisor was stopped: {why}")
            raise
        self.publisher.attempt_ended(token, *_verdict(ending))
        self._note_ending(ending)
        return ending

    def _gathering(self, tries: int) -> Gathering | None:
        """Those that were called for the first time have to be started first."""
        if self.company is None:
            return None
        seconds = FIRST_CALL_SECONDS if tries == 1 else LAST_CALL_SECONDS
        return self.company.gathering.model_copy(update={"last_call_seconds": seconds})

    def _note_ending(self, ending: Ending) -> None:
        """Say in the store how the training process ended. Its absence stops nothing."""
        try:
            self.note_end(self.unwanted or ending.error(), None if self.unwanted else ending)
        except Unavailable as problem:
            self.logger.warning("how token %s ended could not be noted: %s", self.token, problem.message)

    def _note_predecessors(self, token: int) -> None:
        """Attempts before ours that left no word died with their supervisors."""
        older, known = token - 1, set(end_numbers(self.store))
        while older > max(0, token - PREDECESSORS) and older not in known:
            end = End(
                run=self.order.run,
                token=older,
                kind=Unavailable.__name__,
                reason=f"its supervisor left no word; found by token {token}",
                by="successor",
                created=wall_clock(),
            )
            put_end(self.store, end)
            older -= 1

    def _who(self, tries: int) -> dict[str, Any]:
        """For people, and for finding a run's configuration before it has a checkpoint."""
        return {
            "range": [self.order.start, self.order.stop],
            "attempt": self.order.attempt,
            "try": tries,
            "flow_run_id": self.flow_run_id,
            "host": self.progress.host,
            "pid": self.progress.pid,
            "requested": self.order.requested,
            "config": self.order.config.model_dump(mode="json"),
        }

    def _hear(self, message: Message) -> None:
        self.hearing.hear(message)
        if isinstance(message, Present) and self.company is not None:
            self.company.here = message.names
        elif isinstance(message, Done) and self.company is not None:
            self.company.dismiss()
        if isinstance(message, Saved):
            self.expected = message.checkpoint
            if message.position.step > self.best_step:
                # What fails after new progress is a new failure. Each restart is paid for with committed steps,
                # so this ends; a crash that comes back at the same step is not paid for.
                self.best_step = message.position.step
                self.restarts_left = self.order.config.supervisor.restarts_in_place
                self.last_failure = None

    def _restart_or_raise(self, ending: Ending) -> None:
        """Return to try again on this node; raise when that is over."""
        error = ending.error()
        if error is None:
            return
        if ending.regroup is not None and isinstance(error, Preempted):
            self.hearing.report(phase="regrouping")
            self.logger.info("starting the group again: %s", ending.regroup)
            return
        self.hearing.report(phase="failed", error=error.message)
        if isinstance(error, Diverged) and may_roll_back(self.store, self.order.config.health):
            self.logger.warning("going on from before the trouble: %s", error.message)
            return
        if isinstance(error, FINAL):
            raise error
        if self._is_repeated(ending):
            raise type(error)(f"twice the same without progress: {error.message}", **error.fields()) from error
        if self.restarts_left <= 0:
            if isinstance(error, Unavailable):
                raise error
            raise Unavailable(error.message, hint=error.hint, run=self.order.run) from error
        check_budget(self.store, self.order)
        self.restarts_left -= 1
        self.logger.warning("restarting in place: %s", error.message)

    def _is_repeated(self, ending: Ending) -> bool:
        """Whether the job itself failed with the same words as in the try before."""
        failed = ending.failed
        if failed is None or failed.error in (*MACHINE_ERRORS, Unavailable.__name__, Preempted.__name__):
            self.last_failure = None
            return False
        failure = (failed.error, failed.message)
        repeated, self.last_failure = failure == self.last_failure, failure
        return repeated


def _verdict(ending: Ending) -> tuple[RunStatus, str]:
    """Status and reason of the attempt's MLflow run."""
    error: RetomaError | None = ending.error()
    if error is None:
        return "FINISHED", "done"
    if ending.failed is not None and not isinstance(error, Fenced | Preempted):
        return "FAILED", error.message
    return "KILLED", error.message if ending.failed else ending.cause()
