"""Deltas with a bounded error: the bound holds for every element, and says so in the manifest."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.coding.bounded import BoundedCodec, apply_bounded, encode_bounded
from training.checkpoint.manifest import BOUNDED, Manifest
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import MemoryStore

Bits = Literal["int8", "int4"]


def adam_like(step: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(step)
    base = torch.Generator().manual_seed(99)
    weights = torch.randn(400, 400, generator=base) * 0.05
    noise = torch.randn(400, 400, generator=numbers)
    return {
        "model/w": weights + 1e-4 * step * torch.randn(400, 400, generator=torch.Generator().manual_seed(7)),
        "exp_avg": noise * 1e-3,
        "exp_avg_sq": (noise * 1e-3).square() * (1 + 0.01 * step),
        "count": torch.arange(20_000) + step,
        "small": torch.full((3,), float(step)),
    }


def save_all(states: list[dict[str, Any]], **options: Any) -> tuple[MemoryStore, list[Manifest]]:
    store, manifests = MemoryStore(), []
    with IncrementalCheckpointer(store, **options) as checkpointer:
        for state in states:
            checkpointer.save(state)
            committed = checkpointer.wait()
            assert committed is not None
            manifests.append(committed.manifest)
    return store, manifests


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_no_element_is_further_off_than_the_manifest_says(name: Bits) -> None:
    states = [adam_like(step) for step in range(6)]
    store, manifests = save_all(states, bounded=name, deltas_per_base=3)
    assert [m.kind for m in manifests] == ["base", "delta", "delta", "delta", "base", "delta"]
    for manifest, state in zip(manifests, states, strict=True):
        restored = restore_checkpoint(store, manifest.token, manifest.sequence)
        bounds = {chunk.key: chunk.bound for chunk in manifest.chunks}
        for key, tensor in state.items():
            error = (restored[key].double() - tensor.double()).abs().max().item()
            bound = bounds.get(key.replace("/", "~1"))
            if manifest.kind == "base" or bound is None:
                assert error == 0, f"{key} of a {manifest.kind} is not exact"
            else:
                assert 0 < error <= bound <= 0.2 * tensor.abs().max().item()
    bounded = {chunk.key: chunk.codec for chunk in manifests[1].chunks if chunk.codec in BOUNDED}
    small = "int8-blocks" if name == "int8" else "int4-blocks"
    assert bounded == {"model~1w": small, "exp_avg": small, "exp_avg_sq": "int8-blocks"}


@pytest.mark.parametrize(("name", "limit"), [("int8", 0.26), ("int4", 0.18)])
def test_it_is_smaller_than_lossless(name: Bits, limit: float) -> None:
    states = [{k: v for k, v in adam_like(step).items() if v.dtype == torch.float32} for step in range(2)]
    _, manifests = save_all(states, bounded=name)
    assert manifests[1].costs.written_bytes < limit * manifests[1].costs.state_bytes


def test_errors_do_not_add_up_along_a_chain() -> None:
    states = [adam_like(step) for step in range(30)]
    store, manifests = save_all(states, bounded="int8", deltas_per_base=100)
    restored = restore_checkpoint(store, 1, 29)
    error = (restored["model/w"] - states[29]["model/w"]).abs().max().item()
    (bound,) = (chunk.bound for chunk in manifests[29].chunks if chunk.key == "model~1w")
    assert bound is not None
    assert error <= bound


def test_a_tensor_that_cannot_hold_its_bound_is_stored_without_loss() -> None:
    states = [{"w": torch.zeros(100, 100)}, {"w": torch.zeros(100, 100)}]
    states[1]["w"][0, 0], states[1]["w"][0, 1:] = 1000.0, 0.001
    codec = BoundedCodec("int8", relative_bound=1e-9)
    store, manifests = save_all(states, bounded=codec)
    assert manifests[1].chunks[0].bound is None
    assert torch.equal(restore_checkpoint(store, 1, 1)["w"], states[1]["w"])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_stored_without_loss(value: float) -> None:
    states = [adam_like(0), adam_like(1), adam_like(2)]
    states[1]["exp_avg"][5, 5] = value
    store, manifests = save_all(states, bounded="int4")
    assert {c.key: c.bound for c in manifests[1].chunks}["exp_avg"] is None
    restored = restore_checkpoint(store, 1, 1)["exp_avg"]
    assert restored.numpy().tobytes() == states[1]["exp_avg"].numpy().tobytes()


def test_a_negative_second_moment_is_stored_without_loss() -> None:
    states = [adam_like(0), adam_like(1)]
    states[1]["exp_avg_sq"][0, 0] = -1.0
    store, _ = save_all(states, bounded="int8")
    assert torch.equal(restore_checkpoint(store, 1, 1)["exp_avg_sq"], states[1]["exp_avg_sq"])


def test_a_new_attempt_goes_on_from_what_was_reconstructed() -> None:
    store, _ = save_all([adam_like(0), adam_like(1)], bounded="int8")
    with IncrementalCheckpointer(store, bounded="int8") as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        checkpointer.save(adam_like(2))
        committed = checkpointer.wait()
    assert committed is not None
    assert committed.manifest.kind == "delta"
    (bound,) = (c.bound for c in committed.manifest.chunks if c.key == "exp_avg")
    error = (restore_checkpoint(store, 2, 2)["exp_avg"] - adam_like(2)["exp_avg"]).abs().max().item()
    assert bound is not None
    assert error <= bound


def test_without_the_option_nothing_is_bounded() -> None:
    _, manifests = save_all([adam_like(0), adam_like(1)])
    assert all(chunk.bound is None and chunk.codec not in BOUNDED for m in manifests for chunk in m.chunks)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    items=st.integers(1, 5000),
    codec=st.sampled_from(sorted(BOUNDED)),
    root=st.booleans(),
    scale=st.sampled_from((1e-30, 1e-6, 1.0, 1e20)),
)
def test_the_stated_error_is_that_of_a_reader(seed: int, items: int, codec: str, root: bool, scale: float) -> None:
    rng = np.random.default_rng(seed)
    old, new = (np.abs(rng.standard_normal(items)).astype(np.float32) * np.float32(scale) for _ in range(2))
    encoded, error = encode_bounded(codec, new.view(np.uint8), old.view(np.uint8), root)
    out = old.copy()
    apply_bounded(codec, encoded, out.view(np.uint8))
    assert error == np.abs(out - new).max()
    assert np.isfinite(error)


def test_a_copy_of_a_bounded_master_follows_it_within_a_bound_of_its_own() -> None:
    masters = [adam_like(step)["model/w"] for step in range(4)]
    states = [{"copy": master.bfloat16(), "master": master} for master in masters]
    store, manifests = save_all(states, bounded="int8")
    for manifest, state in zip(manifests[1:], states[1:], strict=True):
        restored = restore_checkpoint(store, 1, manifest.sequence)
        bounds = {chunk.key: chunk.bound for chunk in manifest.chunks}
        assert torch.equal(restored["copy"], restored["master"].bfloat16())
        error = (restored["copy"].float() - state["copy"].float()).abs().max().item()
        assert error <= (bounds["copy"] or 0.0)


def test_a_tensor_that_cannot_hold_its_bound_in_4_bits_is_coded_in_8_and_tried_again_later() -> None:
    states = [adam_like(step) for step in range(12)]
    states[4]["exp_avg"] *= 10.0  # so that the next step is large beside what it leads to
    store, manifests = save_all(states, bounded="int4", deltas_per_base=100)
    codecs = [{c.key: c.codec for c in m.chunks}.get("exp_avg") for m in manifests]
    assert {"int4-blocks", "int8-blocks"} <= set(codecs)
    assert codecs[-1] == "int4-blocks"
    for manifest, state in zip(manifests[1:], states[1:], strict=True):
        bound = {c.key: c.bound for c in manifest.chunks}["exp_avg"]
        error = (restore_checkpoint(store, 1, manifest.sequence)["exp_avg"] - state["exp_avg"]).abs().max().item()
        assert error <= (bound or 0.0)
        assert error <= 0.2 * state["exp_avg"].abs().max().item()
