"""A job whose process is killed right after an optimizer step, once or every time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from torch import nn
from torch.optim import Optimizer

from training.job import Params
from training.jobs.mnist_cnn import CnnParams, MnistCnn


class MortalParams(CnnParams):
    """As mnist_cnn has them."""

    folder: str = Field(description="of the digits")
    die_at_step: int = Field(ge=1, description="of the whole run")
    died: str = Field("", description="a file that is made when it dies; it does not die twice. Empty: it does")


class MortalDigits(MnistCnn):
    """mnist_cnn, until it dies."""

    Params: ClassVar[type[Params]] = MortalParams
    params: MortalParams

    def __init__(self, params: MortalParams, data: Path | None) -> None:
        del data
        super().__init__(params, Path(params.folder))

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW, which counts its steps over all attempts."""
        optimizer = super().optimizer(model)
        optimizer.register_step_post_hook(lambda *_: self._die_if_due(optimizer))
        return optimizer

    def _die_if_due(self, optimizer: Optimizer) -> None:
        step = next(iter(optimizer.state.values()))["step"]
        if int(step) != self.params.die_at_step:
            return
        if self.params.died:
            died = Path(self.params.died)
            if died.exists():
                return
            died.touch()
        time.sleep(1.0)  # the save before is committed, and heard of
        os.kill(os.getpid(), signal.SIGKILL)
