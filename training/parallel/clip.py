"""Gradients clipped by their norm, whatever of them is sharded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from training.checkpoint.state.parts import is_sharded

if TYPE_CHECKING:
    from training.parallel.pipeline import Pipeline


def clip_gradients(parameters: Iterable[nn.Parameter], most: float, pipeline: Pipeline | None = None) -> None:
    """Scale the gradients so that the norm of all of them together, of all stages of a pipeline, is at most `most`.

    torch's own function takes sharded and whole gradients, but not both at once.
    """
    live = [parameter for parameter in parameters if parameter.grad is not None]
    if pipeline is None and not any(is_sharded(parameter) for parameter in live):
        torch.nn.utils.clip_grad_norm_(live, most)
        return
    counted = live if pipeline is None else [parameter for parameter in live if pipeline.counts(parameter)]
    norms = [_norm(group) for group in _by_mesh(counted)] or [torch.zeros((), device=live[0].device)]
    total = torch.linalg.vector_norm(torch.stack(norms))
    if pipeline is not None:
        total = pipeline.total_norm(total)
    for group in _by_mesh(live):
        torch.nn.utils.clip_grads_with_norm_(group, most, total)


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Those that are whole first."""
    groups: dict[object, list[nn.Parameter]] = {None: []}
    for parameter in parameters:
        groups.setdefault(cast("Any", parameter).device_mesh if is_sharded(parameter) else None, []).append(
            parameter
        )
    return [group for group in groups.values() if group]


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    return cast("Any", norm).full_tensor() if is_sharded(norm) else norm
