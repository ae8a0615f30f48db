"""A copy that goes on beside the training holds the moment of the save, whatever the training does meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from training.checkpoint import IncrementalCheckpointer, restore_checkpoint
from training.checkpoint.state import copying
from training.checkpoint.store.memory import MemoryStore
from training.errors import Invalid

ROWS, WIDTH = 3000, 8


class Gate:
    """Lets the background copy the given number of pieces, then holds it until it is opened again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copy, self._allowed = copying._copy, threading.Semaphore(0)
        self.threads: list[str] = []
        monkeypatch.setattr(copying, "_copy", self._held)

    def allow(self, pieces: int = 10_000) -> None:
        if pieces:
            self._allowed.release(pieces)

    def _held(self, piece: Any, ready: Any) -> None:
        name = threading.current_thread().name
        self.threads += [name] * any(target.nbytes >= 16 * 1024 for target, _ in piece)
        if name.startswith("retoma-save"):
            assert self._allowed.acquire(timeout=30)
        self._copy(piece, ready)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.body = nn.Linear(WIDTH, 600)
        self.norm = nn.BatchNorm1d(600)
        self.frozen = nn.Linear(200, 200)
        self.frozen.requires_grad_(False)

    def forward(self, keys: Tensor) -> Tensor:
        return torch.as_tensor(self.norm(self.body(self.table(keys))).square().mean())


class Training:
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        self.sparse = torch.optim.SparseAdam(list(self.net.table.parameters()), lr=0.01)
        self.dense = torch.optim.AdamW([*self.net.body.parameters(), *self.net.norm.parameters()], lr=0.01)

    def backward(self) -> None:
        self.sparse.zero_grad()
        self.dense.zero_grad()
        loss: Any = self.net(torch.randint(0, ROWS, (16, 4)))
        loss.backward()

    def step(self) -> None:
        self.backward()
        self.sparse.step()  # type: ignore[no-untyped-call]
        self.dense.step()

    def state(self) -> dict[str, Any]:
        optimizers = {
            name: [dict(value) for value in optimizer.state.values()]
            for name, optimizer in (("sparse", self.sparse), ("dense", self.dense))
        }
        return {"model": self.net.state_dict(), "optimizers": optimizers, "random": torch.get_rng_state()}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    monkeypatch.setattr(copying, "PIECE_BYTES", 32 * 1024)
    return Gate(monkeypatch)


@pytest.fixture
def training() -> Training:
    training = Training()
    training.step()
    return training


@pytest.fixture
def checkpointer(gate: Gate) -> Iterator[IncrementalCheckpointer]:
    checkpointer = IncrementalCheckpointer(MemoryStore())
    yield checkpointer
    gate.allow()
    checkpointer.close()


def leaves(tree: Any, path: str = "") -> dict[str, Tensor]:
    """Copies of all tensors."""
    if isinstance(tree, Tensor):
        return {path: tree.detach().clone()}
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return {key: leaf for name, value in pairs for key, leaf in leaves(value, f"{path}/{name}").items()}


def assert_same(found: Any, expected: dict[str, Tensor]) -> None:
    restored = leaves(dict(found))
    assert restored.keys() == expected.keys()
    different = [key for key in expected if not torch.equal(restored[key], expected[key])]
    assert not different


