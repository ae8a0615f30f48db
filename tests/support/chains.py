"""Real checkpoints of small states, written by the engine, for tests of what happens to them later."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from tests.support.bits import bits
from training.checkpoint import IncrementalCheckpointer, Position
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import MemoryStore, Store
from training.errors import Corrupt

RUN = "r"
Name = tuple[int, int]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def state_of(step: int) -> dict[str, Any]:
    """Some of it changes densely, some in one place, some not at all; one part is a copy in half precision."""
    weight = torch.randn(6000, generator=torch.Generator().manual_seed(1)) + 0.01 * step
    table = torch.zeros(8000)
    table[step % 8000] = 1 + step
    return {"weight": weight, "half": weight.bfloat16(), "table": table, "frozen": torch.ones(5000), "step": step}


class Chains:
    """A store with a history, and what every checkpoint of it must give back."""

    def __init__(self, store: Store | None = None) -> None:
        self.clock = Clock()
        self.store: Store = store if store is not None else MemoryStore(clock=self.clock)
        self.states: dict[Name, int] = {}  # step of each acknowledged checkpoint
        self.step = 0

    def attempt(self, saves: str) -> int:
        """One attempt: it resumes, then writes a base for each `b` and a delta for each `d`. Returns its token."""
        with IncrementalCheckpointer(self.store, run=RUN, deltas_per_base=10_000) as checkpointer:
            restored = checkpointer.restore()
            assert checkpointer.token is not None
            if restored is not None:
                assert bits(dict(restored)) == bits(state_of(restored.position.step))
                self.step = restored.position.step
            for kind in saves:
                self.step += 1
                checkpointer.save(state_of(self.step), position=Position(step=self.step), base=kind == "b")
                committed = checkpointer.wait()
                assert committed is not None
                assert committed.manifest.kind == {"b": "base", "d": "delta"}[kind]
                self.states[committed.ref.token, committed.ref.sequence] = self.step
            return checkpointer.token

    def grow_old(self, seconds: float = 1e6) -> None:
        """Everything that is there leaves the grace period."""
        self.clock.now += seconds

    def restores(self, name: Name) -> bool:
        """Whether a checkpoint gives back what was saved. False if objects are missing; all else is a failure."""
        try:
            restored = restore_checkpoint(self.store, *name, RUN)
        except Corrupt as error:
            if isinstance(error, FileNotFoundError) or error.message.endswith("missing"):
                return False
            raise
        assert bits(dict(restored)) == bits(state_of(self.states[name]))
        return True

    def restorable(self) -> list[Name]:
        """Those of all checkpoints that can be restored."""
        return [name for name in sorted(self.states) if self.restores(name)]

    def listing(self, *prefixes: str) -> list[str]:
        """What is in the store."""
        return [key for prefix in prefixes or ("",) for key, _ in self.store.list(prefix)]

    def damage(self, key: str, bit: int = 0) -> None:
        """Flip a bit in the middle of an object."""
        data = bytearray(self.store.get(key))
        data[len(data) // 2] ^= 1 << bit
        self.replace(key, bytes(data))

    def replace(self, key: str, data: bytes) -> None:
        """Put other bytes under a key."""
        self.store.delete(key)
        self.store.put(key, [data])


def names(token: int, sequences: Iterable[int]) -> list[Name]:
    """Checkpoints of one token."""
    return [(token, sequence) for sequence in sequences]


NEVER = math.inf
