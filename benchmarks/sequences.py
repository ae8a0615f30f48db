"""Real trainings whose states the engines save: four kinds of change from one save to the next.

| sequence | training | what changes in a step |
|---|---|---|
| dense | char_gpt from scratch, AdamW 1e-3 | every number |
| finetune | lora_minilm with `full`, AdamW 2e-5 | every number, the weights by little |
| lora | lora_minilm | adapters and their moments, 1 % of the state |
| embedding | next byte from 8 hashed contexts, a million rows, SparseAdam | the rows that were looked up |
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch uses
from torch.optim import Optimizer

from training.checkpoint.manifest import Position
from training.config import JobConfig, load_config
from training.trainer import Trainer

HOME = Path(__file__).parents[1]
State = dict[str, Tensor]


class Training(Protocol):
    """A training that goes on for as long as it is asked to."""

    def step(self) -> None:
        """One optimizer step."""

    @property
    def model(self) -> nn.Module:
        """What is trained."""

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """That train it."""

    def state(self) -> State:
        """The live tensors, by path: `optimizer/state/token.weight/exp_avg`. Nothing is copied."""


@dataclass(frozen=True)
class Sequence:
    """A training, and how long it runs before its states are typical.

    Attributes:
        skip: paths that contain this are left out; keeps the states of a smoke run tiny.
    """

    name: str
    about: str
    build: Callable[[Path], Training]
    warm_up_steps: int
    skip: str = "\n"

    def state(self, training: Training) -> State:
        """Each tensor of the live state once, under its first name."""
        found: State = {}
        seen: set[tuple[int, torch.Size]] = set()
        for path, value in training.state().items():
            place = (value.data_ptr(), value.shape)
            if place not in seen and self.skip not in path:
                seen.add(place)
                found[path] = value
        return found


class JobTraining:
    """One of the project's jobs, stepped by the loop's own trainer."""

    def __init__(self, config: JobConfig, corpus: Path, **group: Any) -> None:
        self.trainer = Trainer(config, corpus)
        for options in self.trainer.optimizer.param_groups:
            options.update(group)
        self.model, self.optimizers = self.trainer.model, (self.trainer.optimizer,)
        self._position = Position()
        self._batches = self.trainer.batches(self._position)

    def step(self) -> None:
        self.trainer.optimizer_step(self._batches, self.trainer.schedule.window_at(self._position))
        before, self._position = self._position, self.trainer.schedule.after(self._position)
        if self._position.epoch != before.epoch:
            self._batches = self.trainer.batches(self._position)

    def state(self) -> State:
        return flatten(self.trainer.state.capture())


class HashedContexts:
    """Predicts a byte from the 1, 2, ... 8 bytes before it, each hashed to one of `rows` vectors.

    Rows are looked up as often as text repeats itself: few of them all the time, most of them seldom.
    """

    def __init__(self, corpus: Path, rows: int, batch: int) -> None:
        torch.manual_seed(0)
        self._text = torch.from_numpy(np.fromfile(corpus / "corpus.txt", dtype=np.uint8)).long()
        self._rows, self._batch = rows, batch
        self.table, self.head = nn.EmbeddingBag(rows, 32, mode="sum", sparse=True), nn.Linear(32, 256)
        nn.init.normal_(self.table.weight, std=0.05)
        self._sparse = torch.optim.SparseAdam(list(self.table.parameters()), lr=1e-3)
        self._dense = torch.optim.AdamW(self.head.parameters(), lr=1e-3)
        self.model = nn.ModuleList([self.table, self.head])
        self.optimizers = self._sparse, self._dense

    def step(self) -> None:
        ends = torch.randint(8, len(self._text), (self._batch,))
        keys, hashed = [], torch.zeros(self._batch, dtype=torch.int64)
        for length in range(1, 9):
            hashed = (hashed * 1_000_003 + self._text[ends - length] + length) % (2**31 - 1)
            keys.append(hashed % self._rows)
        loss = F.cross_entropy(self.head(self.table(torch.stack(keys, 1))), self._text[ends])
        self._sparse.zero_grad()
        self._dense.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._sparse.step()  # type: ignore[no-untyped-call]
        self._dense.step()

    def state(self) -> State:
        weight = self.table.weight
        moments = {f"optimizer/table/{name}": value for name, value in self._sparse.state[weight].items()}
        small = {"model/head": self.head.state_dict(), "optimizer/head": self._dense.state_dict()["state"]}
        return {"model/table": weight.data, **flatten(moments), **flatten(small)}


def flatten(tree: Any, path: str = "") -> State:
    """All tensors of a nested state by their paths. Plain scalars are left out: not every peer can hold them."""
    if isinstance(tree, Tensor):
        value = tree.detach()
        return {path: value.view(torch.int32) if value.dtype == torch.uint32 else value}  # nor every dtype
    if isinstance(tree, dict):
        pairs = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, list | tuple):
        pairs = [(str(key), value) for key, value in enumerate(tree)]
    else:
        return {}
    found: State = {}
    for key, value in pairs:
        found.update(flatten(value, f"{path}/{key}" if path else key))
    return found


def nested(state: State) -> dict[str, Any]:
    """The same tensors as a tree of dicts, as a training has them."""
    tree: dict[str, Any] = {}
    for path, value in state.items():
        *parents, last = path.split("/")
        place = tree
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def make_corpus(folder: Path) -> Path:
    """data/stdlib_text without DVC: the stage's own script, in a folder of its own."""
    script = shutil.copy(HOME / "data/make_stdlib_text.py", folder)
    subprocess.run([sys.executable, script, "corpus"], check=True)
    return folder / "stdlib_text"


