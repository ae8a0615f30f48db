"""What engines cost a training that goes on: how long it stands still for a save, and how much slower it gets."""

from __future__ import annotations

import gc
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.engines import ENGINES, Engine
from benchmarks.measure import Metrics, forget
from benchmarks.sequences import Sequence, Training, sequence_named

FIRST_SAVES = 2  # a base, and the buffers
AFTER_SECONDS = 0.1  # of training after a save whose waits count as its stall: a copy may outlast short steps
SAVE_EVERY = 5  # steps, while the slowdown is measured


def stalls(name: str, sequence: str, smoke: bool, corpus: Path, scratch: Path, saves: int) -> Metrics:
    """A save after every step, each alone. The training stands still in `save`, and before an optimizer's step.

    Wants a process of its own.
    """
    training, states, engine = _start(sequence, smoke, corpus, scratch, name)
    found = {}
    if engine.overlaps:
        found["stall_without_overlap_ms"] = 1000 * _stall_seconds(engine, training, states, saves)
        engine.watch(training)
    found["stall_ms"] = 1000 * _stall_seconds(engine, training, states, saves)
    engine.close()
    shutil.rmtree(scratch)
    return found


def slowdowns(names: Iterable[str], smoke: bool, corpus: Path, scratch: Path, steps: int) -> dict[str, Metrics]:
    """Seconds of the dense training with a save after every fifth step, over those without; blocks by turns.

    Everything counts: copies, waiting for the save before, and the end of the last one.
    """
    found: dict[str, Metrics] = {}
    for name in names:
        training, states, engine = _start("dense", smoke, corpus, scratch, name, warm_up_steps=steps)
        engine.watch(training)
        plain, saving, calls = 0.0, 0.0, []
        for part in range(2):
            plain += _steps(training, steps)
            started = time.perf_counter()
            with _waits(training) as waits:
                for step in range(steps):
                    training.step()
                    if step % SAVE_EVERY == 0:
                        before = time.perf_counter()
                        engine.save(states.state(training), FIRST_SAVES + part * steps + step)
                        calls.append(time.perf_counter() - before)
            engine.wait()
            saving += time.perf_counter() - started
            calls += waits
        engine.close()
        shutil.rmtree(scratch)
        found[name] = {
            "slowdown": saving / plain,
            "step_ms": 1000 * plain / (2 * steps),
            "longest_stall_ms": 1000 * max(calls),
        }
    return found


def _start(
    sequence: str, smoke: bool, corpus: Path, scratch: Path, name: str, warm_up_steps: int = 3
) -> tuple[Training, Sequence, Engine]:
    torch.set_num_threads(1)
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    states = sequence_named(sequence, smoke)
    training = states.build(corpus)
    _steps(training, warm_up_steps)
    gc.freeze()  # as the training process does: a full collection stalls any of them for 160 ms
    engine = ENGINES[name](scratch)
    for number in range(FIRST_SAVES):
        engine.save(states.state(training), number)
        engine.wait()
    return training, states, engine


def _stall_seconds(engine: Engine, training: Training, states: Sequence, saves: int) -> float:
    stood = []
    steps = 1 + int(AFTER_SECONDS / _steps(training, 1))
    for number in range(saves):
        state = states.state(training)
        started = time.perf_counter()
        engine.save(state, FIRST_SAVES + number)
        stalled = time.perf_counter() - started
        with _waits(training) as waits:
            _steps(training, steps)
        stood.append(stalled + sum(waits))
        engine.wait()
        if not engine.deltas:
            forget(engine.folder, FIRST_SAVES + number - 1)
    return statistics.median(stood)


@contextmanager
def _waits(training: Training) -> Iterator[list[float]]:
    """Seconds that hooks of engines take before each step of each optimizer: ours run before and after them."""
    waits: list[float] = []
    starts: list[float] = []

    def before(*_: Any) -> None:
        starts.append(time.perf_counter())

    def after(*_: Any) -> None:
        waits.append(time.perf_counter() - starts.pop())

    hooks = [register_optimizer_step_pre_hook(before)]
    hooks += [optimizer.register_step_pre_hook(after) for optimizer in training.optimizers]
    try:
        yield waits
    finally:
        for hook in hooks:
            hook.remove()


def _steps(training: Training, steps: int) -> float:
    started = time.perf_counter()
    for _ in range(steps):
        training.step()
    return time.perf_counter() - started
