"""What a save writes: nothing for what stayed the same, little for what changed a little."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.bits import bits
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.coding.choices import Choices
from training.checkpoint.manifest import CAST, Manifest
from training.checkpoint.restore import find_newest, restore_checkpoint
from training.checkpoint.store import MemoryStore

ROWS = 4096


def saved(store: MemoryStore, states: list[dict[str, Any]], **options: Any) -> list[Manifest]:
    """Save each state; every one of them must come back bit for bit."""
    manifests = []
    with IncrementalCheckpointer(store, deltas_per_base=100, **options) as checkpointer:
        for state in states:
            checkpointer.save(state)
            committed = checkpointer.wait()
            assert committed is not None
            manifests.append(committed.manifest)
            restored = restore_checkpoint(store, committed.ref.token, committed.ref.sequence)
            assert bits(dict(restored)) == bits(state)
    return manifests


def modes(manifest: Manifest) -> dict[str, str]:
    return {chunk.key: chunk.mode if chunk.codec != CAST else CAST for chunk in manifest.chunks}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_what_is_frozen_costs_no_byte_and_no_entry() -> None:
    frozen, adapter = randn(512, 512), randn(512, 16, seed=1)
    first = {"frozen": frozen, "adapter": adapter}
    second = {"frozen": frozen, "adapter": adapter * 1.0001}
    base, delta = saved(MemoryStore(), [first, second])
    assert set(modes(base)) == {"frozen", "adapter"}
    assert set(modes(delta)) == {"adapter"}
    assert delta.decision.modes == {"same": 1, "delta": 1}
    assert delta.costs.written_bytes < adapter.nbytes


def test_touched_rows_of_an_embedding_cost_in_proportion() -> None:
    table = randn(ROWS, 32)
    costs = []
    for rows in (40, 400):
        touched = table.clone()
        touched[torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:rows]] += 1e-3
        costs.append(saved(MemoryStore(), [{"table": table}, {"table": touched}])[1].costs.written_bytes)
    assert costs[0] < 40 * 128 + 400
    assert 5 < costs[1] / costs[0] < 12


def test_an_unchanged_state_writes_no_pack_at_all() -> None:
    state = {"w": randn(300, 300), "step": 3}
    _, again = saved(MemoryStore(), [state, state])
    assert again.packs == ()
    assert again.chunks == ()


def test_only_the_frame_that_changed_is_written() -> None:
    before = torch.zeros(3 << 20)  # 12 MiB: three frames
    after = before.clone()
    after[1_500_000] = 1.0
    _, delta = saved(MemoryStore(), [{"w": before}, {"w": after}])
    assert [frame.number for frame in delta.chunks[0].frames] == [1]


class TestCopiesOfMasters:
    def state(self, step: int, change: float = 0.0) -> dict[str, Any]:
        master = randn(256, 256) * (1 + step * 1e-3)
        copy = master.bfloat16()
        if change:
            copy[3, 4] += change
        return {"model": {"w": copy}, "optimizer": {"master": master}}

    def test_a_copy_costs_nothing_in_a_base_or_a_delta(self) -> None:
        manifests = saved(MemoryStore(), [self.state(step) for step in range(4)])
        for manifest in manifests:
            assert modes(manifest)["model/w"] == CAST
            (entry,) = (chunk for chunk in manifest.chunks if chunk.key == "model/w")
            assert entry.source == "optimizer/master"
            assert all(frame.length == 0 for frame in entry.frames)

    def test_a_copy_that_is_none_in_one_element_is_stored(self) -> None:
        manifests = saved(
            MemoryStore(), [self.state(0), self.state(1, change=0.5), self.state(2), self.state(3, change=0.5)]
        )
        assert [modes(manifest)["model/w"] for manifest in manifests] == [CAST, "full", CAST, "full"]

    def test_an_unchanged_pair_is_the_same_and_a_changed_master_is_cast_again(self) -> None:
        state = self.state(0)
        nudged = {"model": state["model"], "optimizer": {"master": state["optimizer"]["master"].clone()}}
        nudged["optimizer"]["master"][0, 0] += state["optimizer"]["master"][0, 0].abs() * 1e-7
        _, same, moved = saved(MemoryStore(), [state, state, nudged])
        assert same.chunks == ()
        assert modes(moved) == {"model/w": CAST, "optimizer/master": "delta"}

    def test_a_new_attempt_goes_on_with_it(self) -> None:
        store = MemoryStore()
        saved(store, [self.state(0), self.state(1)])
        (second,) = saved(store, [self.state(1)])
        assert second.chunks == ()
        (third,) = saved(store, [self.state(2, change=0.25)])
        assert modes(third)["model/w"] == "full", "a delta to what was never stored cannot be restored"

    def test_a_rounding_that_is_not_ours_is_stored_as_it_is(self) -> None:
        master = randn(256, 256)
        truncated = (master.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
        (base,) = saved(MemoryStore(), [{"copy": truncated, "master": master}])
        assert modes(base)["copy"] == "full"

    def test_the_right_one_of_several_masters_is_found(self) -> None:
        masters = [randn(256, 256, seed=seed) for seed in range(4)]
        state = {"copies": [master.bfloat16() for master in masters], "masters": masters}
        (base,) = saved(MemoryStore(), [state])
        sources = {chunk.key: chunk.source for chunk in base.chunks if chunk.codec == CAST}
        assert sources == {f"copies/~i{i}": f"masters/~i{i}" for i in range(4)}


def test_the_choice_between_full_and_delta_follows_the_data() -> None:
    drifting = [randn(256, 256) * (1 + step * 1e-5) for step in range(2)]
    noise = [randn(256, 256, seed=step) for step in range(2)]
    _, delta = saved(MemoryStore(), [{"drift": d, "noise": n} for d, n in zip(drifting, noise, strict=True)])
    assert modes(delta) == {"drift": "delta", "noise": "full"}


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_writes_the_same_bytes(threads: int) -> None:
    states = [{f"w{i}": randn(300, 300, seed=i) * (1 + step * 1e-4) for i in range(9)} for step in range(3)]
    one, many = MemoryStore(), MemoryStore()
    saved(one, states)
    saved(many, states, encode_threads=threads, upload_threads=threads)
    packs = [key for key, _ in one.list("packs/")]
    assert packs == [key for key, _ in many.list("packs/")]
    assert all(one.get(key) == many.get(key) for key in packs)


def test_the_reference_of_a_restored_chain_is_the_state_that_was_saved() -> None:
    store = MemoryStore()
    states = [{"w": randn(300, 300) * (1 + step * 1e-4), "copy": None} for step in range(3)]
    saved(store, states)
    found, skipped = find_newest(store, "default")
    assert found is not None
    assert not skipped
    assert bytes(found.reference.chunks["w"].data) == states[-1]["w"].numpy().tobytes()  # type: ignore[union-attr]
    found.state["w"].zero_()
    assert found.reference.chunks["w"].data.any(), "the caller's state and the reference share memory"


def test_a_choice_is_measured_less_and_less_often_and_anew_when_it_turns() -> None:
    choices = Choices()
    answers = [True] * 32 + [False] * 20
    measured: list[int] = []
    for save, answer in enumerate(answers):

        def measure(save: int = save, answer: bool = answer) -> bool:
            measured.append(save)
            return answer

        choices.prefers_delta("w", measure)
    assert measured == [0, 1, 3, 7, 15, 23, 31, 39, 40, 42, 46]


def test_small_moments_do_not_share_a_slab_with_small_weights() -> None:
    def state(step: int) -> dict[str, Any]:
        names = [f"layer.{i}.weight" for i in range(6)]
        return {
            "model": {name: randn(40, 40) * (1 + step * 1e-4) for name in names},
            "optimizer": {name: {"exp_avg": randn(40, 40, seed=step), "step": step} for name in names},
        }

    _, delta = saved(MemoryStore(), [state(0), state(1)])
    assert modes(delta) == {"~slab/4": "delta", "~slab/4/exp_avg": "full"}
