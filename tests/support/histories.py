"""One history of a run, drawn from a seed: who does what to its store, what goes wrong, and what must hold.

Writers are the real engine. They are killed, fall asleep and wake late; a collector, a compactor, readers and
somebody who pins work beside them. Operations fail before or after they have happened, or happen long after they
seemed to fail. Ages are wrong by anything.
"""

from __future__ import annotations

import builtins
import contextlib
import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from tests.support.bits import bits
from tests.support.turns import Actor, Turns
from training.checkpoint import IncrementalCheckpointer, Position, Ref
from training.checkpoint.care.collect import collect
from training.checkpoint.care.compact import compact
from training.checkpoint.care.pins import pin, pinned
from training.checkpoint.care.verify import verify
from training.checkpoint.collected import Name, read_collected
from training.checkpoint.history import candidates
from training.checkpoint.restore import RestoredState, find_newest, restore_checkpoint, restore_newest
from training.checkpoint.store import Aged, Buffer, MemoryStore, Store
from training.checkpoint.store.faulty import Fault, FaultyStore
from training.checkpoint.store.wrapper import Request, StoreWrapper
from training.checkpoint.token import read_seal, token_numbers
from training.errors import Corrupt, Fenced, RetomaError, Unavailable

RUN = "r"
T = TypeVar("T")
_AGES = (0.0, -1e9, 3600.0, 1e9, float("nan"))
_GRACE_SECONDS = 60.0
_LATE = ("put", "put_if_absent", "delete")


@dataclass
class Odds:
    """How likely things go wrong, at each operation."""

    error: float = 0.0
    error_after: float = 0.0
    late: float = 0.0
    sleep: float = 0.005
    damage: float = 0.0  # of what is read by those who are not writers
    collectors: int = 3  # at most; no odds, but it makes what concerns them likelier
    bases: float = 0.2
    skip: float = 0.0  # of what a writer reads of checkpoints, so that it may start from an older one

    @classmethod
    def drawn(cls, rng: random.Random) -> Odds:
        """Each of them absent from most histories."""

        def some(*chances: float) -> float:
            return rng.choice(chances) if rng.random() < 0.33 else 0.0

        sleep = rng.choice((0.0, 0.005, 0.02, 0.05))
        return cls(some(0.02), some(0.02), some(0.03, 0.1), sleep, some(0.01), skip=some(0.05, 0.3))


class ActorStore(StoreWrapper):
    """The store as one actor sees it: takes a turn before each operation, and may see it happen late."""

    def __init__(self, inner: Store, actor: Actor, world: World) -> None:
        super().__init__(inner)
        self._actor, self._world = actor, world

    def _call(self, request: Request, ask: Callable[[], T]) -> T:
        world, actor = self._world, self._actor
        if world.rng.random() < world.odds.sleep:
            world.events["sleeps"] += 1
            actor.sleep(world.rng.choice((10, 100, 1000, 10_000)))
        actor.turn()
        line = f"{world.turns.now:5} {actor.name}: {request.operation} {request.key}"
        world.log.append(line)
        if request.operation in _LATE and world.rng.random() < world.odds.late:
            world.log[-1] += "  happens late"
            world.events["late operations"] += 1

            def late() -> None:
                world.log.append(f"LATE {line}")
                ask()

            world.later(world.rng.choice((1, 20, 200, 2000)), late)
            raise Unavailable(f"{request.operation} {request.key}: no answer, and who knows", key=request.key)
        return ask()

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """See `Store.put`. Whole, however late it happens."""
        super().put(key, [b"".join(parts)])

    def ages(self, prefix: str) -> builtins.list[Aged]:
        """See `Store.ages`. No clock is right here."""
        rng, rows = self._world.rng, super().ages(prefix)
        if rng.random() < 0.5:
            return [row._replace(age_seconds=1e9) for row in rows]
        return [row._replace(age_seconds=rng.choice(_AGES)) for row in rows]


