"""Faults of a node of a group: not the range's own, whose loss is that of the range."""

from __future__ import annotations

import contextlib
import signal
import time

import psutil

from tasks.drill.fault import NODES, WAKE_SECONDS, Fault, Undo, must_end, nothing
from tasks.drill.rig import Node
from tasks.drill.scene import Companion, Scene, Victim, is_alive
from training.errors import Unavailable

GIVE_UP_SECONDS = 8.0  # a node that does not hear its launcher ends its ranks after 4 s


def lose_node(_: Scene, victim: Victim) -> Undo:
    """SIGKILL everything on another node of the group, its worker first. It does not come back."""
    _kill_all(other_of(victim).node)
    return nothing


def shrink_grow(_: Scene, victim: Victim) -> Undo:
    """The same, and its worker is started again."""
    node = other_of(victim).node
    _kill_all(node)
    return node.start


def cut_rank(scene: Scene, victim: Victim) -> Undo:
    """Cut another node of the group off from everybody. Its ranks must end by themselves, before it is mended."""
    other = other_of(victim)
    other.node.cut()
    at = time.monotonic()

    def heal() -> None:
        left = max(0.0, at + GIVE_UP_SECONDS - time.monotonic())
        must_end(scene, victim, list(other.ranks), left, f"{GIVE_UP_SECONDS:g} s after they were cut off")
        other.node.heal()

    return heal


def freeze_node(scene: Scene, victim: Victim) -> Undo:
    """SIGSTOP everything on another node of the group; wake it when the others have gone on without it."""
    other = other_of(victim)
    frozen = other.node.processes()
    for process in frozen:
        process.send_signal(signal.SIGSTOP)

    def wake() -> None:
        order = list(frozen)
        scene.rng.shuffle(order)
        for process in order:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)
        must_end(scene, victim, list(other.ranks), WAKE_SECONDS, f"{WAKE_SECONDS:g} s after they woke")

    return wake


def other_of(victim: Victim) -> Companion:
    """Another node than the range's own. Where there are several, the first that has a rank."""
    if not victim.companions:
        raise Unavailable("the group has no other node now")
    return victim.companions[0]


def _kill_all(node: Node) -> None:
    """Until nothing is left: a process may be forked while the others are killed."""
    while processes := [process for process in node.processes() if is_alive(process.pid)]:
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=1.0)


NODE_FAULTS = (
    Fault("lose-node", "a node dies for good, its group goes on smaller", lose_node, needs=NODES),
    Fault(
        "shrink-grow",
        "a node of a group dies, and comes back later",
        shrink_grow,
        hold_seconds=60,
        needs=NODES,
        grows=True,
    ),
    Fault(
        "cut-rank",
        "a node of a group can reach nobody, until the others go on",
        cut_rank,
        hold_seconds=60,
        needs=(*NODES, "peers"),
        grows=True,
    ),
    Fault(
        "freeze-node",
        "SIGSTOP a node of a group, wake it when the others go on",
        freeze_node,
        hold_seconds=60,
        needs=NODES,
        grows=True,
    ),
)
