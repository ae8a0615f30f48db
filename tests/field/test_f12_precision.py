"""F12: every tensor comes back in the dtype and with the bits that it was saved with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.bits import bits
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store import MemoryStore
from training.errors import Invalid
from training.state import TrainingState


def through_a_store(state: dict[str, Any]) -> Any:
    with IncrementalCheckpointer(MemoryStore()) as checkpointer:
        checkpointer.save(state)
        checkpointer.save(state)
        return checkpointer.restore()


def step(state: TrainingState) -> None:
    state.optimizer.zero_grad()
    state.model(torch.linspace(-1, 1, 12).reshape(4, 3).to(next(state.model.parameters()).dtype)).sum().backward()
    state.optimizer.step()


def make(
    optimizer: Callable[..., torch.optim.Optimizer], dtype: torch.dtype = torch.float32, **options: Any
) -> TrainingState:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).to(dtype)
    return TrainingState(model, optimizer(model.parameters(), lr=0.01, **options))


CASES: list[tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.parametrize(("optimizer", "options"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_training_goes_on_bit_for_bit_with_every_optimizer(
    optimizer: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    straight = make(optimizer, **options)
    for _ in range(3):
        step(straight)
    resumed = make(optimizer, **options)
    resumed.apply(through_a_store(straight.capture()))
    assert bits(resumed.capture()) == bits(straight.capture())
    for _ in range(2):
        step(straight)
        step(resumed)
    assert bits(resumed.capture()) == bits(straight.capture())


def test_step_10007_is_not_rounded_and_bf16_moments_are_not_cast_up() -> None:
    state = make(torch.optim.AdamW)
    step(state)
    for values in state.optimizer.state.values():
        values["step"].fill_(10007)
        values["exp_avg"] = values["exp_avg"].bfloat16()
    saved = through_a_store(state.capture())
    resumed = make(torch.optim.AdamW)
    resumed.apply(saved)
    for values in resumed.optimizer.state.values():
        assert values["step"].item() == 10007
        assert values["step"].dtype == torch.float32
        assert values["exp_avg"].dtype == torch.bfloat16
        assert values["exp_avg_sq"].dtype == torch.float32
    assert bits(resumed.capture()) == bits(state.capture())


def test_fp32_moments_of_bf16_weights_stay_fp32() -> None:
    state = make(torch.optim.AdamW, torch.bfloat16)
    step(state)
    for values in state.optimizer.state.values():
        values["exp_avg"] = values["exp_avg"].float() + 1e-5
    resumed = make(torch.optim.AdamW, torch.bfloat16)
    resumed.apply(through_a_store(state.capture()))
    assert bits(resumed.capture()) == bits(state.capture())


def test_a_step_count_held_as_int64_or_python_int_stays_what_it_is() -> None:
    state = make(torch.optim.AdamW)
    step(state)
    for kind, values in zip((2**53 + 1, torch.tensor(2**53 + 1)), state.optimizer.state.values(), strict=False):
        values["step"] = kind
    resumed = make(torch.optim.AdamW)
    resumed.apply(through_a_store(state.capture()))
    assert bits(resumed.capture()) == bits(state.capture())


def test_moments_in_channels_last_keep_their_layout() -> None:
    def build() -> TrainingState:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return TrainingState(model, torch.optim.AdamW(model.parameters()))

    def conv_step(state: TrainingState) -> None:
        state.optimizer.zero_grad()
        state.model(torch.ones(2, 3, 8, 8)).sum().backward()
        state.optimizer.step()

    state, resumed = build(), build()
    conv_step(state)
    resumed.apply(through_a_store(state.capture()))

    def strides(one: TrainingState) -> list[Any]:
        return [
            [v.stride() for v in values.values() if isinstance(v, Tensor)]
            for values in one.optimizer.state.values()
        ]

    assert strides(resumed) == strides(state)
    conv_step(state)
    conv_step(resumed)
    assert bits(resumed.capture()) == bits(state.capture())


def test_weights_of_another_dtype_or_shape_are_refused_and_named() -> None:
    saved = through_a_store(make(torch.optim.SGD).capture())
    other = make(torch.optim.SGD, torch.bfloat16)
    before = bits(other.capture()["model"])
    with pytest.raises(Invalid, match=r"model/0\.weight: the checkpoint has torch\.float32 \(4, 3\)"):
        other.apply(saved)
    assert bits(other.capture()["model"]) == before


SCHEDULERS: dict[str, Any] = {
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 100),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.2),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        [3],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_go_on_where_they_were(name: str) -> None:
    def build() -> TrainingState:
        state = make(torch.optim.SGD, momentum=0.9)
        state.scheduler = SCHEDULERS[name](state.optimizer)
        return state

    def advance(state: TrainingState, steps: int) -> list[float]:
        assert state.scheduler is not None
        rates = []
        for _ in range(steps):
            step(state)
            state.scheduler.step()
            rates.append(state.optimizer.param_groups[0]["lr"])
        return rates

    straight, resumed = build(), build()
    advance(straight, 3)
    resumed.apply(through_a_store(straight.capture()))
    assert bits(advance(resumed, 4)) == bits(advance(straight, 4))
