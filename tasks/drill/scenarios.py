"""Scenarios: which faults, how often, and what they need. A scenario is one training."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tasks.drill.faults import FAULTS, Fault
from tasks.drill.rig import Rig
from tasks.drill.session import PENDING, Planned
from training.errors import Invalid

RANDOM = "random"
SETTLE_STEPS = 15  # between two faults, on average
STEPS_PER_SECOND = 9  # of the built-in job; an upper bound
# What may come at any time, and must be answered by another attempt or by none.
GROUP = 2  # ranks, where a scenario is about one of them
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
    def world(self) -> int:
        """Ranks of the built-in job."""
        return GROUP if any("ranks" in fault.needs for fault in self.faults) else 1

    def why_not(self, rig: Rig, world: int = 1) -> str | None:
        """Why it is impossible on this rig, with a job of so many ranks; None if it is possible."""
        if self.name == PENDING:
            return None if rig.own else "needs a stack of the drill's own"
        needs = {need for fault in self.faults for need in fault.needs}
        if "own" in needs and not rig.own:
            return "needs a stack of the drill's own"
        if "ranks" in needs and world == 1:
            return "needs a group of ranks: --set parallel.world=2"
        if "wire" in needs and rig.seaweed is None:
            return "a folder has no wire to cut: use --s3"
        if "folder" in needs and rig.seaweed is not None:
            return "needs a store in a folder"
        return None

    def plan(self, rig: Rig, step_seconds: float, world: int = 1) -> Iterator[Planned]:
        """The faults, and when. The moment within an interval is random."""
        rng = random.Random(f"{self.seed} {self.name}")  # noqa: S311 - not a secret
        if self.name == PENDING:
            return
        if self.name == RANDOM:
            yield from self._random(rig, world, rng)
            return
        for _ in range(self.trials):
            for fault in self.faults:
                yield Planned(fault, rng.uniform(0.3, 2 * SETTLE_STEPS * (step_seconds or 0.1)))

    def _random(self, rig: Rig, world: int, rng: random.Random) -> Iterator[Planned]:
        """As a Poisson process; what can't be made here is left out of the draw."""
        possible = [name for name in ANY_TIME if Scenario(name).why_not(rig, world) is None]
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
