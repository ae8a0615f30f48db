"""One training with faults in it, from its start to its verdict."""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import httpx
import psutil

from infra.prefect_runs import LIVE, PrefectRuns
from tasks.drill.collect import collect
from tasks.drill.fault import Fault, nothing
from tasks.drill.faults import injected
from tasks.drill.job import DrillJob
from tasks.drill.journal import Journal
from tasks.drill.observer import Observer
from tasks.drill.recording import Injected, Recording
from tasks.drill.rig import Rig
from tasks.drill.scene import Scene, Victim
from tasks.follow import start_or_attach
from tasks.milestones import read_milestone
from training.checkpoint.store import open_store
from training.config import load_config
from training.errors import RetomaError, Unavailable
from training.straight import Segment

END_SECONDS = 600.0
START_SECONDS = 180.0
LOOK_SECONDS = 0.5
SUCCESSOR_SECONDS = 15.0  # a parent that crashed is replaced by then
PENDING = "kill-pending"
Report = Callable[[str], None]


class Planned(NamedTuple):
    """The next fault. `wait_seconds` from when the training is fit for one, or from the fault before."""

    fault: Fault
    wait_seconds: float
    since_last: bool = False


@dataclass(kw_only=True)
class Session:
    """One training under faults. The rig must be up, and `job` fit for it.

    Args:
        scenario: name, for the report.
        run: name of the training.
        plan: the faults, one after the other.
        kill_pending: first of all, kill the worker that has taken the range and has not started it yet.
        seed: of everything that is random.
    """

    rig: Rig
    job: DrillJob
    scenario: str
    run: str
    plan: Iterable[Planned]
    report: Report
    seed: int = 0
    kill_pending: bool = False

    def record(self, straight_digest: Callable[[tuple[Segment, ...]], str]) -> Recording:
        """Train, make the faults, wait for the end, and gather what was seen.

        Args:
            straight_digest: of the straight run, with so many ranks in its segments.
        """
        self.rig.mend()
        store = open_store(self.rig.settings.run_url(self.run))
        journal = Journal(self.rig.settings.prefect_url(), self.run)
        observer = Observer(store, self.rig.folder / self.run)
        with PrefectRuns(patience_seconds=60) as runs:
            scene = Scene(
                rig=self.rig,
                run=self.run,
                store=store,
                journal=journal,
                observer=observer,
                rng=random.Random(self.seed),  # noqa: S311 - not a secret
                parent_pid=lambda: self._parent_pid(runs),
            )
            started = time.time()
            faults: list[Injected] = []
            hurried: float | None = None
            try:
                self._start(runs)
                if self.kill_pending:
                    faults.append(self._kill_pending(scene))
                self._make_faults(scene, faults)
                hurried = time.time()
                (scene.orders / "hurry").touch()
                self._wait_for_end(scene)
            except (RetomaError, psutil.Error, httpx.HTTPError, OSError, subprocess.CalledProcessError) as error:
                scene.failures.append(f"{type(error).__name__}: {error}")
                self.report(f"{self.scenario}: {scene.failures[-1]}")
                self._give_up(scene)
            finally:
                observer.close()
        return collect(scene, self, started, hurried, tuple(faults), straight_digest)

    def _start(self, runs: PrefectRuns) -> None:
        file = self.job.drilled(self.rig.folder / self.run)
        start_or_attach(self.rig.settings, runs, file, [], load_config(file), run=self.run, new=True)
        self.report(f"{self.scenario}: run {self.run}, {self.job.config.epochs * self.job.steps_per_epoch} steps")

    def _make_faults(self, scene: Scene, done: list[Injected]) -> None:
        """Make one fault after the other, and note it. Each is taken back before the next one comes."""
        for planned in self.plan:
            over_nodes = planned.fault.is_of_a_node
            if over_nodes:
                self.rig.mend()  # another node was lost for good: here is a new one
            limit_seconds = START_SECONDS if not done else planned.fault.limit_seconds
            victim = scene.victim(limit_seconds, over_nodes=over_nodes)
            if planned.since_last and done:
                time.sleep(max(0.0, done[-1].at + planned.wait_seconds - time.time()))
            else:
                time.sleep(planned.wait_seconds)
            victim = scene.victim(over_nodes=over_nodes)
            fault, undo = injected(scene, planned.fault, victim)
            offset = fault.at - min(scene.observer.seen.values())
            what = f"{f'{planned.fault.name} {fault.detail}'.strip()}, token {fault.token}"
            self.report(f"{self.scenario}: {offset:6.1f} s {what}")
            done.append(fault)
            try:
                self._wait_for_answer(scene, planned.fault, fault, victim)
            finally:
                if undo is not nothing:
                    done[-1] = fault.model_copy(update={"until": time.time()})
                undo()
            if fault.grows:
                self._wait_for_size(scene, fault, lambda ranks, whole: ranks == whole, planned.fault.limit_seconds)
            before = scene.observer.seen
            seconds = max(1.0, fault.at + planned.fault.limit_seconds - time.time())
            what = f"a checkpoint after {fault.fault}"
            scene.wait_for(partial(self._committed, scene, before), seconds, what)

    def _wait_for_answer(self, scene: Scene, fault: Fault, made: Injected, victim: Victim) -> None:
        """Until the fault has lasted as long as it should, or was answered."""
        if fault.answer == "token":
            hold_until = made.at + (fault.hold_seconds or fault.limit_seconds)
            self._wait_for_takeover(scene, victim, hold_until)
            if made.ranks is not None:
                self._wait_for_size(scene, made, lambda ranks, before: ranks < before, fault.limit_seconds)
        elif fault.answer == "parent":
            scene.wait_for(lambda: self._other_parent(scene, made), fault.limit_seconds, "another parent")
        else:
            time.sleep(max(0.0, made.at + fault.hold_seconds - time.time()))

    def _wait_for_takeover(self, scene: Scene, victim: Victim, until: float) -> None:
        """Until another attempt has made a step, or the time is over: then the fault is taken back first."""
        known = set(scene.observer.steps())

        def taken_over() -> bool | None:
            newer = scene.observer.newest_token() > victim.token
            return True if newer and set(scene.observer.steps()) - known else None

        with contextlib.suppress(Unavailable):
            scene.wait_for(taken_over, max(0.0, until - time.time()), "a takeover")

    def _wait_for_size(
        self, scene: Scene, made: Injected, fits: Callable[[int, int], bool], seconds: float
    ) -> None:
        """Until the newest checkpoint is of a group of such a size, by its ranks now and before the fault."""
        whole = made.ranks
        assert whole is not None  # noqa: S101 - the fault is of a group

        def look() -> int | None:
            ranks = scene.group_ranks()
            return ranks if ranks is not None and fits(ranks, whole) else None

        found = scene.wait_for(look, seconds, f"another size of the group than {scene.group_ranks()} ranks")
        self.report(f"{self.scenario}: the group has {found} rank{'s' if found > 1 else ''}")

    def _other_parent(self, scene: Scene, made: Injected) -> bool | None:
        others = [run for run in scene.journal.parents() if run["id"] != made.flow_run_id]
        return True if any(run["state_type"] == "RUNNING" for run in others) else None

    def _committed(self, scene: Scene, before: dict[str, float]) -> bool | None:
        new = set(scene.observer.seen) - set(before)
        return True if any(key.startswith("manifests/") for key in new) else None

    def _kill_pending(self, scene: Scene) -> Injected:
        """SIGKILL the only worker, and what it has started, when the range is Pending. Then another comes."""
        first, *others = self.rig.nodes.values()
        for node in others:
            if worker := node.worker():
                worker.kill()

        def pending() -> str | None:
            ranges = [run for run in scene.journal.flow_runs() if "order" in run["parameters"]]
            return next((run["id"] for run in ranges if run["state_type"] == "PENDING"), None)

        flow_run_id = scene.wait_for(pending, START_SECONDS, "a range that is pending")
        at = time.time()
        for process in first.table.members(first.name):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for node in self.rig.nodes.values():
            node.start()
        self.report(f"{self.scenario}: killed {first.name} while its range was pending")
        scene.victim()
        return Injected(fault=PENDING, at=at, token=0, flow_run_id=flow_run_id, until=time.time())

    def _wait_for_end(self, scene: Scene) -> None:
        """Until a parent is done, or all are over and no other one follows."""
        alive_at = time.monotonic()

        def over() -> bool | None:
            nonlocal alive_at
            time.sleep(LOOK_SECONDS)
            try:
                parents = scene.journal.parents()
            except httpx.HTTPError:
                return None
            if any(run["state_type"] == "COMPLETED" for run in parents):
                return True
            if any(run["state_type"] in LIVE for run in parents):
                alive_at = time.monotonic()
            return True if time.monotonic() - alive_at > SUCCESSOR_SECONDS else None

        scene.wait_for(over, END_SECONDS, "the end of the training")

    def _give_up(self, scene: Scene) -> None:
        """The drill has failed: end the training, so that the next scenario starts clean."""
        with contextlib.suppress(httpx.HTTPError):
            for run in scene.journal.flow_runs():
                if run["state_type"] in LIVE:
                    scene.journal.cancel(run["id"])
        for node in self.rig.nodes.values():
            node.heal()

    def _parent_pid(self, runs: PrefectRuns) -> int:
        found = read_milestone(runs, self.run)
        if found is None:
            raise Unavailable(f"the parent of run {self.run} has not said which process it is")
        return found.pid
