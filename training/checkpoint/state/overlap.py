"""Tensors that only an optimizer's step changes: their copy may go on beside the next forward and backward pass.

The snapshot that overlaps computation until the weights are updated is that of CheckFreq (Mohan et al., FAST 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, SparseAdam
from torch.utils.hooks import RemovableHandle

SMALL_BYTES = 16 * 1024  # copied at once: not worth a promise
CHANGE_ROWS_ONLY = (SparseAdam,)  # of a tensor, those that its sparse gradient names


@dataclass(frozen=True)
class Promised:
    """A tensor that is changed by the steps of one optimizer only; `owner` None: by none, as a frozen one."""

    tensor: Tensor
    owner: Optimizer | None
    parameter: Tensor


class Overlap:
    """Models and optimizers whose tensors change in `Optimizer.step` only.

    Args:
        before_step: called before each step of each of the optimizers, with the optimizer, and whether the step
            uses the gradients that are there: with a closure it makes others.
    """

    def __init__(self, before_step: Callable[[Optimizer, bool], None]) -> None:
        self._before_step = before_step
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._hooks: list[RemovableHandle] = []

    def add(self, model: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        """Take the promise for the parameters of `model`, trained or frozen, and the state of `optimizers`."""
        self._models.append(model)
        for optimizer in optimizers:
            self._optimizers.append(optimizer)
            self._hooks.append(optimizer.register_step_pre_hook(self._hook))

    def promised(self) -> dict[int, Promised]:
        """The tensors that are worth it, by the address of their first element."""
        return {
            promised.tensor.data_ptr(): promised
            for promised in self._all()
            if promised.tensor.nbytes >= SMALL_BYTES and not promised.tensor.is_inference()  # those have no version
        }

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._models, self._optimizers = [], [], []

    def _all(self) -> Iterator[Promised]:
        for model in self._models:
            for parameter in model.parameters():
                yield Promised(parameter, None, parameter)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield Promised(parameter, optimizer, parameter)
                    for value in optimizer.state.get(parameter, {}).values():
                        if isinstance(value, Tensor):
                            yield Promised(value, optimizer, parameter)

    def _hook(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before_step(optimizer, all(value is None for value in (*args[1:], *kwargs.values())))


def changing_rows(promised: Promised) -> Tensor | None:
    """The rows of a tensor that the next step of its owner changes; None: any of them."""
    gradient = promised.parameter.grad
    if type(promised.owner) not in CHANGE_ROWS_ONLY or promised.tensor.shape[:1] != promised.parameter.shape[:1]:
        return None
    if gradient is None:
        return torch.empty(0, dtype=torch.int64)
    return gradient._indices()[0] if gradient.is_sparse and gradient.sparse_dim() == 1 else None
