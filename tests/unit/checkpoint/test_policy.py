from __future__ import annotations

import pytest
import torch

from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.manifest import Chunk, Frame, Manifest, Pack
from training.checkpoint.policy import MAX_DELTAS, ChainPolicy, Cost
from training.checkpoint.store import MemoryStore
from training.errors import Invalid

MB = 1 << 20


def manifest(kind: str, written_bytes: int, state_bytes: int = 4 * MB) -> Manifest:
    chunk = Chunk(
        key="w",
        mode="full" if kind == "base" else "delta",
        item_bytes=4,
        size_bytes=state_bytes,
        digest="d",
        frames=(Frame(0, 0, 0, written_bytes, "c", "d"),),
    )
    return Manifest(
        run="r",
        token=1,
        sequence=0,
        kind="base" if kind == "base" else "delta",
        layout_digest="l",
        values=[],
        chunk_count=1,
        state_digest="s",
        chunks=(chunk,),
        packs=(Pack(size_bytes=written_bytes),),
    )


def deltas_until_base(policy: ChainPolicy, base_bytes: int, delta_bytes: int) -> tuple[int, str]:
    policy.committed("base", Cost.of(manifest("base", base_bytes)))
    for count in range(2000):
        base, reason = policy.decide()
        if base:
            return count, reason
        policy.committed("delta", Cost.of(manifest("delta", delta_bytes)))
    raise AssertionError("no base within 2,000 checkpoints")


def test_the_first_checkpoint_is_a_base() -> None:
    assert ChainPolicy().decide() == (True, "the first checkpoint")


def test_dense_deltas_are_followed_by_a_base_when_they_cost_as_much_as_eight() -> None:
    count, reason = deltas_until_base(ChainPolicy(), 3 * MB, 2 * MB)
    assert count == 8
    assert "8 bases" in reason


def test_sparse_deltas_make_a_long_chain_that_still_ends() -> None:
    count, _ = deltas_until_base(ChainPolicy(), 3 * MB, 10_000)
    assert 100 < count <= MAX_DELTAS
    assert deltas_until_base(ChainPolicy(), 3 * MB, 1)[0] == MAX_DELTAS


def test_a_delta_as_large_as_a_base_is_followed_by_a_base() -> None:
    count, reason = deltas_until_base(ChainPolicy(), 3 * MB, 3 * MB)
    assert count == 1
    assert "as large" in reason


@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_number_of_deltas_is_obeyed_whatever_they_cost(most: int) -> None:
    assert deltas_until_base(ChainPolicy(deltas_per_base=most), 3 * MB, 3 * MB)[0] == most


def test_the_allowed_restore_time_is_never_exceeded_by_the_prediction() -> None:
    policy = ChainPolicy(restore_seconds=1.0, decode_rate=20 * MB, read_rate=100 * MB)
    count, reason = deltas_until_base(policy, 3 * MB, 2 * MB)
    assert policy.predicted_seconds() <= 1.0
    assert count == 3
    assert "1 s are allowed" in reason


def test_a_restored_chain_counts() -> None:
    policy = ChainPolicy(deltas_per_base=3)
    policy.start_from([manifest("delta", MB), manifest("delta", MB), manifest("base", MB)])
    assert not policy.decide()[0]
    policy.committed("delta", Cost.of(manifest("delta", MB)))
    assert policy.decide()[0]


def test_the_manifest_says_why() -> None:
    store = MemoryStore()
    with IncrementalCheckpointer(store, deltas_per_base=1) as checkpointer:
        reasons = []
        for step in range(3):
            checkpointer.save({"w": torch.full((10_000,), float(step))})
            committed = checkpointer.wait()
            assert committed is not None
            reasons.append(committed.manifest.decision.kind)
            assert committed.manifest.decision.restore_seconds is not None
    assert reasons == ["the first checkpoint", "a delta is cheaper", "1 deltas since the base"]


@pytest.mark.parametrize("options", [{"restore_seconds": 0.0}, {"restore_seconds": -1.0}, {"deltas_per_base": -1}])
def test_senseless_limits_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(Invalid):
        IncrementalCheckpointer(MemoryStore(), **options)  # type: ignore[arg-type]