def step_in_background(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_without_a_promise_all_is_copied_when_save_returns(
    gate: Gate, training: Training, checkpointer: IncrementalCheckpointer
) -> None:
    gate.allow()
    expected = leaves(training.state())
    checkpointer.save(training.state())
    with torch.no_grad():
        for parameter in training.net.parameters():
            parameter.zero_()
    checkpointer.wait()
    assert_same(checkpointer.restore(), expected)


def test_save_returns_before_the_copy_and_a_step_waits_for_it(
    gate: Gate, training: Training, checkpointer: IncrementalCheckpointer
) -> None:
    checkpointer.overlap(training.net, training.sparse, training.dense)
    expected = leaves(training.state())
    checkpointer.save(training.state())  # nothing large may be copied yet
    assert "MainThread" not in gate.threads
    before = training.net.body.weight.detach().clone()
    training.backward()  # buffers and the random state change, which were copied at once
    stepping = step_in_background(training.dense.step)
    stepping.join(0.2)
    assert stepping.is_alive()
    assert torch.equal(before, training.net.body.weight), "the optimizer did not step while it was copied"
    gate.allow()
    stepping.join(30)
    assert not torch.equal(before, training.net.body.weight)
    checkpointer.wait()
    assert_same(checkpointer.restore(), expected)
    assert checkpointer.head is not None
    assert checkpointer.head.manifest.costs.stall_seconds > 0.19


@pytest.mark.parametrize("seed", range(20))
def test_sparse_steps_go_on_beside_the_copy(gate: Gate, checkpointer: IncrementalCheckpointer, seed: int) -> None:
    """The rows that a step changes are set aside, wherever the copy is at that moment."""
    chance, training = random.Random(seed), Training(seed)
    training.step()
    checkpointer.overlap(training.net.table, training.sparse)
    expected = leaves(training.state())
    checkpointer.save(training.state())
    left = 3 * ROWS * WIDTH * 4 // copying.PIECE_BYTES - 1  # one piece is never copied before the end
    for _ in range(12):
        training.backward()
        training.sparse.step()  # type: ignore[no-untyped-call]
        pieces = min(chance.choice([0, 0, 1, 2]), left)
        left -= pieces
        gate.allow(pieces)
    assert checkpointer.busy
    gate.allow()
    checkpointer.wait()
    assert_same(checkpointer.restore(), expected)


def test_a_step_with_a_closure_makes_new_gradients_and_waits(
    gate: Gate, training: Training, checkpointer: IncrementalCheckpointer
) -> None:
    checkpointer.overlap(training.net.table, training.sparse)
    expected = leaves(training.state()["model"])
    checkpointer.save(training.net.state_dict())
    training.sparse.zero_grad()

    def closure() -> Any:
        training.backward()
        return 0.0

    stepping = step_in_background(lambda: training.sparse.step(closure))  # type: ignore[no-untyped-call]
    stepping.join(0.2)
    assert stepping.is_alive()
    gate.allow()
    stepping.join(30)
    checkpointer.wait()
    for name in ("table.weight", "body.weight"):
        assert torch.equal(dict(checkpointer.restore() or {})[name], expected[f"/{name}"])


def test_a_broken_promise_fails_the_save_by_name_and_nothing_else(
    gate: Gate, training: Training, checkpointer: IncrementalCheckpointer
) -> None:
    checkpointer.overlap(training.net, training.sparse, training.dense)
    gate.allow(1000)
    checkpointer.save(training.state())
    head = checkpointer.wait()
    while gate._allowed.acquire(blocking=False):
        pass
    checkpointer.save(training.state())
    with torch.no_grad():
        training.net.frozen.weight.mul_(2)
    gate.allow()
    with pytest.raises(Invalid, match=r"model/frozen\.weight was changed between `save` and"):
        checkpointer.wait()
    assert checkpointer.head == head
    expected = leaves(training.state())
    checkpointer.save(training.state())
    checkpointer.wait()
    assert_same(checkpointer.restore(), expected)


def test_another_view_of_promised_memory_is_copied_at_once(
    gate: Gate, training: Training, checkpointer: IncrementalCheckpointer
) -> None:
    checkpointer.overlap(training.net, training.sparse)
    weight = training.net.table.weight.detach()
    expected = weight.clone()
    gate.allow()
    checkpointer.save({"turned": weight.t(), "part": weight[: ROWS // 2], "numbers": weight.view(torch.int32)})
    with torch.no_grad():
        training.net.table.weight.zero_()
    checkpointer.wait()
    restored = dict(checkpointer.restore() or {})
    assert torch.equal(restored["turned"], expected.t())
    assert torch.equal(restored["part"], expected[: ROWS // 2])
    assert torch.equal(restored["numbers"], expected.view(torch.int32))


@pytest.mark.parametrize("seed", range(5))
def test_every_checkpoint_of_a_training_is_of_one_moment(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(copying, "PIECE_BYTES", 32 * 1024)
    chance, training, store = random.Random(seed), Training(seed), MemoryStore()
    training.step()
    expected = {}
    with IncrementalCheckpointer(store) as checkpointer:
        checkpointer.overlap(training.net, training.sparse, training.dense)
        for sequence in range(12):
            expected[sequence] = leaves(training.state())
            checkpointer.save(training.state())
            for _ in range(chance.randrange(4)):
                training.step()
        assert checkpointer.token is not None
    assert not training.dense._optimizer_step_pre_hooks, "closing takes the hooks off"
    for sequence, state in expected.items():
        assert_same(restore_checkpoint(store, 1, sequence), state)
