"""Whether this attempt is still wanted: asked beside the training, and answered by leaving.

A supervisor that was frozen or cut off may wake when another attempt has long taken over. The token at the store
keeps it from committing; here it is kept from holding a GPU, and from speaking for its flow run. Threads ask the
store and the orchestrator, and need nothing of the main thread, which may be anywhere.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Protocol

from tasks.departure import Departure
from training.checkpoint.store import Store
from training.checkpoint.token import MARKER_KEY, claim_key
from training.errors import Fenced, RetomaError, Unavailable

LOOK_SECONDS = 2.0
TICK_SECONDS = 0.2
DOZED_SECONDS = 0.5  # a pause of our own after which it is time to look again
# Nobody gives up an attempt that was heard of so recently: the shortest window of the automations is twice that.
SLEPT_SECONDS = 5.0
LAST_LOOK_SECONDS = 30.0
NOTE_SECONDS = 0.5
# Counts while the machine is suspended, where the system has such a clock.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Attempt(Protocol):
    """Who is watched."""

    @property
    def token(self) -> int | None:
        """The token held now; None before the first claim and while another one is claimed."""

    @property
    def unwanted(self) -> RetomaError | None:
        """Why it was given up."""

    def give_up(self, error: RetomaError) -> None:
        """Kill the training process, and let the main thread raise this. Repeated as long as it is true."""

    def kill(self, why: str) -> None:
        """Kill the training process and all that it started."""

    def note_end(self, error: RetomaError) -> None:
        """Write down how it ended."""


class FlowRun(Protocol):
    """Our flow run at the orchestrator."""

    def state(self) -> str:
        """Its state's type. Raises `Unavailable`."""


class Watch:
    """Looks every few seconds, and at once after a sleep, until `last_look`.

    - The flow run is no longer Running: we are replaced. Kill the training process and leave by `os._exit`, which
      speaks for nobody: a state that we proposed now could overwrite the verdict.
    - Somebody claimed a newer token: the same, unless the flow run is still Running. Then nobody gave it up, and
      the main thread ends it as Fenced, which tells the parent not to answer with yet another attempt.
    - The flow run is being cancelled: leave as after SIGTERM.
    - Neither the store nor the orchestrator has answered for `lease_seconds`: what they decided we cannot know,
      and nothing can be committed either. Kill and leave. With one of the two the training goes on.

    Args:
        attempt: who is watched.
        store: the run's store.
        flow_run: opens a connection of one thread to our flow run.
        departure: what is asked to leave.
        lease_seconds: see above.
        notice_file: when it appears, the machine is about to be taken away.
        leave: ends the process with an exit code.
        clock: seconds; goes on while the process is stopped.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        store: Store,
        flow_run: Callable[[], AbstractContextManager[FlowRun]],
        departure: Departure,
        lease_seconds: float,
        notice_file: Path | None = None,
        leave: Callable[[int], object] = os._exit,
        clock: Callable[[], float] = lambda: time.clock_gettime(_CLOCK),
    ) -> None:
        self._attempt, self._store, self._flow_run, self._departure = attempt, store, flow_run, departure
        self._lease_seconds, self._notice_file = lease_seconds, notice_file
        self._exit, self._clock = leave, clock
        self._answered = dict.fromkeys(("store", "orchestrator"), clock())
        self._look_now = {name: threading.Event() for name in self._answered}
        self._over = False
        self._leaving = threading.Lock()

    def start(self) -> None:
        """Start the threads."""
        for work in (self._watch_store, self._watch_flow_run, self._watch_clock):
            threading.Thread(target=work, name=f"retoma{work.__name__.replace('_', '-')}", daemon=True).start()

    def last_look(self) -> str:
        """Whether we may still say how the flow run ended. Returns its state, RUNNING or CANCELLING, or never.

        From here the questions end, but a sleep ends the process: who sleeps between this look and the word that
        it allows might speak over the verdict of others.
        """
        self._over = True
        deadline = self._clock() + LAST_LOOK_SECONDS
        with self._flow_run() as flow_run:
            while True:
                try:
                    state = flow_run.state()
                    break
                except Unavailable as error:
                    if self._clock() > deadline:
                        self._leave(error)
                time.sleep(TICK_SECONDS)
        self._leave_if_replaced(state)
        return state

    def _watch_store(self) -> None:
        self._repeat("store", self._look_at_store)

    def _watch_flow_run(self) -> None:
        with self._flow_run() as flow_run:
            self._repeat("orchestrator", lambda: self._look_at_flow_run(flow_run))

    def _repeat(self, name: str, look: Callable[[], None]) -> None:
        while not self._over:
            asked = self._clock()
            with suppress(Exception):  # no answer, for whatever reason: that is what the lease counts
                look()
                self._answered[name] = asked
            self._look_now[name].wait(LOOK_SECONDS)
            self._look_now[name].clear()

    def _look_at_store(self) -> None:
        token = self._attempt.token
        if token is None:
            self._store.exists(MARKER_KEY)
        elif self._store.exists(claim_key(token + 1)) and self._attempt.token == token:  # else it is our own
            error = Fenced(f"a newer attempt claimed token {token + 1}", token=token)
            self._attempt.give_up(error)
            self._look_now["orchestrator"].set()

    def _look_at_flow_run(self, flow_run: FlowRun) -> None:
        state = flow_run.state()
        if self._over:
            return
        self._leave_if_replaced(state)
        if state == "CANCELLING":
            self._departure.ask("the flow run was cancelled")

    def _leave_if_replaced(self, state: str) -> None:
        being_cancelled = state == "CANCELLING" and self._attempt.unwanted is None
        if state != "RUNNING" and not being_cancelled:
            self._leave(Fenced(f"the flow run is {state}, not RUNNING: this attempt is not wanted any more"))

    def _watch_clock(self) -> None:
        last = self._clock()
        while True:
            time.sleep(TICK_SECONDS)
            now = self._clock()
            slept_seconds, last = now - last - TICK_SECONDS, now
            if self._over:
                if slept_seconds > SLEPT_SECONDS:
                    self._leave(Unavailable(f"this process slept for {slept_seconds:.1f} s"))
                continue
            if slept_seconds > DOZED_SECONDS:
                for event in self._look_now.values():
                    event.set()
            self._check_lease(now)
            self._check_notice()

    def _check_lease(self, now: float) -> None:
        silent_seconds = now - max(self._answered.values())
        if silent_seconds > self._lease_seconds:
            self._leave(
                Unavailable(
                    f"neither the store nor the orchestrator has answered for {silent_seconds:.0f} s",
                    hint="look at the network of this node; supervisor.lease_seconds is how long it may be cut off",
                )
            )

    def _check_notice(self) -> None:
        with suppress(OSError):
            if self._notice_file is not None and self._notice_file.exists():
                self._departure.ask(f"{self._notice_file} appeared: the machine is being taken away")

    def _leave(self, error: RetomaError) -> None:
        """The end, in whatever thread it was found. The lock is kept: there is one end only."""
        self._leaving.acquire()
        self._over = True
        self._attempt.kill(error.message)
        # Whoever reads our log, or the store, may be frozen or away.
        note = threading.Thread(target=self._note, args=(error,), daemon=True)
        note.start()
        note.join(NOTE_SECONDS)
        self._exit(error.exit_code)

    def _note(self, error: RetomaError) -> None:
        print(f"leaving at once, {error.kind}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
        with suppress(RetomaError):
            self._attempt.note_end(error)
