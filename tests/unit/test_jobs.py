"""The example jobs through nothing but their own interface: a plain loop, no engine, no server.

With their YAML files, measured on the CPU: mnist_cnn ends at an accuracy of 0.974 to 0.982 (seeds 0 to 3), char_gpt
at 2.49 bits a byte, below counted triples of bytes (2.66). The tests here train for a part of that, to be quick,
against floors with a margin.
"""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from tasks.data import ensure_data
from training.config import JobConfig, load_config
from training.errors import Invalid
from training.job import Job, load_job

PROJECT = Path(__file__).parents[2]
MNIST, GPT = "training.jobs.mnist_cnn:MnistCnn", "training.jobs.char_gpt:CharGpt"
TINY_GPT = {"n_layer": 1, "n_head": 2, "d_model": 16, "context": 16, "dropout": 0.1, "windows_per_epoch": 8}


@pytest.fixture(scope="module")
def digits() -> Path:
    return PROJECT / ensure_data(PROJECT, "data/mnist").path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the stage's script in a folder of its own: another Python's corpus must not enter data/dvc.lock."""
    script = shutil.copy(PROJECT / "data/make_stdlib_text.py", tmp_path_factory.mktemp("data"))
    subprocess.run([sys.executable, script, "corpus"], check=True)
    return Path(script).parent / "stdlib_text"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the YAML files; and two test processes share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def configured(name: str) -> JobConfig:
    return load_config(PROJECT / f"training/jobs/{name}.yaml")


def train(job: Job[Any], epochs: int, batch_size: int, clip: float | None = None) -> dict[str, float]:
    torch.manual_seed(0)
    model = job.model()
    data = job.train_data()
    loader = DataLoader(data, batch_size, shuffle=True)
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer, epochs * len(loader))
    for _ in range(epochs):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            job.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
    model.eval()
    return job.evaluate(model)


def test_mnist_cnn_learns_to_read_digits(digits: Path) -> None:
    """Metric: accuracy on 1,000 digits held out. Floor 0.93 after 2 epochs; chance is 0.1."""
    config = configured("mnist_cnn")
    metrics = train(load_job(config.job, config.params, digits), epochs=2, batch_size=config.batch_size)
    assert metrics["accuracy"] >= 0.93
    assert metrics["val_loss"] < 0.25


def test_char_gpt_learns_more_than_which_byte_follows_which(corpus: Path) -> None:
    """Metric: bits a byte on the tail. Floor: counted pairs of bytes (3.54), far below counted bytes (4.55)."""
    config = configured("char_gpt")
    sizes = {"n_layer": 2, "n_head": 2, "d_model": 64, "context": 32, "windows_per_epoch": 14_400}
    job = load_job(config.job, {**config.params, **sizes}, corpus)
    metrics = train(job, epochs=1, batch_size=16, clip=config.clip_grad_norm)
    assert metrics["bits_per_char"] == pytest.approx(metrics["val_loss"] / math.log(2))
    assert metrics["bits_per_char"] < pair_bits(corpus, hold_out=65536) - 0.1


def pair_bits(corpus: Path, hold_out: int) -> float:
    """Bits a byte of the tail, coded with the frequencies of byte pairs in the rest."""
    text = np.fromfile(corpus / "corpus.txt", dtype=np.uint8)
    rest, tail = text[:-hold_out], text[-hold_out:]
    counts = np.full((256, 256), 0.1)
    np.add.at(counts, (rest[:-1], rest[1:]), 1)
    share = counts / counts.sum(1, keepdims=True)
    return float(-np.log2(share[tail[:-1], tail[1:]]).mean())


def test_no_digit_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    # Image k is blank but for k in its first pixel, so a training set without shift tells what it holds.
    images = np.zeros((50, 28, 28), dtype=np.uint8)
    images[:, 0, 0] = np.arange(50)
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "labels.npy", np.zeros(50, dtype=np.uint8))
    data: Any = load_job(MNIST, {"shift_pixels": 0}, tmp_path).train_data()
    seen = {round(float(data[index][0][0, 0, 0]) * 255) for index in range(len(data))}
    assert seen == set(range(50)) - set(range(0, 50, 5))


def test_no_window_reaches_into_the_tail(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_bytes(b"a" * 100 + b"z" * 20)
    job = load_job(GPT, {**TINY_GPT, "hold_out_bytes": 20, "windows_per_epoch": 4000}, tmp_path)
    data: Any = job.train_data()
    starts = {data[index].storage_offset() for index in range(len(data))}
    assert starts == set(range(100 - 16))  # every place that fits, the last one too
    assert all(bool((data[index] == ord("a")).all()) for index in range(100))


@pytest.mark.parametrize(("job_path", "params"), [(MNIST, {}), (GPT, TINY_GPT)])
def test_an_item_depends_on_the_seed_that_is_set_around_it(
    job_path: str, params: dict[str, Any], digits: Path, corpus: Path
) -> None:
    data: Any = load_job(job_path, params, digits if job_path == MNIST else corpus).train_data()

    def item(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        drawn = data[1234 % len(data)]
        return torch.as_tensor(drawn[0] if isinstance(drawn, tuple) else drawn)

    assert torch.equal(item(1), item(1))
    assert any(not torch.equal(item(1), item(seed)) for seed in range(2, 12))


@pytest.mark.parametrize(("job_path", "params"), [(MNIST, {"channels": 2, "hidden": 8}), (GPT, TINY_GPT)])
def test_evaluation_needs_no_gradient_and_leaves_model_and_randomness_as_they_were(
    job_path: str, params: dict[str, Any], digits: Path, corpus: Path
) -> None:
    job = load_job(job_path, params, digits if job_path == MNIST else corpus)
    model = job.model().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generators = (torch.get_rng_state(), repr(np.random.get_state()), random.getstate())
    first = job.evaluate(model)
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1:] == (repr(np.random.get_state()), random.getstate())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert job.evaluate(model) == first
    assert all(isinstance(value, float) and math.isfinite(value) for value in first.values())


def test_char_gpt_has_one_tensor_under_two_names_and_two_decay_groups() -> None:
    job = load_job(GPT, TINY_GPT, None)
    model = job.model()
    state = model.state_dict()
    assert state["token.weight"].data_ptr() == state["head.weight"].data_ptr()
    decayed, spared = job.optimizer(model).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(spared["params"]) == len(list(model.parameters()))
    assert all(parameter.dim() < 2 for parameter in spared["params"])


@pytest.mark.parametrize(("job_path", "params"), [(MNIST, {"channels": 2}), (GPT, TINY_GPT)])
@pytest.mark.parametrize("total_steps", [1, 2, 3, 40])
def test_schedules_fit_a_training_of_any_length(job_path: str, params: dict[str, Any], total_steps: int) -> None:
    job = load_job(job_path, params, None)
    optimizer = job.optimizer(job.model())
    scheduler = job.scheduler(optimizer, total_steps)
    assert scheduler is not None
    rates = []
    for _ in range(total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no gradients here, so nothing to step before the schedule
            scheduler.step()
    peak = job.params.learning_rate
    assert all(0 < rate <= peak * 1.000001 for rate in rates)
    if total_steps == 40:
        assert max(rates) == pytest.approx(peak, rel=0.02)
        assert rates[-1] < rates[0] < peak


@pytest.mark.parametrize(
    ("job_path", "params", "message"),
    [
        (MNIST, {"chanels": 4}, "unknown key 'chanels'; did you mean 'channels'"),
        (MNIST, {"dropout": 1.5}, "dropout: .* got 1.5"),
        (GPT, {"layers": 4}, "unknown key 'layers'"),
        (GPT, {"d_model": 30}, "d_model 30 is not a multiple of n_head 4"),
    ],
)
def test_a_wrong_parameter_is_named(job_path: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=message):
        load_job(job_path, params, None)


@pytest.mark.parametrize(
    ("job_path", "file", "data", "stage"),
    [(MNIST, "images.npy", "data/mnist", "mnist"), (GPT, "corpus.txt", "data/stdlib_text", "stdlib_text")],
)
def test_absent_data_is_named_with_what_makes_it(
    job_path: str, file: str, data: str, stage: str, tmp_path: Path
) -> None:
    with pytest.raises(Invalid) as unset:
        load_job(job_path, {}, None).train_data()
    assert f"set data: {data}" in (unset.value.hint or "")
    with pytest.raises(Invalid, match=file) as missing:
        load_job(job_path, {}, tmp_path).train_data()
    assert f"dvc repro data/dvc.yaml:{stage}" in (missing.value.hint or "")


def test_data_of_another_form_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", np.zeros((10, 32, 32), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", np.zeros(10, dtype=np.uint8))
    with pytest.raises(Invalid, match=r"images\.npy holds uint8 \(10, 32, 32\)"):
        load_job(MNIST, {}, tmp_path).train_data()
    (tmp_path / "corpus.txt").write_bytes(b"short")
    with pytest.raises(Invalid, match="has 5 bytes: too few"):
        load_job(GPT, {}, tmp_path).train_data()


@pytest.mark.parametrize("name", ["mnist_cnn", "char_gpt"])
def test_the_yaml_files_give_three_ranges_with_several_saves_each(name: str, digits: Path, corpus: Path) -> None:
    config = configured(name)
    assert len(config.ranges()) == 3
    folder = {"mnist_cnn": digits, "char_gpt": corpus}[name]
    data: Any = load_job(config.job, config.params, folder).train_data()
    steps = math.ceil(len(data) / config.batch_size) * config.epochs_per_range
    assert isinstance(config.checkpoint.every_steps, int)
    assert steps >= 4 * config.checkpoint.every_steps
    Subset(data, [0])[0]
