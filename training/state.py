"""The whole state of a training in one place: what is captured, under which names, and how it is put back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from training.checkpoint.state.boxes import NOTHING, Box
from training.checkpoint.state.parts import boxes_of
from training.checkpoint.state.share import HoldersOf
from training.checkpoint.state.tree import PerRank
from training.errors import Invalid
from training.parallel.division import Division, segment_of
from training.randomness import apply_randomness, capture_randomness
from training.sharding import placed_like

if TYPE_CHECKING:
    from training.parallel.compression import Residuals
    from training.parallel.local import LocalSteps
    from training.parallel.ranks import Ranks

_COMPILED = "_orig_mod."


@dataclass
class TrainingState:
    """Model, optimizer, scheduler, scaler and generators of one training process."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None = None
    scaler: torch.amp.GradScaler | None = None
    ranks: Ranks | None = None
    residuals: Residuals | None = None
    local: LocalSteps | None = None
    division: Division | None = None
    _boxes: Mapping[str, Box] | None = None

    def capture(self) -> dict[str, Any]:
        """References to the live state, as a tree that the engine can save. Nothing is copied here.

        Raises:
            Invalid: a parameter of the optimizer is not one of the model's.
        """
        own = capture_randomness()
        found: dict[str, Any] = {
            "model": model_state(self.model),
            "optimizer": optimizer_state(self.optimizer, self.model),
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "randomness": own if self.ranks is None else PerRank(own),
        }
        if self.residuals is not None:
            found["residuals"] = PerRank(self.residuals.capture())
        if self.local is not None:
            if self.local.moments_differ:
                found["optimizer"]["state"] = PerRank(found["optimizer"]["state"])
            found["outer"] = self.local.capture()
        return self.division.pool(found) if self.division is not None else found

    def apply(self, state: Mapping[str, Any], saved_by: int = 1) -> None:
        """Put a captured state back. Call it last, since it also sets the random generators.

        Args:
            state: as it was captured, or what this rank restored of it.
            saved_by: how many ranks saved it.

        Raises:
            Invalid: names, shapes or dtypes differ from those of the live objects; they are listed.
        """
        if self.division is not None:
            state = self.division.part(state)
        apply_model(self.model, state["model"])
        optimizer = state["optimizer"]
        if self.local is not None:
            optimizer = {**optimizer, "state": self.local.moments(optimizer["state"], saved_by)}
            _check_names("outer", self.local.capture(), state["outer"])
            self.local.apply(state["outer"])
        apply_optimizer(self.optimizer, self.model, optimizer)
        for name, live in (("scheduler", self.scheduler), ("scaler", self.scaler)):
            saved = state[name]
            if (saved is None) != (live is None):
                has = "has none" if live is None else "has one"
                raise Invalid(
                    f"the checkpoint and the job differ: the job {has} ({name}), the checkpoint does not agree"
                )
            if live is not None:
                live.load_state_dict(saved)
        if self.residuals is not None:
            self.residuals.apply(state.get("residuals"))
        own = state["randomness"]
        if isinstance(own, list):  # of a group, and this is one rank alone
            own = own[0]
        is_new = self.ranks is not None and self.ranks.rank >= saved_by
        if own is not None and not is_new:  # a new rank keeps the generators that it was seeded with
            apply_randomness(own)

    @property
    def holders_of(self) -> HoldersOf | None:
        """The ranks that hold a tensor of the captured state, by its key; None: all of them."""
        return self.division.holders if self.division is not None else None

    def box(self, key: str) -> Box | None:
        """The part of a tensor that this rank holds, by its key in the captured state; None: all of it.

        An optimizer that has taken no step has no state yet: it will be sharded as the parameters are.
        """
        if self._boxes is None:
            self._boxes = boxes_of({"model": model_state(self.model)})
        here = self.division.key(key) if self.division is not None else key
        if here is None:
            return NOTHING
        segment = segment_of(here)
        return self._boxes.get(f"model/{segment}") if segment is not None else None


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside DDP, DataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers under the user's own names."""
    return {_clean(name): value for name, value in unwrapped(model).state_dict().items()}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that have gradients, under the user's own names. Tied ones appear once."""
    return {_clean(name): p for name, p in unwrapped(model).named_parameters() if p.requires_grad}


