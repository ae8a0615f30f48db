"""Handwritten digits: a small convolutional network on the 5,000 MNIST digits of data/mnist.

It has what makes resuming hard: batch normalisation (buffers that change), dropout and augmentation (random
numbers at each step), and a one-cycle schedule (learning rate and momentum that change).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch uses
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset

from training.errors import Invalid
from training.job import Job, Params

HOLD_OUT_EVERY = 5  # each fifth digit is never trained on: 1,000 of 5,000, 100 of each class
EVALUATE_BATCH = 500


class CnnParams(Params):
    """Every choice that is not the loop's."""

    channels: int = Field(16, ge=1, description="feature maps of the first convolution; the second has twice")
    hidden: int = Field(64, ge=1, description="units of the hidden layer")
    dropout: float = Field(0.1, ge=0, lt=1, description="before each linear layer")
    shift_pixels: int = Field(2, ge=0, le=8, description="augmentation: largest random shift")
    learning_rate: float = Field(8e-3, gt=0, description="peak of the one-cycle schedule")
    weight_decay: float = Field(0.01, ge=0, description="of AdamW")


class MnistCnn(Job[CnnParams]):
    """Metrics: `accuracy` (0 to 1) and `val_loss` (nats) on 1,000 digits that were held out."""

    Params: ClassVar[type[Params]] = CnnParams

    def model(self) -> nn.Module:
        """Two convolutions, two linear layers; about 106,000 parameters."""
        p = self.params
        return nn.Sequential(
            nn.Conv2d(1, p.channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(p.channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(p.channels, 2 * p.channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(2 * p.channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(p.dropout),
            nn.Linear(2 * p.channels * 7 * 7, p.hidden),
            nn.ReLU(),
            nn.Dropout(p.dropout),
            nn.Linear(p.hidden, 10),
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW over all parameters."""
        return AdamW(model.parameters(), lr=self.params.learning_rate, weight_decay=self.params.weight_decay)

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> OneCycleLR:
        """Up for 30 % of the steps, then down to almost nothing; beta1 the other way round."""
        return OneCycleLR(optimizer, max_lr=self.params.learning_rate, total_steps=total_steps)

    def train_data(self) -> Dataset[Any]:
        """4,000 digits, each shifted at random."""
        images, labels = self._digits
        keep = torch.arange(len(labels)) % HOLD_OUT_EVERY != 0
        return ShiftedDigits(images[keep], labels[keep], self.params.shift_pixels)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Accuracy and loss on the digits held out, as they are."""
        images, labels = (part[::HOLD_OUT_EVERY] for part in self._digits)
        device = next(model.parameters()).device
        correct, loss = 0, 0.0
        for start in range(0, len(labels), EVALUATE_BATCH):
            target = labels[start : start + EVALUATE_BATCH].to(device)
            logits = model(images[start : start + EVALUATE_BATCH].to(device)).float()
            correct += int((logits.argmax(1) == target).sum())
            loss += float(F.cross_entropy(logits, target, reduction="sum"))
        return {"accuracy": correct / len(labels), "val_loss": loss / len(labels)}

    @cached_property
    def _digits(self) -> tuple[Tensor, Tensor]:
        """All images, float32 in 0..1 as (n, 1, 28, 28), and their labels, int64."""
        if self.data is None:
            raise Invalid("mnist_cnn needs digits", hint="set data: data/mnist in the job's YAML file")
        arrays = []
        for name, shape in (("images.npy", (28, 28)), ("labels.npy", ())):
            file = self.data / name
            if not file.is_file():
                raise Invalid(f"mnist_cnn: no file {file}", hint="make it: dvc repro data/dvc.yaml:mnist")
            array = np.load(file, allow_pickle=False)
            if array.dtype != np.uint8 or array.shape[1:] != shape:
                raise Invalid(f"{file} holds {array.dtype} {array.shape}, not uint8 (n, {shape})")
            arrays.append(torch.from_numpy(array))
        images, labels = arrays
        return images.unsqueeze(1).float() / 255, labels.long()


class ShiftedDigits(Dataset[tuple[Tensor, Tensor]]):
    """Digits moved by up to `shift` pixels. The loop seeds `torch` for each item, so a shift can be repeated."""

    def __init__(self, images: Tensor, labels: Tensor, shift: int) -> None:
        self.images = F.pad(images, (shift, shift, shift, shift))
        self.labels = labels
        self.shift = shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        top, left = torch.randint(2 * self.shift + 1, (2,)).tolist()
        return self.images[index, :, top : top + 28, left : left + 28], self.labels[index]
