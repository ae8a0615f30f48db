"""Loops that retoma did not launch, as the documents show them: they save, are killed, and go on to the bit."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.bits import bits, tensor_bytes
from tests.support.gang import gang
from tests.support.launched import wait_until_gone
from training.checkpoint.history import read_lineage
from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.restore import RestoredState, restore_newest
from training.checkpoint.store import LocalStore

pytestmark = pytest.mark.xdist_group("ranks")
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs/examples/fsdp2_loop.py"


def train(folder: str, steps: int) -> dict[str, bytes]:
    """The example in this process. Returns every tensor of the state, whole."""
    training = runpy.run_path(str(EXAMPLE))["train"](folder, steps, 2)
    model: Any
    optimizer: Any
    model, optimizer = get_state_dict(training.model, training.optimizer)
    found = dict(model)
    for name, values in optimizer["state"].items():
        found |= {f"{name}.{key}": value for key, value in values.items()}
    return {
        key: tensor_bytes(value.full_tensor() if isinstance(value, DTensor) else value)
        for key, value in found.items()
    }


def train_straight_and_cut(exchange: Exchange, folder: str) -> dict[str, bytes]:
    straight = train(f"{folder}/straight", 6)
    train(f"{folder}/cut", 3)
    assert train(f"{folder}/cut", 6) == straight
    return straight


def newest(folder: Path) -> RestoredState:
    found = restore_newest(LocalStore(folder), "default")
    assert found is not None
    return found


def test_the_example_goes_on_where_it_was(tmp_path: Path) -> None:
    straight, _ = gang(2, train_straight_and_cut, str(tmp_path))
    saved = read_lineage(LocalStore(tmp_path / "cut")).chain
    assert [(c.ref.token, c.manifest.kind, c.manifest.position.step) for c in saved] == [
        (1, "base", 2),
        (1, "delta", 3),
        (2, "delta", 4),
        (2, "delta", 6),
    ]
    whole = newest(tmp_path / "cut")["training"]
    assert {name: tensor_bytes(value) for name, value in whole["model"].items()}.items() <= straight.items()


def resume(exchange: Exchange, folder: str) -> dict[str, bytes]:
    """At the end of the training there is no step left to do."""
    return train(f"{folder}/cut", 6)


@pytest.mark.soak
def test_another_number_of_ranks_resumes_the_example_to_the_bit(tmp_path: Path) -> None:
    straight, _ = gang(2, train_straight_and_cut, str(tmp_path))
    assert gang(3, resume, str(tmp_path)) == [straight] * 3


class Torchrun:
    """The example under torchrun, in processes of its own."""

    def __init__(self, folder: Path, ranks: int, steps: int) -> None:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        self.process = subprocess.Popen(
            [*launch, str(EXAMPLE), str(folder), "--steps", str(steps), "--every", "5"],
            cwd=folder.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []

    def until(self, words: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if words in line:
                return
        raise AssertionError("".join(self.lines))

    def kill_a_rank(self) -> None:
        ranks = [p for p in psutil.Process(self.process.pid).children() if EXAMPLE.name in " ".join(p.cmdline())]
        ranks[-1].kill()

    def end(self) -> int:
        assert self.process.stdout is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        with self.process.stdout as out:
            self.lines += out.readlines()
        code = self.process.wait(120)
        wait_until_gone(children, 30)
        return code


@pytest.mark.soak
def test_the_example_killed_under_torchrun_ends_as_the_one_that_was_not(tmp_path: Path) -> None:
    straight = Torchrun(tmp_path / "straight", 2, 40)
    assert straight.end() == 0, "".join(straight.lines)
    cut = Torchrun(tmp_path / "cut", 2, 40)
    cut.until("rank 1 has saved step 15")
    cut.kill_a_rank()
    assert cut.end() != 0
    saved = newest(tmp_path / "cut").position.step
    assert 15 <= saved < 40
    again = Torchrun(tmp_path / "cut", 2, 40)
    assert again.end() == 0, "".join(again.lines)
    text = "".join(again.lines)
    assert f"rank 0 resumes at step {saved}" in text
    assert f"rank 1 resumes at step {saved}" in text
    assert bits(dict(newest(tmp_path / "cut"))) == bits(dict(newest(tmp_path / "straight")))
    more = Torchrun(tmp_path / "cut", 3, 45)
    assert more.end() == 0, "".join(more.lines)
    assert "rank 2 resumes at step 40" in "".join(more.lines)
    assert newest(tmp_path / "cut").position.step == 45


def run_snippet(exchange: Exchange, folder: str) -> list[np.ndarray[Any, Any]]:
    """The loop of docs/distributed.md, twice: the second time it finds that all epochs are done."""
    os.chdir(folder)
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    found = re.search(r"^```python test=own-loop\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert found is not None
    weights = []
    for epochs in (3, 0):
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        fully_shard(model)
        left = [epochs]

        def train_epoch(model: nn.Module, epoch: int, left: list[int] = left) -> None:
            left[0] -= 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(epoch)

        exec(compile(found[1], "distributed.md", "exec"), {"model": model, "train_epoch": train_epoch})  # noqa: S102
        assert left[0] == 0, "no epoch more or less than were left"
        weight: Any = model.weight
        weights.append(weight.full_tensor().detach().numpy())
    return weights


@pytest.mark.soak
def test_the_loop_of_the_document_goes_on_where_it_was(tmp_path: Path) -> None:
    for first, second in gang(2, run_snippet, str(tmp_path)):
        assert np.array_equal(first, second)
