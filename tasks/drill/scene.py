"""What a fault can lay hands on: the attempt that trains now, its processes, its node, its store."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import httpx
import psutil

from tasks.drill.journal import Journal
from tasks.drill.observer import Observer
from tasks.drill.rig import Node, Rig
from training.checkpoint.history import head_ref, read_committed, sequences
from training.checkpoint.store import Store
from training.checkpoint.token import read_claim
from training.errors import Corrupt, RetomaError, Unavailable

POLL_SECONDS = 0.03
OVER_SECONDS = 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class Companion:
    """Another node of a group than the range's own.

    Attributes:
        agent: the process there that the launcher hears.
        ranks: those there.
    """

    node: Node
    agent: psutil.Process
    ranks: tuple[psutil.Process, ...]


@dataclass(frozen=True)
class Victim:
    """One attempt, alive.

    Attributes:
        training: the process that its supervisor has started: that trains, or the launcher of the ranks.
        ranks: of a group, on all of its nodes; else empty.
        companions: of a group that has other nodes now.
    """

    token: int
    flow_run_id: str
    supervisor: psutil.Process
    training: psutil.Process
    node: Node | None
    ranks: tuple[psutil.Process, ...] = ()
    companions: tuple[Companion, ...] = ()

    @property
    def stepping(self) -> psutil.Process:
        """The process whose steps are written down."""
        return self.ranks[0] if self.ranks else self.training

    @property
    def below(self) -> list[psutil.Process]:
        """All that the supervisor has started, and that is still there."""
        try:
            return [self.training, *self.training.children(recursive=True)]
        except psutil.Error:
            return [self.training, *self.ranks]

    @property
    def writing(self) -> list[psutil.Process]:
        """All that may write to the store, on any node."""
        below = self.below
        return [*below, *(rank for rank in self.ranks if rank not in below)]


@dataclass
class Scene:
    """One training under way."""

    rig: Rig
    run: str
    store: Store
    journal: Journal
    observer: Observer
    rng: random.Random
    parent_pid: Callable[[], int]
    failures: list[str] = field(default_factory=list)

    @property
    def orders(self) -> Path:
        """Folder of orders to the drilled job."""
        folder = self.rig.folder / self.run / "orders"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def victim(self, timeout_seconds: float = 150.0, *, over_nodes: bool = False) -> Victim:
        """The attempt that trains now, and has committed something under its own token.

        Args:
            timeout_seconds: how long to wait for one.
            over_nodes: it must have another node.

        Raises:
            Unavailable: there is none in time, or the training is over.
        """
        looked = time.monotonic()

        def look() -> Victim | None:
            nonlocal looked
            if time.monotonic() - looked > OVER_SECONDS:
                looked = time.monotonic()
                self._refuse_if_over()
            found = self._victim()
            return found if found is None or found.companions or not over_nodes else None

        what = " on several nodes" if over_nodes else ""
        return self.wait_for(look, timeout_seconds, f"an attempt that trains{what} and has committed something")

    def group_ranks(self) -> int | None:
        """Ranks that wrote the newest checkpoint."""
        with contextlib.suppress(RetomaError):
            if head := head_ref(self.store):
                return read_committed(self.store, head.token, head.sequence).manifest.world_size
        return None

    def _refuse_if_over(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            if any(run["state_type"] in ("COMPLETED", "FAILED") for run in self.journal.parents()):
                raise Unavailable(
                    "the training was over before the fault could be made", hint="a longer one: --set epochs=..."
                )

    def wait_for(self, look: Callable[[], T | None], timeout_seconds: float, what: str) -> T:
        """Look until there is something.

        Raises:
            Unavailable: it did not happen in time.
        """
        deadline = time.monotonic() + timeout_seconds
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise Unavailable(f"{what}: did not happen within {timeout_seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        return found

    def steps_of(self, process: psutil.Process) -> int:
        """Steps that a training process has made."""
        return len(self.observer.steps().get(process.pid, ()))

    def training_pids(self) -> set[int]:
        """Training processes of this run that exist, frozen ones included."""
        pids = self.observer.steps()
        return {pid for pid in pids if is_alive(pid)}

    def _victim(self) -> Victim | None:
        token = self.observer.newest_token()
        if not token or not self.observer.commits(token):
            return None
        try:
            who = read_claim(self.store, token).who
            supervisor = psutil.Process(who["pid"])
            children = [c for c in supervisor.children() if is_training(c)]
            group = self._group(children[0], token) if len(children) == 1 else ((), ())
        except (Corrupt, Unavailable, KeyError, OSError, ValueError, psutil.Error):
            return None
        if len(children) != 1 or group is None:
            return None
        node = self.rig.node_of(supervisor)
        victim = Victim(token, str(who["flow_run_id"]), supervisor, children[0], node, *group)
        return victim if self.steps_of(victim.stepping) else None

    def _group(
        self, launcher: psutil.Process, token: int
    ) -> tuple[tuple[psutil.Process, ...], tuple[Companion, ...]] | None:
        """Ranks that this process has launched, in order, and other nodes; empty: none; None: not all are up."""
        if "training.group" not in " ".join(launcher.cmdline()):
            return (), ()
        count = read_committed(self.store, token, sequences(self.store, token)[-1]).manifest.world_size
        folder = self.rig.folder / self.run / "ranks"
        ranks = tuple(psutil.Process(int((folder / str(rank)).read_text())) for rank in range(count))
        below = set(launcher.children(recursive=True))
        elsewhere: dict[psutil.Process, list[psutil.Process]] = {}
        for rank in ranks:
            if rank not in below:
                agents = [process for process in rank.parents() if "training.node" in process.cmdline()]
                if not agents:
                    return None  # of an older attempt
                elsewhere.setdefault(agents[0], []).append(rank)
        companions = []
        for agent, theirs in elsewhere.items():
            node = self.rig.node_of(agent)
            if node is None:
                return None
            companions.append(Companion(node, agent, tuple(theirs)))
        return ranks, tuple(companions)


def is_training(process: psutil.Process) -> bool:
    """Whether it trains, or launches ranks that do."""
    command = " ".join(process.cmdline())
    return "training.process" in command or "training.group" in command


def is_alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
