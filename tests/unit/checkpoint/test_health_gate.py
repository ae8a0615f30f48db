"""What is not finite never becomes head, and the next attempt can start from before the trouble."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.bits import bits, random_bits
from tests.support.faults import RuledStore, fail_on
from training.checkpoint import IncrementalCheckpointer, Position, RollbackPolicy
from training.checkpoint.finite import is_finite
from training.checkpoint.history import candidates, head_ref, read_lineage
from training.checkpoint.quarantine import read_incidents
from training.checkpoint.restore import restore_newest
from training.checkpoint.state.dtypes import DTYPES
from training.checkpoint.store import MemoryStore
from training.checkpoint.token import read_seal
from training.errors import Diverged, Invalid, Unavailable

MUST = ("model/weight", "model/scale", "optimizer/state")
LARGE = 40_000  # a chunk of its own
FLOATS = sorted(name for name, dtype in DTYPES.items() if dtype.is_floating_point or dtype.is_complex)


def a_state(seed: int) -> dict[str, Any]:
    values = torch.Generator().manual_seed(seed)
    return {
        "model": {
            "weight": torch.randn(LARGE, generator=values),
            "scale": torch.randn(3, generator=values),
            "mask": torch.full((5,), -torch.inf),
        },
        "optimizer": {
            "state": {
                "weight": {"exp_avg": torch.randn(LARGE, generator=values), "step": torch.tensor(float(seed))}
            }
        },
        "seed": seed,
    }


def an_attempt(store: Any, **options: Any) -> IncrementalCheckpointer:
    return IncrementalCheckpointer(store, run="r", must_be_finite=MUST, **options)


def save(checkpointer: IncrementalCheckpointer, step: int, state: dict[str, Any] | None = None) -> None:
    checkpointer.save(state or a_state(step), position=Position(step=step))
    checkpointer.wait()


def as_torch_says(values: torch.Tensor) -> bool:
    wide = values.view(torch.float16) if values.dtype == torch.complex32 else values
    wide = wide.float() if wide.dtype.itemsize == 1 else wide
    return bool(torch.isfinite(wide).all())


def check(values: torch.Tensor, name: str) -> bool:
    return is_finite(values.contiguous().view(torch.uint8).numpy(), name)


@pytest.mark.parametrize("name", FLOATS)
def test_the_look_at_the_bits_agrees_with_torch(name: str) -> None:
    dtype = DTYPES[name]
    if dtype.itemsize <= 2:
        integer = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
        low = 0 if integer == torch.uint8 else -(2**15)
        every = torch.arange(low, low + 256**dtype.itemsize, dtype=torch.int64).to(integer).view(dtype)
        for value in every.view(-1, 1):
            assert check(value, name) == as_torch_says(value), value
        return
    for seed in range(300):
        values = random_bits((7,), dtype, seed)
        assert check(values, name) == as_torch_says(values)
    real = torch.zeros(18, dtype=dtype.to_real())  # of a complex number both parts, one after the other
    limits = torch.finfo(real.dtype)
    for special in (torch.inf, -torch.inf, torch.nan, limits.max, limits.min, limits.tiny / 2, -0.0):
        real[4] = special
        assert check(real, name) == as_torch_says(real), special


@pytest.mark.parametrize("at", [0, 2**18 - 1, 2**18, 600_001])
def test_one_bad_number_among_many_is_found(at: int) -> None:
    values = torch.ones(600_002)
    assert check(values, "float32")
    values[at] = torch.nan
    assert not check(values, "float32")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("model", "weight"), torch.nan),
        (("model", "scale"), torch.inf),
        (("optimizer", "state", "weight", "exp_avg"), -torch.inf),
        (("optimizer", "state", "weight", "step"), torch.nan),
    ],
    ids=["a weight", "a small weight", "a moment", "a counter"],
)
def test_a_state_that_is_not_finite_is_quarantined_by_name_and_leaves_no_trace(
    path: tuple[str, ...], value: float
) -> None:
    store = MemoryStore()
    checkpointer = an_attempt(store)
    save(checkpointer, 1)
    head, objects = head_ref(store), {key for key, _ in store.list("")}
    sick = a_state(2)
    tensor: Any = sick
    for name in path:
        tensor = tensor[name]
    tensor.view(-1)[-1] = value
    with pytest.raises(Diverged, match="/".join(path)) as raised:
        save(checkpointer, 2, sick)
    assert (raised.value.token, raised.value.sequence) == (1, 1)
    assert head_ref(store) == head == checkpointer.head.ref  # type: ignore[union-attr]
    assert {key for key, _ in store.list("")} - objects == {"quarantine/000001/00000001.json"}
    (incident,) = read_incidents(store)
    assert (incident.name, incident.step, incident.since_step) == ("/".join(path), 2, 2)

    save(checkpointer, 3)  # the reference is still that of step 1
    checkpointer.close()
    assert read_lineage(store).chain[-1].manifest.kind == "delta"
    restored = restore_newest(store, "r")
    assert restored is not None
    assert bits(dict(restored)) == bits(a_state(3))


def test_an_infinite_mask_and_what_nobody_named_pass() -> None:
    store = MemoryStore()
    with an_attempt(store) as checkpointer:
        save(checkpointer, 1)
    with IncrementalCheckpointer(store, run="r") as careless:
        sick = a_state(2)
        sick["model"]["weight"][0] = torch.nan
        careless.restore()
        save(careless, 2, sick)
    assert read_incidents(store) == []
    assert head_ref(store).token == 2  # type: ignore[union-attr]


def test_a_name_is_not_a_prefix_of_another() -> None:
    store = MemoryStore()
    with IncrementalCheckpointer(store, run="r", must_be_finite=["model/w"]) as checkpointer:
        checkpointer.save({"model": {"w": torch.ones(2), "w2": torch.full((2,), torch.nan)}})
        checkpointer.wait()
        checkpointer.save({"model": {"w": torch.full((2,), torch.nan), "w2": torch.ones(2)}})
        with pytest.raises(Diverged, match="model/w"):
            checkpointer.wait()


def test_the_gate_closes_though_the_store_cannot_keep_the_incident() -> None:
    store = RuledStore(MemoryStore())
    checkpointer = an_attempt(store)
    save(checkpointer, 1)
    store.rule = fail_on("put_if_absent", "quarantine/", Unavailable("away"))
    sick = a_state(2)
    sick["model"]["scale"][0] = torch.nan
    with pytest.raises(Diverged):
        save(checkpointer, 2, sick)
    checkpointer.close()


def a_run_with_trouble(store: Any, since_step: int, steps: tuple[int, ...] = (10, 20, 30, 40)) -> None:
    checkpointer = an_attempt(store)
    checkpointer.restore()
    for step in steps:
        save(checkpointer, step)
    checkpointer.quarantine("loss", "it spikes", position=Position(step=steps[-1] + 5), since_step=since_step)
    checkpointer.close()


def test_after_an_incident_the_next_attempt_starts_from_before_it_and_the_seal_says_so() -> None:
    store = MemoryStore()
    a_run_with_trouble(store, since_step=25)
    with an_attempt(store, rollback=RollbackPolicy(most=1, skip_steps=3)) as second:
        restored = second.restore()
        assert restored is not None
        assert restored.position.step == 20
        assert bits(dict(restored)) == bits(a_state(20))
        save(second, 50)
    seal = read_seal(store, 2)
    assert (seal.head.token, seal.head.sequence) == (1, 1)  # type: ignore[union-attr]
    assert seal.rollback is not None
    assert (seal.rollback.token, seal.rollback.since_step, seal.rollback.skip_steps) == (1, 25, 3)
    assert [skipped.key[-13:] for skipped in seal.skipped] == ["00000003.json", "00000002.json"]
    assert all("it spikes" in skipped.reason for skipped in seal.skipped)
    assert list(candidates(store)) == [(2, 2), (1, 1), (1, 0)], "what came after is void"


def test_without_the_wish_the_next_attempt_goes_on_from_the_newest() -> None:
    store = MemoryStore()
    a_run_with_trouble(store, since_step=25)
    with an_attempt(store) as second:
        restored = second.restore()
    assert restored is not None
    assert restored.position.step == 40
    assert read_seal(store, 2).rollback is None


def test_an_incident_is_answered_once() -> None:
    store = MemoryStore()
    a_run_with_trouble(store, since_step=25)
    policy = RollbackPolicy(most=5)
    with an_attempt(store, rollback=policy) as second:
        second.restore()
        save(second, 30)
        save(second, 40)
    with an_attempt(store, rollback=policy) as third:
        restored = third.restore()
    assert restored is not None
    assert restored.position.step == 40
    assert third.rollback is None


def test_an_attempt_that_dies_before_it_commits_leaves_its_rollback_to_the_next() -> None:
    store = MemoryStore()
    a_run_with_trouble(store, since_step=25)
    policy = RollbackPolicy(most=1, skip_steps=3)
    for _ in range(3):  # each one but the last dies; none uses up another rollback
        with an_attempt(store, rollback=policy) as attempt:
            restored = attempt.restore()
        assert restored is not None
        assert restored.position.step == 20
        assert attempt.rollback is not None
        assert attempt.rollback.skip_steps == 3


def test_trouble_again_before_a_commit_leaves_out_more_and_in_the_end_nothing_is_rolled_back() -> None:
    store = MemoryStore()
    a_run_with_trouble(store, since_step=25)
    policy = RollbackPolicy(most=2, skip_steps=3)
    skipped = []
    for _ in range(3):
        attempt = an_attempt(store, rollback=policy)
        attempt.restore()
        skipped.append(attempt.rollback.skip_steps if attempt.rollback else None)
        attempt.quarantine("loss", "again", position=Position(step=27), since_step=26)
        attempt.close()
    assert skipped[:2] == [3, 6]
    seals = [read_seal(store, token).rollback for token in (2, 3, 4)]
    assert len({(rollback.token, rollback.sequence) for rollback in seals if rollback}) == 2


def test_with_nothing_healthy_left_it_stops_and_does_not_start_from_zero() -> None:
    store = MemoryStore()
    a_run_with_trouble(store, since_step=7)
    attempt = an_attempt(store, rollback=RollbackPolicy(most=1))
    with pytest.raises(Diverged, match="no intact checkpoint is from before step 7"):
        attempt.restore()
    attempt.close()


def test_an_attempt_that_is_not_open_quarantines_nothing() -> None:
    checkpointer = an_attempt(MemoryStore())
    with pytest.raises(Invalid, match="not open"):
        checkpointer.quarantine("loss", "x", position=Position(), since_step=0)
    checkpointer.close()
