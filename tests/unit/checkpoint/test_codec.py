from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.checkpoint.coding.codec import (
    GROUP_BYTES,
    apply_frame,
    changed_groups,
    encode_difference,
    encode_frame,
    is_sparse,
    prefers_delta,
)
from training.checkpoint.manifest import BALANCED, CODEC
from training.errors import Corrupt

ITEMS = (1, 2, 4, 8, 16)


def frames(seed: int, item_bytes: int, items: int, changed: float) -> tuple[Any, Any]:
    """A frame and the one after it, of random bits."""
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, items * item_bytes, dtype=np.uint8)
    new = old.copy()
    chosen = rng.random(old.size) < changed
    new[chosen] = rng.integers(0, 256, int(chosen.sum()), dtype=np.uint8)
    return old, new


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    item_bytes=st.sampled_from(ITEMS),
    items=st.integers(1, 3000),
    changed=st.sampled_from((0.0001, 0.001, 0.01, 0.5, 1.0)),
)
def test_a_difference_turns_the_frame_before_into_the_next_bit_for_bit(
    seed: int, item_bytes: int, items: int, changed: float
) -> None:
    old, new = frames(seed, item_bytes, items, changed)
    before, after = old.copy(), new.copy()
    encoded = encode_difference(new, old, item_bytes, changed_groups(new, old))
    assert np.array_equal(old, before), "encoding altered its input"
    assert np.array_equal(new, after), "encoding altered its input"
    out = old.copy()
    apply_frame(BALANCED, True, memoryview(encoded), out, item_bytes)
    assert (out == new).all()


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 2000), places=st.lists(st.integers(0, 1999), max_size=5))
def test_exactly_the_groups_that_differ_are_found(seed: int, size: int, places: list[int]) -> None:
    old = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    new = old.copy()
    for place in places:
        if place < size:
            new[place] ^= 1
    expected = [bool((old[at : at + GROUP_BYTES] != new[at : at + GROUP_BYTES]).any()) for at in range(0, size, 64)]
    assert changed_groups(new, old).tolist() == expected


@settings(deadline=None, max_examples=50)
@given(seed=st.integers(0, 2**32), item_bytes=st.sampled_from(ITEMS))
def test_the_differences_of_a_chain_may_be_applied_in_any_order(seed: int, item_bytes: int) -> None:
    first, second = frames(seed, item_bytes, 500, 1.0)
    _, third = frames(seed + 1, item_bytes, 500, 1.0)
    steps = [
        encode_difference(new, old, item_bytes, changed_groups(new, old))
        for old, new in ((first, second), (second, third))
    ]
    for order in (steps, steps[::-1]):
        out = first.copy()
        for step in order:
            apply_frame(BALANCED, True, step, out, item_bytes)
        assert (out == third).all()


def test_few_changed_rows_cost_a_few_bytes_and_are_coded_sparsely() -> None:
    rng = np.random.default_rng(0)
    old = rng.standard_normal((32768, 32), dtype=np.float32)
    new = old.copy()
    rows = rng.choice(32768, 300, replace=False)
    new[rows] += 1e-3
    flat_old, flat_new = old.view(np.uint8).reshape(-1), new.view(np.uint8).reshape(-1)
    groups = changed_groups(flat_new, flat_old)
    assert groups.sum() == 600
    assert is_sparse(groups)
    encoded = encode_difference(flat_new, flat_old, 4, groups)
    assert len(encoded) < 300 * 128 + 1500, "more than the changed rows and where they are"


def test_a_small_difference_of_either_sign_is_cheaper_than_its_plain_form() -> None:
    rng = np.random.default_rng(0)
    old = rng.standard_normal(1 << 18, dtype=np.float32)
    new = old + rng.standard_normal(1 << 18, dtype=np.float32) * np.float32(1e-4)
    bits_new, bits_old = new.view(np.uint8), old.view(np.uint8)
    plain = encode_frame((new.view(np.uint32) - old.view(np.uint32)).view(np.uint8), 4)
    balanced = encode_difference(bits_new, bits_old, 4, changed_groups(bits_new, bits_old))
    assert len(balanced) < 0.97 * len(plain)


def test_an_unknown_codec_is_refused_by_name() -> None:
    with pytest.raises(Corrupt, match="unknown codec 'later'"):
        apply_frame("later", True, b"", np.zeros(4, np.uint8), 4)


@pytest.mark.parametrize("damage", ["cut", "flip"])
@pytest.mark.parametrize("changed", [0.001, 1.0])
def test_a_damaged_frame_is_an_error_or_other_bytes_but_never_a_crash(damage: str, changed: float) -> None:
    old, new = frames(3, 4, 4096, changed)
    encoded = bytearray(encode_difference(new, old, 4, changed_groups(new, old)))
    rng = np.random.default_rng(1)
    for _ in range(60):
        broken = bytearray(encoded)
        if damage == "cut":
            del broken[int(rng.integers(0, len(broken))) :]
        else:
            broken[int(rng.integers(0, len(broken)))] ^= 1 << int(rng.integers(0, 8))
        out = old.copy()
        try:
            apply_frame(BALANCED, True, bytes(broken), out, 4)
        except Corrupt:
            continue
        assert out.size == new.size


def test_noise_is_not_coded_as_a_difference_and_small_steps_are() -> None:
    rng = np.random.default_rng(0)
    old = rng.standard_normal(1 << 16, dtype=np.float32)
    other = rng.standard_normal(1 << 16, dtype=np.float32)
    for new, expected in ((old * np.float32(1.0001), True), (other, False)):
        was, now = old.view(np.uint8), new.view(np.uint8)
        assert prefers_delta(now, was, 4, changed_groups(now, was)) is expected


def test_the_plain_difference_of_the_first_checkpoints_is_still_read() -> None:
    old, new = frames(5, 4, 1000, 0.3)
    plain = encode_frame((new.view(np.uint32) - old.view(np.uint32)).view(np.uint8), 4)
    out = old.copy()
    apply_frame(CODEC, True, plain, out, 4)
    assert (out == new).all()