@dataclass
class World:
    """One history.

    Attributes:
        given: how likely what goes wrong; None: drawn as well.
        acknowledged: in the order in which writers were told.
        expected: what each state held, by the number in its checkpoint's `meta`.
        pins: that were granted.
        events: how often things happened, so that a test can tell that they did.
        log: what was asked of the store; for people who replay it.
    """

    seed: int
    given: Odds | None = None
    collect: Callable[..., Any] = collect
    rng: random.Random = field(init=False)
    odds: Odds = field(init=False)
    store: MemoryStore = field(init=False)
    turns: Turns = field(init=False)
    acknowledged: list[Ref] = field(default_factory=list)
    expected: dict[int, Any] = field(default_factory=dict)
    pins: set[Name] = field(default_factory=set)
    events: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    _later: list[tuple[int, int, Callable[[], Any]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.odds = Odds.drawn(rng) if self.given is None else self.given
        self.store = MemoryStore()
        self.turns = Turns(rng, self._tick)

    def run(self) -> None:
        """Play the history, then hold the store against what must be true."""
        rng, long = self.rng, 600
        for number in range(rng.randrange(2, 5)):
            writer = self.turns.add(f"writer {number}", self._writer, rng.randrange(long) if number else 0)
            if rng.random() < 0.4:
                writer.dies_at = rng.randrange(1, 200)
        for name, work, most in (
            ("collector", self._collector, self.odds.collectors),
            ("compactor", self._compactor, 2),
            ("reader", self._reader, 2),
            ("pinner", self._pinner, 1),
        ):
            for number in range(rng.randrange(most + 1)):
                actor = self.turns.add(f"{name} {number}", work, rng.randrange(long))
                if rng.random() < 0.2:
                    actor.dies_at = rng.randrange(1, 80)
        self.turns.run()
        self.events["kills"] = sum(actor.killed for actor in self.turns.actors)
        while self._later:
            self._land(heapq.heappop(self._later)[2])
        self.check()

    def later(self, operations: int, effect: Callable[[], Any]) -> None:
        """Let something happen when nobody counts on it any more."""
        heapq.heappush(self._later, (self.turns.now + operations, len(self._later) + self.turns.now * 1000, effect))

    def check(self) -> None:
        """What must hold when everybody has ended."""
        store, gone = self.store, read_collected(self.store).names
        admitted = _limits(store)
        for ref in list(self.acknowledged):
            name = (ref.token, ref.sequence)
            if ref.sequence > admitted.get(ref.token, -1):
                assert self._was_skipped(ref), f"acknowledged {ref} is void: it was fenced or lost"
                self.acknowledged.remove(ref)
                self.events["acknowledged, and not readable later"] += 1
            elif name not in gone:
                self._same(restore_checkpoint(store, *name, RUN), f"acknowledged {ref}")
            else:
                self.events["acknowledged, and collected"] += 1
        for name in self.pins:
            self._same(restore_checkpoint(store, *name, RUN), f"pinned {name}")
        newest = max(((ref.token, ref.sequence) for ref in self.acknowledged), default=None)
        found, _ = find_newest(store, RUN)
        if newest is not None:
            assert found is not None, f"nothing is restored, and {newest} was acknowledged"
            ref = found.state.checkpoint.ref
            assert (ref.token, ref.sequence) >= newest, f"{ref} is restored, and {newest} was acknowledged"
            assert self.pins <= pinned(store) | {(0, 0)}
        self._goes_on()

    def _was_skipped(self, ref: Ref) -> bool:
        """Whether a later attempt could not read a newer checkpoint than the one it started from, and said so."""
        later = (read_seal(self.store, token) for token in token_numbers(self.store)[1] if token > ref.token)
        return self.odds.skip > 0 and any(seal.skipped for seal in later)

    def _goes_on(self) -> None:
        """Another attempt, another save, another collection, and all is well."""
        with IncrementalCheckpointer(self.store, run=RUN) as last:
            restored = last.restore()
            if restored is not None:
                self._same(restored, "the last attempt")
            self._save(last)
            last.wait()
            self.collect(self.store, keep=1, grace_seconds=0.0)
            self._save(last)
        report = verify(self.store, data=True)
        assert report.head_is_intact, report.problems
        assert report.head is not None
        self._same(restore_checkpoint(self.store, *report.head, RUN), "the head after all")

    def _writer(self, actor: Actor) -> None:
        store = self._view(actor, writer=True)
        before = max(((ref.token, ref.sequence) for ref in self.acknowledged), default=None)
        checkpointer = IncrementalCheckpointer(
            store, run=RUN, deltas_per_base=self.rng.choice((1, 3, 100)), max_failed_saves=2
        )
        try:
            restored = checkpointer.restore()
            if restored is not None:
                self._same(restored, f"start of {actor.name}")
            if before is not None and not self.odds.skip:
                assert restored is not None, f"{actor.name} starts from nothing, and {before} was acknowledged"
                ref = restored.checkpoint.ref
                assert (ref.token, ref.sequence) >= before, f"{actor.name} starts from {ref}, behind {before}"
            for _ in range(self.rng.randrange(1, 8)):
                self._save(checkpointer)
                self._acknowledge(checkpointer)
        except (Unavailable, Fenced) as error:
            self.events[error.kind] += 1
        except Corrupt:
            if not self.odds.skip:
                raise  # nothing is damaged here

    def _acknowledge(self, checkpointer: IncrementalCheckpointer) -> None:
        try:
            committed = checkpointer.wait()
        except Unavailable:
            return  # training goes on
        if committed is not None:
            self.acknowledged.append(committed.ref)
            self.events["acknowledged"] += 1
            self.log.append(f"acknowledged {committed.ref}")

    def _save(self, checkpointer: IncrementalCheckpointer) -> None:
        number = len(self.expected)
        values = torch.Generator().manual_seed(number)
        state = {"w": torch.randn(40, generator=values), "frozen": torch.ones(7), "n": number}
        self.expected[number] = bits(state)
        base = self.rng.random() < self.odds.bases
        checkpointer.save(state, position=Position(step=number), base=base, meta={"number": number})

    def _same(self, restored: RestoredState, what: str) -> None:
        expected = self.expected[restored.manifest.meta["number"]]
        assert bits(dict(restored)) == expected, f"{what} is not what was saved"

    def _collector(self, actor: Actor) -> None:
        store = self._view(actor)
        for _ in range(self.rng.randrange(1, 4)):
            try:
                report = self.collect(store, keep=self.rng.choice((1, 1, 2)), grace_seconds=_GRACE_SECONDS)
                self.events["collections that deleted"] += report.freed_bytes > 0
                self.events["collections that waited"] += bool(report.reason)
            except RetomaError:
                continue

    def _compactor(self, actor: Actor) -> None:
        store = self._view(actor)
        for number in range(self.rng.randrange(1, 4)):
            try:
                name = self._any(store)
                if name is not None:
                    done = compact(
                        store, *name, nonce=lambda: f"{self.rng.randrange(2**32):x}", created=str(number)
                    )
                    self.events["compactions"] += done.written
            except RetomaError:
                continue

    def _reader(self, actor: Actor) -> None:
        store = self._view(actor)
        for _ in range(self.rng.randrange(1, 4)):
            try:
                name = self._any(store) if self.rng.random() < 0.5 else None
                restored = restore_newest(store, RUN) if name is None else restore_checkpoint(store, *name, RUN)
            except RetomaError:
                continue
            if restored is not None:
                self._same(restored, f"what {actor.name} reads")

    def _pinner(self, actor: Actor) -> None:
        store = self._view(actor)
        try:
            name = self._any(store)
            if name is not None:
                pin(store, *name)
                self.pins.add(name)
                self.events["pins"] += 1
        except RetomaError:
            pass

    def _any(self, store: Store) -> Name | None:
        found = list(candidates(store))
        return self.rng.choice(found[:4]) if found else None

    def _view(self, actor: Actor, *, writer: bool = False) -> Store:
        odds, plan = self.odds, []
        for kind, chance in (("error", odds.error), ("error-after", odds.error_after)):
            if chance:
                plan.append(Fault(kind, times=None, probability=chance))  # type: ignore[arg-type]
        damage, folders = (odds.skip, ("manifests/", "packs/", "rebased/")) if writer else (odds.damage, ("",))
        for folder in folders if damage else ():
            for operation in ("read", "get"):
                plan.append(Fault("flip", operation, folder, times=None, probability=damage))
                plan.append(Fault("truncate", operation, folder, times=None, probability=damage))
        return ActorStore(FaultyStore(self.store, plan, self.rng.randrange(2**32)), actor, self)

    def _tick(self) -> None:
        while self._later and self._later[0][0] <= self.turns.now:
            self._land(heapq.heappop(self._later)[2])

    def _land(self, effect: Callable[[], Any]) -> None:
        with contextlib.suppress(Unavailable, Corrupt):  # it failed after all
            effect()


def _limits(store: Store) -> dict[int, int]:
    """The last sequence that each token of the history has."""
    seals = token_numbers(store)[1]
    limits: dict[int, int] = {}
    token, last = max(seals, default=0), 2**62
    while token:
        limits[token] = last
        head = read_seal(store, token).head if token in seals else None
        if head is None:
            break
        token, last = head.token, head.sequence
    return limits
