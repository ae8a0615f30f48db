"""Thousands of histories of a run, each drawn from a seed; see `tests.support.histories` for what must hold.

A failing one says its seed. SIMULATION_SEED=<seed> pytest tests/simulation/test_histories.py -k replay plays it
again and prints every operation.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.histories import Odds, World
from tests.support.turns import without_threads
from training.checkpoint import attempt, history
from training.checkpoint.care import collect as collecting
from training.checkpoint.care import retention, survey
from training.checkpoint.care import sweep as sweeping
from training.checkpoint.care.sweep import Sweep
from training.checkpoint.collected import Collected, read_collected
from training.checkpoint.manifest import Manifest, Ref, encode_manifest
from training.checkpoint.store import Store
from training.checkpoint.token import check_not_fenced

HISTORIES = 10_000
QUICK = 1_000
BATCHES = 4  # so that two processes can share them


@pytest.fixture(autouse=True)
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)


def play(seed: int) -> Counter[str]:
    world = World(seed)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(f"history {seed}: {error}\n  replay it with SIMULATION_SEED={seed}") from error
    return world.events


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_history_loses_what_was_acknowledged_or_restores_anything_else(batch: int) -> None:
    events: Counter[str] = Counter()
    for seed in range(batch, QUICK, BATCHES):
        events.update(play(seed))
    seldom = {name: events[name] for name in EVENTS if events[name] < 10}
    assert not seldom, f"{seldom}: too seldom to mean anything"


EVENTS = (
    "acknowledged",
    "acknowledged, and collected",
    "acknowledged, and not readable later",
    "collections that deleted",
    "collections that waited",
    "compactions",
    "Fenced",
    "kills",
    "late operations",
    "pins",
    "sleeps",
    "Unavailable",
)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_no_history_of_ten_thousand_does() -> None:
    for seed in range(QUICK, HISTORIES):
        play(seed)


@pytest.mark.parametrize("odds", ["CROWD", "LATE", "BUSY"])
@pytest.mark.parametrize("histories", [50, pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_what_makes_mistakes_likely_to_be_found_finds_none_where_there_is_none(odds: str, histories: int) -> None:
    for seed in range(histories):
        World(seed, given=globals()[odds]).run()


def test_the_same_seed_is_the_same_history() -> None:
    first, second = World(7), World(7)
    first.run()
    second.run()
    assert first.log == second.log
    assert len(first.log) > 100


@pytest.mark.skipif("SIMULATION_SEED" not in os.environ, reason="replays a history, if SIMULATION_SEED names one")
def test_replay() -> None:
    world = World(int(os.environ["SIMULATION_SEED"]))
    try:
        world.run()
    finally:
        print("\n".join(world.log))  # noqa: T201 - that is what it is for


def ignores_claims(patch: pytest.MonkeyPatch) -> None:
    """A collector that does not care who is opening."""
    patch.setattr(survey.Survey, "newest_claim", survey.Survey.newest_seal)
    patch.setattr(collecting, "_look", lambda store, plan: "")


def looks_once(patch: pytest.MonkeyPatch) -> None:
    """A collector without the second look."""
    patch.setattr(collecting, "_look", lambda store, plan: "")


def commits_without_second_look(patch: pytest.MonkeyPatch) -> None:
    """A writer that looks for a newer claim only before its manifest."""

    def commit(store: Store, manifest: Manifest) -> Ref:
        data, ref = encode_manifest(manifest)
        check_not_fenced(store, manifest.token, manifest.run)
        store.put_if_absent(manifest.key, data)
        return ref

    patch.setattr(attempt, "commit", commit)


def deletes_packs_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A collector that sweeps every pack without a manifest."""
    real = sweeping.sweep

    def sweep(seen: survey.Survey, live: Any) -> Sweep:
        found = real(seen, live)
        found.packs = [listed for listed in seen.packs.values() if listed.name not in live]
        return found

    patch.setattr(collecting, "sweep", sweep)


def forgets_what_is_needed(patch: pytest.MonkeyPatch) -> None:
    """A collector that keeps checkpoints, and not what they are built on."""
    real = retention.choose

    def choose(*arguments: Any, **options: Any) -> dict[Any, str]:
        kept = real(*arguments, **options)
        return {name: reason for name, reason in kept.items() if not reason.startswith("needed")}

    patch.setattr(collecting, "choose", choose)


def forgets_pins(patch: pytest.MonkeyPatch) -> None:
    """A collector that does not know of pins."""
    for module in (collecting, survey):
        patch.setattr(module, "pinned", lambda store: set())


def keeps_the_head_alone(patch: pytest.MonkeyPatch) -> None:
    """A collector that takes the head for acknowledged."""
    real = retention.choose
    patch.setattr(collecting, "choose", lambda *a, **options: real(*a, **{**options, "writing": None}))


def reads_no_announcement(patch: pytest.MonkeyPatch) -> None:
    """An attempt that does not ask what is on its way out."""
    real = read_collected

    def read(store: Store, notes: Any = None) -> Collected:
        return real(store) if notes is None else Collected()

    patch.setattr(history, "read_collected", read)


CROWD = Odds(skip=0.15, sleep=0.2, collectors=10, bases=0.9)
LATE = Odds(late=0.1, sleep=0.1, collectors=10, bases=0.6)
BUSY = Odds(sleep=0.05, collectors=10)
soak = (pytest.mark.soak, pytest.mark.timeout(3600))
MUTANTS = [
    (ignores_claims, CROWD, 1000),
    (commits_without_second_look, None, 1000),
    (deletes_packs_in_flight, BUSY, 1000),
    (forgets_what_is_needed, None, 100),
    (forgets_pins, None, 300),
    pytest.param(looks_once, CROWD, 10_000, marks=soak),
    pytest.param(keeps_the_head_alone, LATE, 10_000, marks=soak),
    pytest.param(reads_no_announcement, CROWD, 10_000, marks=soak),
]


@pytest.mark.parametrize(("mutant", "odds", "within"), MUTANTS)
def test_a_mistake_in_the_protocol_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], odds: Odds | None, within: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    for seed in range(within):
        try:
            World(seed, given=odds).run()
        except Exception:  # noqa: BLE001 - lost in one way or another
            return
    pytest.fail(f"not found in {within} histories")
