"""Runs a small training in a process of its own that dies where it is told to."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from training.checkpoint.manifest import Position
from training.config import JobConfig, parse_config
from training.errors import RetomaError
from training.ports import Message

KILLED = 9
_PRELOAD = ["training.session", "torch._dynamo", "training.jobs.mnist_cnn", "training.jobs.char_gpt"]


def forkserver() -> Any:
    """Processes that have torch imported and nothing else done: new, but quick to start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def mnist_config(**changes: Any) -> JobConfig:
    """10 micro-batches an epoch, 4 to a step: windows of 24, 24 and 12 samples."""
    values = {
        "job": "training.jobs.mnist_cnn:MnistCnn",
        "epochs": 3,
        "batch_size": 6,
        "accumulate_batches": 4,
        "clip_grad_norm": 1.0,
        "params": {"channels": 2, "hidden": 8},
        "checkpoint": {"every_steps": 1, "deltas_per_base": 3},
    }
    return parse_config({**values, **changes})


def gpt_config(**changes: Any) -> JobConfig:
    """4 micro-batches an epoch, 3 to a step: windows of 12 and 2 samples."""
    sizes = {"n_layer": 1, "n_head": 2, "d_model": 16, "context": 16, "dropout": 0.2}
    values = {
        "job": "training.jobs.char_gpt:CharGpt",
        "epochs": 3,
        "batch_size": 4,
        "accumulate_batches": 3,
        "params": {**sizes, "windows_per_epoch": 14, "hold_out_bytes": 200},
        "checkpoint": {"every_steps": 1, "deltas_per_base": 3},
    }
    return parse_config({**values, **changes})


def write_digits(folder: Path) -> Path:
    """75 random images, 60 of them for training, in the form of data/mnist."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    np.save(folder / "images.npy", rng.integers(0, 256, (75, 28, 28), dtype=np.uint8))
    np.save(folder / "labels.npy", rng.integers(0, 10, 75, dtype=np.uint8))
    return folder


def write_corpus(folder: Path) -> Path:
    """2,000 bytes of text in the form of data/stdlib_text."""
    folder.mkdir(parents=True)
    words = np.random.default_rng(0).choice(["def", "return", "x", "y", "(", ")", ":", "\n"], 1000)
    (folder / "corpus.txt").write_text(" ".join(words)[:2000])
    return folder


class Training:
    """A training in a process of its own."""

    def __init__(self, process: Any, reading: Any, scratch: str) -> None:
        self.process = process
        self._reading = reading
        self._scratch = scratch
        self._expected_exit = KILLED

    def kill(self) -> None:
        """SIGKILL, wherever it is."""
        self._expected_exit = -KILLED
        self.process.kill()

    def answer(self) -> str | None:
        """The final state's digest, the kind of the error, or None if the process died where it was told to."""
        answer = None
        with contextlib.suppress(EOFError):
            answer = self._reading.recv()
        self.process.join(60)
        shutil.rmtree(self._scratch)
        assert self.process.exitcode == (0 if answer else self._expected_exit), f"exit code {self.process.exitcode}"
        return answer


def start_training(config: JobConfig, store: Path | str, data: Path, **cut: int | None) -> Training:
    """Start `train_range` in a new process. For the cuts see `train_until`."""
    context = forkserver()
    reading, writing = context.Pipe(duplex=False)
    scratch = tempfile.mkdtemp(prefix="cut-")  # what a killed process leaves; short, since sockets lie in it
    process = context.Process(target=_train, args=(config, store, data, cut, scratch, _aws(), writing))
    process.start()
    writing.close()
    return Training(process, reading, scratch)


def train_until(config: JobConfig, store: Path | str, data: Path, **cut: int | None) -> str | None:
    """Train in a new process, and wait for its end.

    Args:
        config: what to train.
        store: folder or URL of the run.
        data: data set.
        cut: `stop=epoch` ends the range there; the process ends without a word at `die_at_step=n` (right after
            that optimizer step, with whatever save is in flight), `die_saved_at=n` (when the checkpoint of that
            step is committed) or `die_at_batch=n` (when it is handed its n-th micro-batch).

    Returns:
        See `Training.answer`.
    """
    return start_training(config, store, data, **cut).answer()


def _aws() -> dict[str, str]:
    """The fork server has kept the environment of its start; a test's S3 server is not in it."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def _train(
    config: JobConfig,
    store: Path | str,
    data: Path,
    cut: dict[str, int | None],
    scratch: str,
    environment: dict[str, str],
    answer: Any,
) -> None:
    from training.session import train_range
    from training.trainer import Trainer

    os.environ.update(environment)
    tempfile.tempdir = scratch
    steps, batches = 0, 0

    def report(message: Message) -> None:
        nonlocal steps
        if message.kind == "restored":
            steps = message.position.step
        if message.kind == "saved" and message.position.step == cut.get("die_saved_at"):
            os._exit(KILLED)

    class Mortal(Trainer):
        """A trainer that dies where it is told to."""

        def batches(self, position: Position) -> Iterator[Any]:
            nonlocal batches
            for batch in super().batches(position):
                batches += 1
                if batches == cut.get("die_at_batch"):
                    os._exit(KILLED)
                yield batch

        def optimizer_step(self, batches: Iterator[Any], window_samples: int) -> Any:
            nonlocal steps
            loss = super().optimizer_step(batches, window_samples)
            steps += 1
            if steps == cut.get("die_at_step"):
                os._exit(KILLED)
            return loss

    with mock.patch("training.session.Trainer", Mortal):
        try:
            done = train_range(config, str(store), "cut", data_folder=data, stop=cut.get("stop"), report=report)
        except RetomaError as error:
            print(error, file=sys.stderr)  # noqa: T201 - shown when the test fails
            answer.send(error.kind)
        else:
            answer.send(done.state_digest)
