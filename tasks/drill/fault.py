"""What a fault is: how it is made and taken back, what must come after it, and what it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import psutil

from tasks.drill.scene import Scene, Victim, is_alive

WAKE_SECONDS = 2.0
Undo = Callable[[], None]
# What a fault needs: a stack of the drill's own, a store behind a wire, a store in a folder, a group of ranks, one
# over two nodes, a wire between these, or a worker that is free when the range's own is gone.
Need = Literal["own", "wire", "folder", "ranks", "nodes", "peers", "spare"]
OWN: tuple[Need, ...] = ("own",)
ANOTHER: tuple[Need, ...] = ("own", "spare")
WIRE: tuple[Need, ...] = ("own", "wire")
RANKS: tuple[Need, ...] = ("ranks",)
NODES: tuple[Need, ...] = ("own", "nodes")


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        name: on the command line and in reports.
        about: one line for people.
        make: makes it; returns what takes it back.
        answer: what must come: another `token` that trains, `steps` of any attempt, or another `parent`.
        hold_seconds: how long it lasts at most; it is taken back earlier once it was answered by a token.
        limit_seconds: the answer must have come by then.
        needs: what it is possible with.
        grows: of a node of a group: whether it is a part of it again, once the fault is taken back.
        quick: whether it belongs to the short set.
    """

    name: str
    about: str
    make: Callable[[Scene, Victim], Undo]
    answer: Literal["token", "steps", "parent"] = "token"
    hold_seconds: float = 0.0
    limit_seconds: float = 180.0
    needs: tuple[Need, ...] = ()
    grows: bool = False
    quick: bool = False

    @property
    def is_of_a_node(self) -> bool:
        """Whether it takes a node from a group, which goes on with fewer ranks."""
        return "nodes" in self.needs


def nothing() -> None:
    """What there is to take back after a kill."""


def must_end(scene: Scene, victim: Victim, processes: list[psutil.Process], seconds: float, when: str) -> None:
    """By themselves, within so long."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    if pids := [process.pid for process in alive if is_alive(process.pid)]:
        scene.failures.append(f"token {victim.token}: {pids} still lived {when}")
