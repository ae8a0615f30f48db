"""Gathers what is left when a training is over: the store's history, Prefect's journal, MLflow, processes."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil

from tasks.drill.recording import CommitSeen, Injected, Recording, TokenSeen
from tasks.drill.scene import Scene
from tasks.drill.worlds import segments
from tasks.tracking import registry_of
from training.checkpoint.care.verify import verify
from training.checkpoint.end import end_key, read_ends
from training.checkpoint.history import Lineage, read_committed, read_lineage, sequences
from training.checkpoint.store import Store
from training.checkpoint.token import claim_key, seal_key
from training.config import CheckpointConfig
from training.errors import Corrupt, RetomaError
from training.straight import Segment

if TYPE_CHECKING:
    from tasks.drill.session import Session

ORPHAN_SECONDS = 5.0  # the last processes may still be leaving
# parts of the command of a process that trains, launches ranks, or is one that was forked
TRAINS = ("training.process", "training.group", "training.node", "multiprocessing.forkserver")
Steps = dict[int, tuple[float, ...]]


def collect(
    scene: Scene,
    session: Session,
    started: float,
    hurried: float | None,
    faults: tuple[Injected, ...],
    straight_digest: Callable[[tuple[Segment, ...]], str],
) -> Recording:
    """The recording of a training that is over.

    Args:
        straight_digest: of the straight run, with so many ranks in its segments.
    """
    lineage = read_lineage(scene.store)
    steps = scene.observer.steps()
    head = lineage.head.manifest if lineage.head else None
    states = tuple(scene.journal.states())
    parents = [change for change in states if change.parent]
    commits = tuple(_commits(scene, lineage))
    straight = None
    try:
        straight = straight_digest(segments(commits))
    except RetomaError as error:
        scene.failures.append(f"the straight run: {error}")
    return Recording(
        scenario=session.scenario,
        run=session.run,
        started=started,
        ended=time.time(),
        hurried=hurried,
        interval_steps=_interval(session.job.config.checkpoint, lineage),
        max_lost_steps=session.job.config.checkpoint.max_lost_steps,
        injected=faults,
        tokens=tuple(_tokens(scene, lineage, steps)),
        commits=commits,
        steps=steps,
        states=states,
        outcome=parents[-1].state if parents else "not started",
        message=parents[-1].message if parents else "",
        digest=head.state_digest if head and head.position.epoch >= session.job.config.epochs else None,
        straight_digest=straight,
        problems=tuple(_problems(scene.store, lineage)),
        unregistered=_unregistered(scene, lineage),
        orphans=tuple(_orphans(scene, steps)),
        failures=tuple(scene.failures),
    )


def _interval(config: CheckpointConfig, lineage: Lineage) -> int:
    """Steps between saves: as configured, else the largest distance in the chain."""
    if isinstance(config.every_steps, int) and config.every_steps and config.every_seconds is None:
        return config.every_steps
    at = [0, *(committed.manifest.position.step for committed in lineage.chain)]
    return max((after - before for before, after in itertools.pairwise(at)), default=0)


def _tokens(scene: Scene, lineage: Lineage, steps: Steps) -> list[TokenSeen]:
    seen, ends = scene.observer.seen, read_ends(scene.store)
    claims = scene.observer.claims()
    found = []
    for attempt in lineage.attempts:
        token = attempt.token
        who = attempt.claim.who if attempt.claim else {}
        end = ends.get(token)
        found.append(
            TokenSeen(
                token=token,
                claimed=seen.get(claim_key(token), 0.0),
                sealed=seen.get(seal_key(token)),
                start_step=_start_step(scene.store, attempt.seal),
                flow_run_id=who.get("flow_run_id"),
                pid=_pid(token, claims, steps),
                ended=seen.get(end_key(token)),
                ended_kind=end.kind if end else "",
                ended_by=end.by if end else "",
                reason=end.reason if end else "",
                skipped=tuple(f"{s.key}: {s.reason}" for s in attempt.seal.skipped) if attempt.seal else (),
            )
        )
    return found


def _start_step(store: Store, seal: Any) -> int | None:
    if seal is None:
        return None
    if seal.head is None:
        return 0
    with contextlib.suppress(Corrupt):
        return read_committed(store, seal.head.token, seal.head.sequence).manifest.position.step
    return None


def _pid(token: int, claims: dict[int, float], steps: Steps) -> int | None:
    """The process whose first step came after this claim and before any other: torch takes seconds to load."""
    for pid, times in steps.items():
        before = [number for number, at in claims.items() if times and at < times[0]]
        if before and max(before) == token:
            return pid
    return None


def _commits(scene: Scene, lineage: Lineage) -> list[CommitSeen]:
    kept = {(committed.ref.token, committed.ref.sequence) for committed in lineage.chain}
    seen = scene.observer.seen
    found = []
    for attempt in lineage.attempts:
        for sequence in sequences(scene.store, attempt.token):
            with contextlib.suppress(Corrupt):
                manifest = read_committed(scene.store, attempt.token, sequence).manifest
                found.append(
                    CommitSeen(
                        token=attempt.token,
                        sequence=sequence,
                        step=manifest.position.step,
                        kind=manifest.kind,
                        at=seen.get(manifest.key, 0.0),
                        save_seconds=manifest.costs.save_seconds,
                        void=(attempt.token, sequence) not in kept,
                        ranks=manifest.world_size,
                    )
                )
    return found


def _unregistered(scene: Scene, lineage: Lineage) -> tuple[str, ...] | None:
    try:
        there = registry_of(scene.rig.settings).checkpoints.all(scene.run)
    except RetomaError as error:
        return (f"MLflow does not tell: {error.message}",)
    refs = [committed.ref for committed in lineage.chain]
    return tuple(str(ref) for ref in refs if (ref.token, ref.sequence) not in there)


def _problems(store: Store, lineage: Lineage) -> list[str]:
    """Of the history, and of what the checkpoints are made of: whoever was given up may have overwritten it."""
    found = [f"{problem.key}: {problem.reason}" for problem in lineage.problems]
    try:
        problems = verify(store, data=True).problems
    except RetomaError as error:
        return [*found, f"the store does not tell: {error.message}"]
    return [*found, *(f"{problem.key}: {problem.what}" for problem in problems if problem.severity != "garbage")]


def _orphans(scene: Scene, steps: Steps) -> list[str]:
    deadline = time.monotonic() + ORPHAN_SECONDS
    while (left := _training_pids(scene, steps)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [f"training process {pid}" for pid in left]


def _training_pids(scene: Scene, steps: Steps) -> list[int]:
    """Those that have made a step, and whatever else of a training there is on the nodes."""
    on_nodes = {process.pid for node in scene.rig.nodes.values() for process in node.processes()}
    return sorted(pid for pid in on_nodes | set(steps) if _trains(pid))


def _trains(pid: int) -> bool:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False
    return any(part in command for part in TRAINS)