def sequences(smoke: bool = False) -> list[Sequence]:
    """The four, or four tiny ones of the same kind."""

    def gpt(*sizes: str) -> Callable[[Path], Training]:
        changes = ["epochs=1000", "threads=1", "params.learning_rate=0.001", "params.warmup_fraction=0", *sizes]
        config = load_config(HOME / "training/jobs/char_gpt.yaml", changes)
        return lambda corpus: JobTraining(config, corpus, betas=(0.9, 0.999))

    def bert(*sizes: str) -> Callable[[Path], Training]:
        config = load_config(HOME / "training/jobs/lora_minilm.yaml", ["epochs=1000", "threads=1", *sizes])
        return lambda corpus: JobTraining(config, corpus)

    if smoke:
        tiny = ("params.layers=1", "params.tokens=8", "batch_size=2")
        dense = gpt("params.n_layer=1", "params.d_model=64", "params.context=16", "batch_size=4")
        return [
            Sequence("dense", "tiny", dense, 2),
            Sequence("finetune", "tiny", bert("params.full=true", *tiny), 1, skip="word"),
            Sequence("lora", "tiny", bert(*tiny), 1, skip="word"),
            Sequence("embedding", "tiny", lambda corpus: HashedContexts(corpus, rows=4096, batch=4), 2),
        ]
    sizes = ("params.tokens=16", "batch_size=8")
    return [
        Sequence(
            "dense",
            "char_gpt, 5 layers of 256, from scratch, 8 windows of 64 a step, AdamW 1e-3 with torch's betas. Bytes "
            "depend on how far training is: 74 % after 400 steps, 73 % after 1,000; and on the second beta: 76 % "
            "after 200 steps with the job's own 0.99",
            gpt("params.n_layer=5", "params.d_model=256", "params.context=64", "batch_size=8"),
            1000,
        ),
        Sequence("finetune", "lora_minilm, full, 8 pairs a step, AdamW 2e-5", bert("params.full=true", *sizes), 40),
        Sequence(
            "lora",
            "lora_minilm, rank 8, the whole state: 1 % of it adapters and their moments, the rest frozen",
            bert(*sizes),
            40,
        ),
        Sequence(
            "embedding",
            "next byte from 8 hashed contexts, 1,000,000 rows of 32, SparseAdam 1e-3, 2,200 rows a step",
            lambda corpus: HashedContexts(corpus, rows=1_000_000, batch=400),
            300,
        ),
    ]


def sequence_named(name: str, smoke: bool = False) -> Sequence:
    """One of them: a process is told the name, since what builds it does not travel."""
    return next(sequence for sequence in sequences(smoke) if sequence.name == name)
