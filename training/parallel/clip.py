"""Gradients clipped by their norm, whatever of them is sharded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from training.checkpoint.state.parts import is_sharded


def clip_gradients(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Scale the gradients so that the norm of all of them together is at most `most`.

    torch's own function takes sharded and whole gradients, but not both at once.
    """
    live = [parameter for parameter in parameters if parameter.grad is not None]
    sharded = [parameter for parameter in live if is_sharded(parameter)]
    if not sharded:
        torch.nn.utils.clip_grad_norm_(live, most)
        return
    whole = [parameter for parameter in live if not is_sharded(parameter)]
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in sharded:
        groups.setdefault(cast("Any", parameter).device_mesh, []).append(parameter)
    norms = [_norm(group) for group in (whole, *groups.values()) if group]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in (whole, *groups.values()):
        torch.nn.utils.clip_grads_with_norm_(group, most, total)


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return cast("Any", norm).full_tensor() if is_sharded(norm) else norm
