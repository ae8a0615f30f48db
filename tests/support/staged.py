"""A tiny job whose folder says where it is slow. What is slow says that it has begun.

slow-step, slow-evaluation, slow-upload, slow-restore     hold seconds; absent: fast
in-step, in-evaluation, in-upload, in-restore             appear when it has begun
deaf                                                      while it exists, what ends the slowness is lost, once
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import Dataset, TensorDataset

from training.checkpoint.store import LocalStore
from training.config import JobConfig, parse_config
from training.job import Job, Params

STEPS_PER_EPOCH = 8


def staged_config(folder: Path, **changes: Any) -> JobConfig:
    """Eight steps an epoch, a save after each second one."""
    values = {
        "job": "tests.support.staged:Staged",
        "epochs": 2,
        "batch_size": 4,
        "log_every_steps": 1,
        "params": {"folder": str(folder)},
        "checkpoint": {"every_steps": 2},
    }
    return parse_config({**values, **changes})


class StagedParams(Params):
    folder: str


class Staged(Job[StagedParams]):
    """A linear model on random numbers."""

    Params: ClassVar[type[Params]] = StagedParams

    def model(self) -> nn.Module:
        self._slow_down("put", "upload", "packs/")
        self._slow_down("get", "restore", "manifests/")
        return nn.Sequential(nn.Dropout(0.2), nn.Linear(16, 4))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters())

    def train_data(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4 * STEPS_PER_EPOCH, 16, generator=generator)
        return TensorDataset(inputs, inputs[:, :4].contiguous())

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._stage("step")
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        self._stage("evaluation")
        return {"one": 1.0}

    def _stage(self, name: str) -> None:
        folder = Path(self.params.folder)
        slow = folder / f"slow-{name}"
        if slow.exists():
            (folder / f"in-{name}").touch()
            if (folder / "deaf").exists():
                with suppress(BaseException):
                    time.sleep(float(slow.read_text()))
                (folder / "deaf").unlink()
            time.sleep(float(slow.read_text()))

    def _slow_down(self, method: str, name: str, prefix: str) -> None:
        """In a training process, not in a test that goes on with its run."""
        if getattr(sys.modules["__main__"].__spec__, "name", "") != "training.process":
            return
        inner: Callable[..., Any] = getattr(LocalStore, method)

        def slow(store: LocalStore, key: str, *arguments: Any) -> Any:
            if key.startswith(prefix):
                self._stage(name)
            return inner(store, key, *arguments)

        setattr(LocalStore, method, slow)
