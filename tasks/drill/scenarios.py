"""Scenarios: which faults, how often, and what they need. A scenario is one training."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.drill.fault import Fault, Need
from tasks.drill.faults import FAULTS
from tasks.drill.rig import NODES, Rig
from tasks.drill.session import PENDING, Planned
from training.errors import Invalid
from training.parallel.config import ParallelConfig

RANDOM = "random"
SETTLE_STEPS = 15  # between two faults, on average
STEPS_PER_SECOND = 9  # of the built-in job; an upper bound
ALONE = ParallelConfig()
GROUP = ParallelConfig(world=2)  # where a scenario is about a rank
OVER_NODES = ParallelConfig(world=2, nodes=2, min_nodes=1)  # where it is about a node of a group
# What may come at any time, and must be answered by another attempt or by none.
ANY_TIME = (
    *("kill-rank", "freeze-rank", "hang-rank"),
    *("kill-train", "freeze-train", "hang", "hang-gil", "kill-flow"),
    *("freeze-tree", "kill-node", "partition-prefect", "partition-store"),
)


@dataclass(frozen=True)
class Scenario:
    """One drill.

    Attributes:
        name: a fault, several joined by `+`, `kill-pending`, or `random`.
        trials: how often each fault is made in the training.
        minutes: of a random drill.
        mean_seconds: between two of its faults.
        seed: of its faults, and of the moments.
    """

    name: str
    trials: int = 1
    minutes: float = 2.0
    mean_seconds: float = 30.0
    seed: int = 0

    @property
    def run_name(self) -> str:
        """Beginning of its training's name."""
        return f"drill-{self.name.replace('+', '-')}"[:56].rstrip("-")

    @property
    def faults(self) -> list[Fault]:
        """Those that are made one after the other."""
        return [FAULTS[part] for part in self.name.split("+") if part in FAULTS]

    @property
    def steps(self) -> int:
        """Of a training that is long enough, of the built-in job."""
        if self.name == RANDOM:
            return int(60 * self.minutes * STEPS_PER_SECOND)
        if self.name == PENDING:
            return 40
        holds = [int(min(30.0, fault.hold_seconds) * STEPS_PER_SECOND) for fault in self.faults]
        return 60 + self.trials * sum(3 * SETTLE_STEPS + steps for steps in holds)

    @property
    def shrinks(self) -> bool:
        """Whether its training has fewer ranks in between."""
        return any(fault.is_of_a_node for fault in self.faults)

    @property
    def group(self) -> ParallelConfig:
        """Ranks and nodes of the built-in job."""
        if self.shrinks:
            return OVER_NODES
        return GROUP if any("ranks" in fault.needs for fault in self.faults) else ALONE

    def why_not(self, rig: Rig, group: ParallelConfig = ALONE) -> str | None:
        """Why it is impossible on this rig, with a job of such a group; None if it is possible."""
        needs = {need for fault in self.faults for need in fault.needs}
        if self.name == PENDING:
            needs = {"own", "spare"}
        if not rig.own and ("own" in needs or group.nodes > 1):
            return "needs a stack of the drill's own"
        if "ranks" in needs and group.world == 1:
            return "needs a group of ranks: --set parallel.world=2"
        if group.nodes > 1 or "nodes" in needs:
            return self._why_not_over_nodes(rig, group, needs) or self._why_no_wires(rig, needs)
        return self._why_no_wires(rig, needs)

    def _why_not_over_nodes(self, rig: Rig, group: ParallelConfig, needs: set[Need]) -> str | None:
        if "nodes" in needs and group.nodes == 1:
            return "needs a group over two nodes: --set parallel.world=2 --set parallel.nodes=2"
        if group.nodes > len(NODES):
            return f"a drill has {len(NODES)} nodes: --set parallel.nodes={len(NODES)}"
        if "nodes" in needs and group.fewest_nodes == group.nodes:
            return f"the group may not go on with fewer nodes than {group.nodes}: --set parallel.min_nodes=1"
        if "spare" in needs:
            return "the group has both nodes, and none is free to take the range: --set parallel.nodes=1"
        if not rig.joins_nodes:
            return "no bridge can be made here, over which network namespaces would reach each other"
        return None

    def _why_no_wires(self, rig: Rig, needs: set[Need]) -> str | None:
        if "peers" in needs and not rig.parts_nodes:
            return "the loopback between nodes cannot be cut: needs network namespaces (root, ip, nsenter)"
        if "wire" in needs and rig.seaweed is None:
            return "a folder has no wire to cut: use --s3"
        if "folder" in needs and rig.seaweed is not None:
            return "needs a store in a folder"
        return None

    def plan(self, rig: Rig, step_seconds: float, group: ParallelConfig = ALONE) -> Iterator[Planned]:
        """The faults, and when. The moment within an interval is random."""
        rng = random.Random(f"{self.seed} {self.name}")  # noqa: S311 - not a secret
        if self.name == PENDING:
            return
        if self.name == RANDOM:
            yield from self._random(rig, group, rng)
            return
        for _ in range(self.trials):
            for fault in self.faults:
                yield Planned(fault, rng.uniform(0.3, 2 * SETTLE_STEPS * (step_seconds or 0.1)))

    def _random(self, rig: Rig, group: ParallelConfig, rng: random.Random) -> Iterator[Planned]:
        """As a Poisson process; what can't be made here is left out of the draw."""
        possible = [name for name in ANY_TIME if Scenario(name).why_not(rig, group) is None]
        until = time.time() + 60 * self.minutes
        while True:
            wait_seconds = rng.expovariate(1 / self.mean_seconds)
            if time.time() + wait_seconds > until:
                time.sleep(max(0.0, until - time.time()))
                return
            yield Planned(FAULTS[rng.choice(possible)], wait_seconds, since_last=True)


def about() -> dict[str, str]:
    """One line for each scenario."""
    rows = {name: fault.about for name, fault in FAULTS.items()}
    rows[PENDING] = "SIGKILL the worker between Pending and Running of a range"
    rows[RANDOM] = "random faults, with a mean time between them"
    return rows


def chosen(names: list[str]) -> list[str]:
    """Names of scenarios: those given, `all`, or the quick set, which is one training.

    Raises:
        Invalid: there is no such scenario.
    """
    every = list(about())
    if not names:
        return ["+".join(name for name, fault in FAULTS.items() if fault.quick)]
    if names == ["all"]:
        return every
    parts = [part for name in names for part in (name.split("+") if "+" in name else ())]
    unknown = [name for name in names if "+" not in name and name not in every]
    if unknown := unknown + [part for part in parts if part not in FAULTS]:
        raise Invalid(f"no scenario {', '.join(unknown)}", hint=f"there are: {', '.join(every)}; or all")
    return names
