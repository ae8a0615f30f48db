"""What a save costs, and what a chain of them gives back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.bits import bits, random_bits
from tests.support.faults import RuledStore
from training.checkpoint import IncrementalCheckpointer, Manifest, pack
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import MemoryStore
from training.state import TrainingState


class Costly:
    """A checkpointer over memory that tells what each save wrote."""

    def __init__(self, **options: Any) -> None:
        self.store = RuledStore(MemoryStore())
        self.checkpointer = IncrementalCheckpointer(self.store, **{"deltas_per_base": 8, **options})
        self.expected: list[Any] = []

    def save(self, state: dict[str, Any], **options: Any) -> tuple[int, Manifest]:
        before = self.store.written_bytes
        self.checkpointer.save(state, **options)
        committed = self.checkpointer.wait()
        assert committed is not None
        self.expected.append(bits(state))
        return self.store.written_bytes - before, committed.manifest

    def finish(self) -> None:
        """Every checkpoint of the chain still gives what was saved, the newest also to a new attempt."""
        self.checkpointer.close()
        for sequence, state in enumerate(self.expected):
            assert bits(dict(restore_checkpoint(self.store, 1, sequence))) == state
        with IncrementalCheckpointer(self.store) as later:
            assert bits(dict(later.restore() or {})) == self.expected[-1]


def training_state(layers: int, width: int = 8) -> TrainingState:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return TrainingState(model, optimizer, scheduler)


@pytest.mark.parametrize("width", [8, 80], ids=["small tensors", "large tensors"])
def test_a_state_that_did_not_change_costs_a_small_manifest_however_many_tensors_it_has(width: int) -> None:
    sizes = []
    for layers in (2, 100):
        run = Costly()
        state = training_state(layers, width).capture()
        del state["randomness"]
        run.save(state)
        size_bytes, manifest = run.save(state)
        assert (manifest.kind, manifest.chunks, manifest.packs, manifest.layout) == ("delta", (), (), None)
        sizes.append(size_bytes)
        run.finish()
    assert sizes[1] < 2_000
    assert abs(sizes[1] - sizes[0]) < 20  # some numbers have a digit more


def test_a_thousand_small_tensors_that_all_change_cost_one_chunk_for_each_item_size() -> None:
    run = Costly()
    state = {f"p{n}": random_bits((20,), torch.float32, n) for n in range(1000)}
    counters = {f"c{n}": torch.tensor(n) for n in range(1000)}
    run.save({**state, **counters})
    counters = {key: value + 1 for key, value in counters.items()}
    size_bytes, manifest = run.save({**state, **counters})
    assert [chunk.key for chunk in manifest.chunks] == ["~slab/8"]
    assert size_bytes < 3_000
    run.finish()


def test_a_few_rows_of_a_large_embedding_cost_about_what_changed() -> None:
    run = Costly()
    table = torch.randn(100_000, 32, generator=torch.Generator().manual_seed(0))  # 12.8 MB, 4 frames
    full_bytes, _ = run.save({"table": table})
    rows = torch.randperm(100_000, generator=torch.Generator().manual_seed(1))[:50]
    table[rows] += 1e-3
    size_bytes, manifest = run.save({"table": table})
    assert manifest.chunks[0].mode == "delta"
    assert size_bytes < 40 * rows.numel() * 32 * 4 * 0.2  # well below the blocks that hold the rows
    assert size_bytes < full_bytes / 200
    table[3] = 0
    size_bytes, manifest = run.save({"table": table})
    assert len(manifest.chunks[0].frames) == 1  # of four
    assert size_bytes < 4_000
    run.finish()


def test_frozen_parameters_cost_nothing_beside_trained_ones() -> None:
    run = Costly()
    state = {"frozen": random_bits((200_000,), torch.float32), "adapter": torch.zeros(5_000)}
    run.save(state)
    state["adapter"] = random_bits((5_000,), torch.float32)
    size_bytes, manifest = run.save(state)
    assert [chunk.key for chunk in manifest.chunks] == ["adapter"]
    assert size_bytes < 25_000
    run.finish()


def test_a_small_step_of_the_weights_costs_much_less_than_the_weights() -> None:
    run = Costly()
    weight = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    base_bytes, _ = run.save({"weight": weight})
    size_bytes, manifest = run.save({"weight": weight * (1 + 1e-6)})
    assert manifest.chunks[0].mode == "delta"
    assert size_bytes < 0.4 * base_bytes
    run.finish()


def test_where_a_delta_gains_nothing_the_chunk_is_written_alone() -> None:
    run = Costly()
    run.save({"noise": random_bits((50_000,), torch.float32, 1)})
    _, manifest = run.save({"noise": random_bits((50_000,), torch.float32, 2)})
    assert manifest.chunks[0].mode == "full"
    run.finish()


@pytest.mark.parametrize("deltas", [0, 1, 3])
def test_a_base_follows_after_the_stated_number_of_deltas(deltas: int) -> None:
    run = Costly(deltas_per_base=deltas)
    weight = torch.zeros(5_000)
    kinds = []
    for step in range(8):
        weight += 1
        kinds.append(run.save({"weight": weight, "step": step})[1].kind)
    assert kinds == list(itertools.islice(itertools.cycle(["base", *["delta"] * deltas]), 8))
    run.finish()


def test_a_base_that_is_asked_for_starts_a_new_count_and_needs_nothing_older() -> None:
    run = Costly(deltas_per_base=3)
    weight, kinds = torch.zeros(5_000), []
    for step in range(7):
        weight += 1
        kinds.append(run.save({"weight": weight}, base=step == 2)[1].kind)
    assert kinds == ["base", "delta", "base", "delta", "delta", "delta", "base"]
    for key, _ in run.store.list("packs/"):
        if int(key.split("/")[2][:8]) < 2:
            run.store.delete(key)
    assert bits(dict(restore_checkpoint(run.store, 1, 5))) == run.expected[5]
    run.checkpointer.close()


def changes() -> dict[str, Any]:
    large = random_bits((70, 80), torch.float32)
    return {
        "another shape": random_bits((80, 71), torch.float32),
        "transposed": large.T,
        "reshaped": large.reshape(80, 70),
        "another dtype of the same size": large.view(torch.int32),
        "another item size": large.double(),
        "half": large.bfloat16(),
        "small": large[:2],
        "empty": large[:0],
        "a number": 3.5,
        "nothing": None,
        "a dict": {"inner": large + 1, "x": [large[:1]]},
        "a list": [large, large[0]],
        "an array": large.flip(0).numpy(),
    }


@pytest.mark.parametrize("what", changes())
def test_a_tensor_that_turns_into_something_else_in_the_middle_of_a_chain_is_restored_right(what: str) -> None:
    run = Costly()
    large, other = random_bits((70, 80), torch.float32), random_bits((30,), torch.float32, 7)
    for value in (large, large + 1, changes()[what], large + 2, changes()[what], large + 2):
        run.save({"it": value, "other": other})
    assert run.checkpointer.head is not None
    assert run.checkpointer.head.manifest.kind == "delta"
    run.finish()


def test_keys_that_come_go_and_come_back_in_the_middle_of_a_chain_are_restored_right() -> None:
    run = Costly()
    large, small = random_bits((70, 80), torch.float32), random_bits((3,), torch.float32)
    for keys in ("ab", "abc", "bc", "abc", "a", "b", "", "abc"):
        state = {name: {"large": large, "small": small} for name in keys}
        run.save({name: {k: v.clone() for k, v in group.items()} for name, group in state.items()})
    assert [manifest.kind for manifest in _manifests(run)] == ["base"] + ["delta"] * 7
    run.finish()


def test_a_tie_that_is_made_and_cut_in_the_middle_of_a_chain_is_restored_right() -> None:
    run = Costly()
    one, two = random_bits((70, 80), torch.float32, 1), random_bits((70, 80), torch.float32, 2)
    for a, b in ((one, two), (one, one), (one, one.clone()), (two, two), (two, one)):
        run.save({"a": a, "b": b})
        restored = restore_checkpoint(run.store, 1, len(run.expected) - 1)
        assert (restored["a"] is restored["b"]) is (a is b)
    run.finish()


def test_packs_are_cut_at_their_limit_and_frames_never_straddle_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "PACK_BYTES", 30_000)
    run = Costly()
    state = {f"t{n}": random_bits((5_000,), torch.float32, n) for n in range(6)}
    _, manifest = run.save(state)
    assert len(manifest.packs) == 6
    for chunk in manifest.chunks:
        for frame in chunk.frames:
            assert frame.offset + frame.length <= manifest.packs[frame.pack].size_bytes
    run.finish()


def _manifests(run: Costly) -> list[Manifest]:
    return [restore_checkpoint(run.store, 1, sequence).manifest for sequence in range(len(run.expected))]
