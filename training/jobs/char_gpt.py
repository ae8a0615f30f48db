"""A small GPT that writes Python: bytes of data/stdlib_text, one token each.

Pre-norm decoder as in GPT-2, with the output layer tied to the embedding (two names, one tensor), two weight-decay
groups, and warm-up before a cosine schedule. Any UTF-8 corpus.txt will do; a token is a byte, 256 in all.
"""

from __future__ import annotations

import math
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch uses
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from training.errors import Invalid
from training.job import Job, Params

VOCABULARY = 256
EVALUATE_BATCH = 64


class GptParams(Params):
    """Every choice that is not the loop's."""

    n_layer: int = Field(3, ge=1, description="transformer blocks")
    n_head: int = Field(4, ge=1, description="attention heads of a block")
    d_model: int = Field(96, ge=1, description="width; a multiple of n_head")
    context: int = Field(64, ge=2, description="bytes that the model sees at once")
    dropout: float = Field(0.0, ge=0, lt=1, description="on embedding, attention and residual branches")
    windows_per_epoch: int = Field(2560, ge=1, description="random windows of `context` bytes in one epoch")
    hold_out_bytes: int = Field(65536, ge=1, description="tail of the corpus that is never trained on")
    learning_rate: float = Field(4e-3, gt=0, description="peak, reached after the warm-up")
    warmup_fraction: float = Field(0.1, ge=0, lt=1, description="share of all steps that warms up")
    final_fraction: float = Field(0.05, ge=0, le=1, description="learning rate at the end, as a share of the peak")
    weight_decay: float = Field(0.1, ge=0, description="of matrices; gains and biases have none")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.d_model % self.n_head:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_head {self.n_head}")
        return self


