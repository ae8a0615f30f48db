"""F1: a snapshot owns its bytes before `save` returns, whatever the optimizer does while the store is slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.bits import bits
from tests.support.faults import Gate, RuledStore
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store import MemoryStore
from training.state import TrainingState


@pytest.fixture
def slow() -> Iterator[tuple[RuledStore, Gate]]:
    gate = Gate("put", "packs/")
    yield RuledStore(MemoryStore(), gate), gate
    gate.opened.set()


def saved_while(
    slow: tuple[RuledStore, Gate], state: dict[str, Any], change: Callable[[], object]
) -> dict[str, Any]:
    """What a new attempt restores, when `change` ran between `save` and the first byte in the store."""
    store, gate = slow
    with IncrementalCheckpointer(store) as checkpointer:
        checkpointer.save(state)
        change()
        assert gate.reached.wait(60)
        change()
        assert not store.inner.list("packs/"), "the store was to be slow"
        gate.opened.set()
    with IncrementalCheckpointer(store.inner) as later:
        restored = later.restore()
    assert restored is not None
    return dict(restored)


@torch.no_grad()
def test_a_weight_that_is_stepped_during_the_save_comes_back_as_it_was(slow: tuple[RuledStore, Gate]) -> None:
    weight = nn.Parameter(torch.ones(1))
    restored = saved_while(slow, {"weight": weight}, lambda: weight.add_(1))
    assert restored["weight"].tolist() == [1.0]


def test_adam_moments_and_step_counts_come_back_as_they_were(slow: tuple[RuledStore, Gate]) -> None:
    model = nn.Sequential(nn.Linear(300, 30), nn.Linear(30, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 300)).sum().backward()
        optimizer.step()
        scheduler.step()

    step()
    state = TrainingState(model, optimizer, scheduler).capture()
    before = bits(state)
    assert bits(saved_while(slow, state, step)) == before
    assert bits(TrainingState(model, optimizer, scheduler).capture()) != before


def test_a_view_an_expanded_and_a_tied_tensor_come_back_as_they_were(slow: tuple[RuledStore, Gate]) -> None:
    big = torch.arange(60_000.0).reshape(200, 300)
    tied = torch.ones(3)
    state = {
        "view": big[::2, 10:],
        "transposed": big.T,
        "expanded": big[:1].expand(50, 300),
        "a": tied,
        "b": {"same": tied},
        "array": np.arange(5),
    }
    before = bits(state)

    def change() -> None:
        big.neg_()
        tied.add_(5)
        state["array"][:] = 7  # type: ignore[index]
        state["new"] = torch.ones(1)

    restored = saved_while(slow, state, change)
    assert bits(restored) == before
    assert restored["a"] is restored["b"]["same"]


def test_lists_and_metadata_that_are_changed_during_the_save_come_back_as_they_were(
    slow: tuple[RuledStore, Gate],
) -> None:
    store, gate = slow
    history, meta = [1, 2], {"losses": [0.5]}
    with IncrementalCheckpointer(store) as checkpointer:
        checkpointer.save({"history": history, "w": torch.ones(3)}, meta=meta)
        assert gate.reached.wait(60)
        history.append(3)
        meta["losses"].append(0.25)
        gate.opened.set()
    with IncrementalCheckpointer(store.inner) as later:
        restored = later.restore()
    assert restored is not None
    assert restored["history"] == [1, 2]
    assert restored.manifest.meta == {"losses": [0.5]}


def test_buffers_that_are_reused_never_leak_one_save_into_another(slow: tuple[RuledStore, Gate]) -> None:
    store, gate = slow
    gate.opened.set()
    weight, expected = torch.zeros(100_000), []
    with IncrementalCheckpointer(store, deltas_per_base=100) as checkpointer:
        for step in range(12):
            weight[step * 1000 :] += step + 1
            checkpointer.save({"weight": weight})
            expected.append(weight.clone())
            weight.mul_(1)
    from training.checkpoint.restore import restore_checkpoint

    for sequence, state in enumerate(expected):
        assert bits(restore_checkpoint(store, 1, sequence)["weight"]) == bits(state)


def test_a_restored_state_shares_no_memory_with_the_reference_of_the_next_delta() -> None:
    store = MemoryStore()
    with IncrementalCheckpointer(store) as checkpointer:
        checkpointer.save({"weight": torch.arange(50_000.0), "small": np.arange(4), "step": torch.tensor(3.0)})
    with IncrementalCheckpointer(store) as second:
        state = second.restore()
        assert state is not None
        state["weight"].mul_(2)
        state["small"][:] = 9
        state["step"].add_(1)
        second.save(dict(state))
        committed = second.wait()
        assert committed is not None
        assert committed.manifest.kind == "delta"
        assert bits(dict(second.restore() or {})) == bits(dict(state))


def test_applying_a_restored_state_leaves_it_unchanged_by_the_training_that_follows() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    live = TrainingState(model, optimizer)

    def step() -> None:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()

    step()
    store = MemoryStore()
    with IncrementalCheckpointer(store) as checkpointer:
        checkpointer.save(live.capture())
        checkpointer.wait()
        state = checkpointer.restore()
    assert state is not None
    before = bits(dict(state))
    live.apply(state)
    step()
    assert bits(dict(state)) == before
