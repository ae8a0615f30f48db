"""F11: moments belong to a parameter's name, never to its position."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.support.bits import bits
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store import MemoryStore
from training.errors import Invalid
from training.state import TrainingState


class Pair(nn.Module):
    """Two equal layers, registered in the given order; their use does not depend on it."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("b")(torch.relu(self.get_submodule("a")(x)) * 2)  # type: ignore[no-any-return]


def trained(order: str, steps: int) -> TrainingState:
    torch.manual_seed(0)
    weights = {f"{layer}.{kind}": torch.randn(3, 3) if kind == "weight" else torch.randn(3)
               for layer in "ab" for kind in ("weight", "bias")}  # fmt: skip
    model = Pair(order)
    model.load_state_dict(weights)
    state = TrainingState(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    train(state, steps)
    return state


def train(state: TrainingState, steps: int) -> None:
    for _ in range(steps):
        state.optimizer.zero_grad()
        (state.model(torch.arange(6.0).reshape(2, 3)) ** 2).mean().backward()
        state.optimizer.step()


def through_a_store(state: dict[str, Any]) -> Any:
    with IncrementalCheckpointer(MemoryStore()) as checkpointer:
        checkpointer.save(state)
        return checkpointer.restore()


def moments(state: TrainingState) -> dict[str, Any]:
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    return {names[id(p)]: bits(dict(values)) for p, values in state.optimizer.state.items()}


def test_two_equal_layers_in_another_order_keep_their_own_moments() -> None:
    saved = through_a_store(trained("ab", 3).capture())
    swapped = trained("ba", 0)
    swapped.apply(saved)
    assert moments(swapped) == moments(trained("ab", 3))
    train(swapped, 2)
    assert bits(dict(sorted(swapped.model.state_dict().items()))) == bits(
        dict(sorted(trained("ab", 5).model.state_dict().items()))
    )


def test_torch_itself_would_have_swapped_them() -> None:
    saved, swapped = trained("ab", 3).optimizer.state_dict(), trained("ba", 0)
    swapped.optimizer.load_state_dict(saved)
    assert moments(swapped) != moments(trained("ab", 3))


def test_a_missing_and_an_unknown_layer_are_listed_and_nothing_is_applied() -> None:
    class Renamed(Pair):
        def __init__(self) -> None:
            super().__init__("a")
            self.c = nn.Linear(3, 3)

    saved = through_a_store(trained("ab", 1).capture())
    model = Renamed()
    before = bits(dict(model.state_dict()))
    with pytest.raises(Invalid, match=r"lacks c\.bias, c\.weight and has the unknown b\.bias, b\.weight"):
        TrainingState(model, torch.optim.AdamW(model.parameters())).apply(saved)
    assert bits(dict(model.state_dict())) == before


def test_other_groups_and_another_optimizer_are_refused() -> None:
    saved = through_a_store(trained("ab", 1).capture())
    model = Pair("ab")
    groups = [{"params": model.get_submodule(name).parameters()} for name in "ab"]
    with pytest.raises(Invalid, match="has 1 parameter groups, the job 2"):
        TrainingState(model, torch.optim.AdamW(groups)).apply(saved)
    with pytest.raises(Invalid, match="holds AdamW, the job builds SGD"):
        TrainingState(model, torch.optim.SGD(model.parameters())).apply(saved)


def test_a_parameter_that_moved_to_another_group_is_refused() -> None:
    model = Pair("ab")
    a = list(model.get_submodule("a").parameters())
    b = list(model.get_submodule("b").parameters())
    groups: list[dict[str, Any]] = [{"params": a}, {"params": b, "lr": 1.0}]
    moved: list[dict[str, Any]] = [{"params": b}, {"params": a, "lr": 1.0}]
    saved = through_a_store(TrainingState(model, torch.optim.SGD(groups)).capture())
    with pytest.raises(Invalid, match="optimizer group 0"):
        TrainingState(model, torch.optim.SGD(moved)).apply(saved)


def test_a_tensor_that_is_trained_but_not_in_the_model_is_refused_at_the_first_look() -> None:
    model, stray = nn.Linear(2, 2), nn.Parameter(torch.ones(5))
    state = TrainingState(model, torch.optim.SGD([*model.parameters(), stray]))
    with pytest.raises(Invalid, match=r"parameter 2 of optimizer group 0, shape \(5,\), is not a parameter"):
        state.capture()


def test_tied_weights_have_one_moment_and_stay_tied() -> None:
    def tied() -> TrainingState:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
        model[1].weight = model[0].weight
        return TrainingState(model, torch.optim.Adam(model.parameters()))

    def train_tied(state: TrainingState) -> None:
        state.optimizer.zero_grad()
        state.model(torch.arange(5)).sum().backward()
        state.optimizer.step()

    first = tied()
    train_tied(first)
    saved = through_a_store(first.capture())
    second = tied()
    second.apply(saved)
    train_tied(first)
    train_tied(second)
    assert second.model.get_parameter("0.weight") is second.model.get_parameter("1.weight")
    assert bits(dict(first.model.state_dict())) == bits(dict(second.model.state_dict()))
    assert len(saved["optimizer"]["state"]) == 1


def test_prefixes_of_compilers_and_wrappers_never_reach_the_keys() -> None:
    plain = trained("ab", 1)
    wrapped = nn.DataParallel(plain.model)
    compiled = cast("nn.Module", torch.compile(wrapped, backend="eager"))
    state = TrainingState(compiled, plain.optimizer)
    assert list(state.capture()["model"]) == list(plain.model.state_dict())
    assert bits(state.capture()["optimizer"]) == bits(plain.capture()["optimizer"])
