"""The small GPT with a buffer in each block that every forward pass of the training changes, and that counts."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from training.jobs.char_gpt import CharGpt, Gpt


class CountingGpt(CharGpt):
    """See the module."""

    def model(self) -> nn.Module:
        model = super().model()
        for block in cast("Gpt", model).blocks:
            block.register_buffer("mean", torch.zeros(()))
            block.register_forward_hook(_count)
        return model


def _count(block: nn.Module, _: Any, output: Tensor) -> Tensor:
    mean = cast("Tensor", block.mean)
    if block.training:
        mean.mul_(0.5).add_(output.detach().mean(), alpha=0.5)
    return output * (1 + mean.clone())