class CharGpt(Job[GptParams]):
    """Metrics: `val_loss` (nats a byte) and `bits_per_char` (bits a byte) on the tail of the corpus."""

    Params: ClassVar[type[Params]] = GptParams

    def model(self) -> nn.Module:
        """About 366,000 parameters with the defaults."""
        return Gpt(self.params)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The transformer's blocks."""
        return list(cast("Gpt", model).blocks)

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        """The feed-forward layers are shared: two thirds of the parameters."""
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        plan: dict[str, Any] = {}
        for number in range(len(cast("Gpt", model).blocks)):
            plan |= {f"blocks.{number}.mlp_in": ColwiseParallel(), f"blocks.{number}.mlp_out": RowwiseParallel()}
        return plan

    def sequence_plan(self, model: nn.Module, ranks: int) -> dict[str, Any]:
        """The same, and norms, dropout and residual branches see a part of the bytes; attention sees them all."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            PrepareModuleOutput,
            RowwiseParallel,
            SequenceParallel,
        )

        if self.params.context % ranks:
            raise Invalid(f"context {self.params.context} is no multiple of parallel.tensor, {ranks}")
        all_of_it, part = Replicate(), Shard(1)
        gather = PrepareModuleInput(input_layouts=part, desired_input_layouts=all_of_it, use_local_output=True)
        plan: dict[str, Any] = {
            "blocks": PrepareModuleInput(
                input_layouts=all_of_it, desired_input_layouts=part, use_local_output=True
            ),
            "norm": SequenceParallel(),
            "head": gather,
        }
        for number in range(len(cast("Gpt", model).blocks)):
            block = {
                "attention_norm": SequenceParallel(),
                "qkv": gather,
                "attention_out": PrepareModuleOutput(output_layouts=all_of_it, desired_output_layouts=part),
                "mlp_norm": SequenceParallel(),
                "mlp_in": ColwiseParallel(input_layouts=part),
                "mlp_out": RowwiseParallel(output_layouts=part),
            }
            plan |= {f"blocks.{number}.{name}": style for name, style in block.items()}
        return plan

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW; `parameters()` names the tied weight once."""
        matrices = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [
            {"params": matrices, "weight_decay": self.params.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=self.params.learning_rate, betas=(0.9, 0.99))

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """Linear warm-up, then half a cosine down to `final_fraction`."""
        warmup, final = int(self.params.warmup_fraction * total_steps), self.params.final_fraction

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / (warmup + 1)
            done = (step - warmup) / max(1, total_steps - warmup)
            return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

        return LambdaLR(optimizer, factor)

    def train_data(self) -> Dataset[Any]:
        """Windows at random places of all but the tail."""
        train, _ = self._corpus
        return RandomWindows(train, self.params.context, self.params.windows_per_epoch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy of each next byte; a window carries one byte more than the context."""
        return self.loss_of(model(self.inputs(batch)), batch)

    def stages(self, model: nn.Module, count: int) -> list[nn.Module]:
        """The blocks in equal numbers, as far as they go; the embedding with the first, the head with the last."""
        depth = self.params.n_layer
        if count > depth:
            raise Invalid(
                f"{count} stages for {depth} blocks", hint="set params.n_layer higher, or parallel.pipeline lower"
            )
        cuts = [number * depth // count for number in range(count + 1)]
        return [GptStage(cast("Gpt", model), start, stop) for start, stop in pairwise(cuts)]

    def inputs(self, batch: Any) -> Tensor:
        """All bytes of the windows but the last."""
        inputs: Tensor = batch[:, :-1].long()
        return inputs

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """Cross-entropy with all bytes of the windows but the first."""
        return F.cross_entropy(output.flatten(0, 1), batch[:, 1:].long().flatten())

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Mean over the tail, in windows that do not overlap."""
        _, tail = self._corpus
        device = next(model.parameters()).device
        windows = tail.unfold(0, self.params.context + 1, self.params.context)
        total = 0.0
        for part in torch.split(windows, EVALUATE_BATCH):
            total += float(self.loss(model, part.to(device)).float()) * len(part)
        val_loss = total / len(windows)
        return {"val_loss": val_loss, "bits_per_char": val_loss / math.log(2)}

    @cached_property
    def _corpus(self) -> tuple[Tensor, Tensor]:
        """Bytes to train on, and the tail to evaluate on."""
        if self.data is None:
            raise Invalid("char_gpt needs a corpus", hint="set data: data/stdlib_text in the job's YAML file")
        file = self.data / "corpus.txt"
        if not file.is_file():
            raise Invalid(f"char_gpt: no file {file}", hint="make it: dvc repro data/dvc.yaml:stdlib_text")
        text = torch.from_numpy(np.fromfile(file, dtype=np.uint8))
        cut, least = len(text) - self.params.hold_out_bytes, self.params.context + 1
        if cut < least or self.params.hold_out_bytes < least:
            raise Invalid(
                f"{file} has {len(text)} bytes: too few for hold_out_bytes={self.params.hold_out_bytes} "
                f"and context={self.params.context}",
                hint="make params.context or params.hold_out_bytes smaller, or the corpus longer",
            )
        return text[:cut], text[cut:]


class RandomWindows(Dataset[Tensor]):
    """`count` windows of `context` + 1 bytes. The loop seeds `torch` for each item, so a draw can be repeated."""

    def __init__(self, text: Tensor, context: int, count: int) -> None:
        self.text = text
        self.context = context
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        start = int(torch.randint(len(self.text) - self.context, ()))
        return self.text[start : start + self.context + 1]


class Gpt(nn.Module):
    """Tokens (batch, length) to logits (batch, length, 256)."""

    def __init__(self, p: GptParams) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, p.d_model)
        self.position = nn.Embedding(p.context, p.d_model)
        self.drop = nn.Dropout(p.dropout)
        self.blocks = nn.Sequential(*(Block(p) for _ in range(p.n_layer)))
        self.norm = nn.LayerNorm(p.d_model)
        self.head = nn.Linear(p.d_model, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:  # GPT-2's initialisation: branches add up, so their ends start smaller
                depth = 2 * p.n_layer if name.endswith("out.weight") else 1
                nn.init.normal_(parameter, std=0.02 / math.sqrt(depth))
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte after each byte."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.drop(self.token(tokens) + self.position(places)))
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class GptStage(nn.Module):
    """Blocks `start` to `stop` of a model, with its embedding or its head if they are the first or the last.

    Tokens or hidden states (batch, length, width) to hidden states or logits.
    """

    def __init__(self, model: Gpt, start: int, stop: int) -> None:
        super().__init__()
        self.is_first, self.is_last = start == 0, stop == len(model.blocks)
        if self.is_first:
            self.token, self.position, self.drop = model.token, model.position, model.drop
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in range(start, stop)})
        if self.is_last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        """As `Gpt.forward`, cut at the blocks."""
        if self.is_first:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.drop(self.token(x) + self.position(places))
        for block in self.blocks.values():
            x = block(x)
        if self.is_last:
            x = self.head(self.norm(x))
        return x


class Block(nn.Module):
    """Causal attention, then a feed-forward layer, each on a residual branch."""

    def __init__(self, p: GptParams) -> None:
        super().__init__()
        self.heads, self.dropout = p.n_head, p.dropout
        self.attention_norm = nn.LayerNorm(p.d_model)
        self.qkv = nn.Linear(p.d_model, 3 * p.d_model)
        self.attention_out = nn.Linear(p.d_model, p.d_model)
        self.mlp_norm = nn.LayerNorm(p.d_model)
        self.mlp_in = nn.Linear(p.d_model, 4 * p.d_model)
        self.mlp_out = nn.Linear(4 * p.d_model, p.d_model)
        self.drop = nn.Dropout(p.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape in and out: (batch, length, width)."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))  # batch, length, 3, heads, dim
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.attention_out(seen.transpose(1, 2).flatten(2)))
        result: Tensor = x + self.drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))
        return result
