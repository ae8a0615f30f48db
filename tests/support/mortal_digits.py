"""A job that comes to harm at an optimizer step, once or every time: its process is killed, or its loss is NaN."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from training.job import Params
from training.jobs.mnist_cnn import CnnParams, MnistCnn


class MortalParams(CnnParams):
    """As mnist_cnn has them."""

    folder: str = Field(description="of the digits")
    harm: Literal["kill", "nan"] = "kill"
    harm_at_step: int = Field(ge=1, description="of the whole run, as the optimizer counts")
    harmed: str = Field("", description="a file that is made then; no harm comes twice. Empty: it does")


class MortalDigits(MnistCnn):
    """mnist_cnn, until it comes to harm."""

    Params: ClassVar[type[Params]] = MortalParams
    params: MortalParams

    def __init__(self, params: MortalParams, data: Path | None) -> None:
        del data
        super().__init__(params, Path(params.folder))

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW, which counts its steps over all attempts."""
        self._optimizer = super().optimizer(model)
        if self.params.harm == "kill":
            self._optimizer.register_step_post_hook(lambda *_: self._die_if_due())
        return self._optimizer

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy, or NaN."""
        loss = super().loss(model, batch)
        return loss * float("nan") if self.params.harm == "nan" and self._is_due(done=-1) else loss

    def _die_if_due(self) -> None:
        if self._is_due():
            time.sleep(1.0)  # the save before is committed, and heard of
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_due(self, done: int = 0) -> bool:
        state = next(iter(self._optimizer.state.values()), {"step": 0})
        if int(state["step"]) != self.params.harm_at_step + done:
            return False
        harmed = Path(self.params.harmed) if self.params.harmed else None
        if harmed is not None and harmed.exists():
            return False
        if harmed is not None:
            harmed.touch()
        return True