def finite_paths(model: nn.Module) -> list[str]:
    """Keys of what must be finite in a captured state: parameters and the states of the optimizers.

    Not buffers: a mask of -inf is legitimate.
    """
    names = (_clean(name) for name, _ in unwrapped(model).named_parameters(remove_duplicate=False))
    return ["optimizer/state", "outer", *(f"model/{name.replace('~', '~0').replace('/', '~1')}" for name in names)]


def apply_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy parameters and buffers into the model.

    Raises:
        Invalid: names, shapes or dtypes differ.
    """
    live = unwrapped(model)
    names = {_clean(name): name for name in live.state_dict()}
    _check_names("model", names, state)
    current = live.state_dict()
    for clean, name in names.items():
        _check_alike(f"model/{clean}", current[name], state[clean])
    live.load_state_dict({names[clean]: _sharded(current[names[clean]], value) for clean, value in state.items()})


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """State and groups by parameter *name*: positions swap when a model is written in another order."""
    names = _parameter_names(optimizer, model)
    return {
        "kind": type(optimizer).__name__,
        "state": {names[id(p)]: dict(values) for p, values in optimizer.state.items()},
        "groups": [
            {**{k: v for k, v in group.items() if k != "params"}, "params": [names[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }


def apply_optimizer(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Put moments and groups back by name, each tensor in its saved dtype.

    Not `optimizer.load_state_dict`, which casts moments to the parameter's dtype and matches by position.

    Raises:
        Invalid: another kind of optimizer, or other parameters in a group.
    """
    if state["kind"] != type(optimizer).__name__:
        raise Invalid(f"the checkpoint holds {state['kind']}, the job builds {type(optimizer).__name__}")
    names = _parameter_names(optimizer, model)
    if len(state["groups"]) != len(optimizer.param_groups):
        raise Invalid(
            f"the checkpoint has {len(state['groups'])} parameter groups, the job {len(optimizer.param_groups)}"
        )
    groups_by_parameter: dict[str, dict[str, Any]] = {}
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, state["groups"], strict=True)):
        live_names = [names[id(p)] for p in group["params"]]
        _check_names(f"optimizer group {number}", live_names, saved["params"])
        group.update({k: v for k, v in saved.items() if k != "params"})
        groups_by_parameter.update(dict.fromkeys(live_names, group))
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    optimizer.state.clear()
    for name, values in state["state"].items():
        parameter, group = parameters[name], groups_by_parameter[name]
        optimizer.state[parameter] = {k: _placed(v, parameter, group) for k, v in values.items()}


def _parameter_names(optimizer: Optimizer, model: nn.Module) -> dict[int, str]:
    names = {id(p): _clean(name) for name, p in unwrapped(model).named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise Invalid(
                    f"parameter {place} of optimizer group {number}, shape {tuple(parameter.shape)}, "
                    "is not a parameter of the model",
                    hint="register every trained parameter in the module that model() returns",
                )
    return names


def _placed(value: Any, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    """A state tensor on the device and in the memory format that the optimizer expects, bits unchanged."""
    if isinstance(value, list):
        return [_placed(item, parameter, group) for item in value]
    if not isinstance(value, Tensor):
        return value
    value = placed_like(parameter, value) if value.dim() == parameter.dim() else value
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    on_device = value.dim() > 0 or group.get("fused") or group.get("capturable")
    return value.to(parameter.device if on_device else value.device, copy=True)  # the state is not ours to step


def _check_names(what: str, live: Iterable[str], saved: Iterable[str]) -> None:
    missing, unexpected = sorted(set(live) - set(saved)), sorted(set(saved) - set(live))
    if missing or unexpected:
        raise Invalid(
            f"{what}: the checkpoint lacks {_few(missing)} and has the unknown {_few(unexpected)}",
            hint="resume with the code that wrote the checkpoint, or start a new run",
        )


def _check_alike(name: str, live: Any, saved: Any) -> None:
    if not (isinstance(live, Tensor) and isinstance(saved, Tensor)):
        return
    saved = placed_like(live, saved)
    if (live.shape, live.dtype) != (saved.shape, saved.dtype):
        raise Invalid(
            f"{name}: the checkpoint has {saved.dtype} {tuple(saved.shape)}, "
            f"the model {live.dtype} {tuple(live.shape)}"
        )


def _sharded(live: Any, value: Any) -> Any:
    return placed_like(live, value) if isinstance(live, Tensor) and isinstance(value, Tensor) else value


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


def _clean(name: str) -> str:
    return name.replace(_COMPILED, "")
