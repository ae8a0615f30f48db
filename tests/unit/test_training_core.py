"""The loop and the state around it: precision, prefixes, refusals, and ends that are no ends."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.cuts import gpt_config, mnist_config, train_until, write_corpus, write_digits
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Position
from training.checkpoint.restore import restore_checkpoint
from training.checkpoint.store import LocalStore, MemoryStore
from training.checkpoint.token import claim, mark_run
from training.config import JobConfig, load_config, parse_config
from training.errors import Corrupt, Diverged, Invalid, Preempted, Unavailable, error_of_kind
from training.job import load_job
from training.jobs.mnist_cnn import MnistCnn
from training.ports import Message, RangeSpec, decode_message
from training.session import train_range
from training.state import TrainingState, apply_model, model_state, optimizer_state
from training.stopping import StopRequest
from training.trainer import Trainer


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return write_digits(tmp_path / "digits")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_resumes_bit_identical(precision: str, digits: Path, tmp_path: Path) -> None:
    config = mnist_config(precision=precision, epochs=2)
    straight = train_until(config, tmp_path / "straight", digits)
    assert train_until(config, tmp_path / "cut", digits, die_at_step=4) is None
    assert train_until(config, tmp_path / "cut", digits) == straight is not None


def test_the_scaler_is_part_of_the_state(digits: Path) -> None:
    trainer = Trainer(mnist_config(precision="fp16"), digits)
    trainer.optimizer_step(trainer.batches(Position()), 24)
    assert trainer.state.capture()["scaler"]["scale"] > 0


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile's own imports
def test_prefixes_of_compile_and_ddp_do_not_reach_the_keys(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    names = set(model_state(plain))
    compiled = cast("nn.Module", torch.compile(plain))
    assert set(model_state(compiled)) == names
    plain[1] = cast("nn.Module", torch.compile(plain[1]))
    assert set(model_state(plain)) == names
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(compiled)
        assert set(model_state(wrapped)) == names
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        assert set(optimizer_state(optimizer, wrapped)["groups"][0]["params"]) == names
        bare = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
        apply_model(bare, model_state(wrapped))
        assert all(torch.equal(a, b) for a, b in zip(bare.parameters(), wrapped.parameters(), strict=True))
    finally:
        dist.destroy_process_group()


def test_a_users_own_module_called_module_keeps_its_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert set(model_state(Holder())) == {"module.weight", "module.bias"}


def test_a_parameter_that_is_not_the_models_is_refused_before_training() -> None:
    model = nn.Linear(1, 1)
    stray = nn.Parameter(torch.zeros(3))
    state = TrainingState(model, torch.optim.SGD([*model.parameters(), stray], lr=0.1))
    with pytest.raises(Invalid, match=r"parameter 2 of optimizer group 0, shape \(3,\)"):
        state.capture()


def test_a_channels_last_model_gets_its_moments_back_in_its_own_memory_format() -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3)
        model.weight.data = model.weight.data.contiguous(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = build()
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    captured = TrainingState(model, optimizer).capture()
    other, other_optimizer = build()
    TrainingState(other, other_optimizer).apply(captured)
    moment = other_optimizer.state[next(other.parameters())]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(moment, optimizer.state[next(model.parameters())]["exp_avg"])


def test_evaluation_changes_nothing_that_training_sees(digits: Path) -> None:
    trainer = Trainer(mnist_config(), digits)
    frozen = next(m for m in trainer.model.modules() if isinstance(m, nn.BatchNorm2d))
    frozen.eval()

    def evaluate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        random.random(), np.random.rand(), torch.rand(3)
        return {"metric": 1.0}

    trainer.job.evaluate = evaluate  # type: ignore[method-assign]
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    assert trainer.evaluate() == {"metric": 1.0}
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    assert before == after
    assert trainer.model.training
    assert not frozen.training


def test_a_loss_that_is_not_finite_is_never_published(digits: Path) -> None:
    store = MemoryStore()
    config = mnist_config(params={"channels": 2, "hidden": 8, "learning_rate": 1e30}, clip_grad_norm=None)
    with pytest.raises(Diverged, match="step"):
        train_range(config, store, "r", data_folder=digits)
    for committed in read_lineage(store).chain:
        assert committed.manifest.health.finite
        assert committed.manifest.health.loss is not None


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> StopRequest:
    """Asked while this optimizer step is on its way."""
    request, count, optimizer_step = StopRequest(), itertools.count(1), Trainer.optimizer_step

    def asking(trainer: Trainer, *arguments: Any) -> torch.Tensor:
        if next(count) == step:
            request.ask()
        return optimizer_step(trainer, *arguments)

    monkeypatch.setattr(Trainer, "optimizer_step", asking)
    return request


def test_being_asked_to_stop_commits_the_step_and_resumes_like_the_straight_run(
    digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = mnist_config(checkpoint={"every_steps": 0})
    straight = train_range(config, MemoryStore(), "r", data_folder=digits)
    for step in (1, 3, 5):
        store = MemoryStore()
        with pytest.raises(Preempted, match="is committed"), monkeypatch.context() as patch:
            train_range(config, store, "r", data_folder=digits, request=stop_at(step, patch))
        head = read_lineage(store).head
        assert head is not None
        assert head.manifest.position.step == step
        assert train_range(config, store, "r", data_folder=digits).state_digest == straight.state_digest


def test_being_asked_while_an_evaluation_puts_the_generators_back_leaves_no_trace_in_them(
    digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = StopRequest()

    def evaluate(job: MnistCnn, model: nn.Module) -> dict[str, float]:
        return {"drawn": random.random()}

    @contextlib.contextmanager
    def asked_on_the_way_out() -> Iterator[None]:
        state = random.getstate()
        yield
        request.ask()
        random.setstate(state)

    monkeypatch.setattr(MnistCnn, "evaluate", evaluate)
    config, store = mnist_config(), MemoryStore()
    straight = train_range(config, MemoryStore(), "r", data_folder=digits)
    with monkeypatch.context() as patch:
        patch.setattr("training.trainer.preserved_randomness", asked_on_the_way_out)
        with pytest.raises(Preempted, match="is committed"):
            train_range(config, store, "r", data_folder=digits, request=request)
    assert train_range(config, store, "r", data_folder=digits).state_digest == straight.state_digest


def test_metrics_are_committed_once_for_each_step_also_over_a_cut(digits: Path, tmp_path: Path) -> None:
    config = mnist_config(log_every_steps=1, checkpoint={"every_steps": 2})
    train_until(config, tmp_path / "run", digits, die_at_step=6)
    train_until(config, tmp_path / "run", digits)
    chain = read_lineage(LocalStore(tmp_path / "run")).chain
    logged = [p.step for c in chain for p in c.manifest.metrics if "train/loss" in p.values]
    assert logged == list(range(1, 10))
    evaluated = [p.step for c in chain for p in c.manifest.metrics if "eval/accuracy" in p.values]
    assert evaluated == [3, 6, 9]


def test_a_save_that_fails_twice_does_not_stop_training_and_loses_no_metric(digits: Path) -> None:
    class Flaky(MemoryStore):
        failing = 2

        def put(self, key: str, parts: Any) -> None:
            if key.startswith("packs/") and key >= "packs/000001/00000002" and Flaky.failing:
                Flaky.failing -= 1
                raise Unavailable("503 SlowDown", key=key)
            super().put(key, parts)

    config, store = mnist_config(log_every_steps=1), Flaky()
    done = train_range(config, store, "r", data_folder=digits)
    assert done.state_digest == train_range(config, MemoryStore(), "r", data_folder=digits).state_digest
    steps = [p.step for c in read_lineage(store).chain for p in c.manifest.metrics if "train/loss" in p.values]
    assert steps == list(range(1, 10))


@pytest.mark.parametrize(("every_steps", "most"), [(0, 1), (0, 2), (1, 1), (2, 3)])
def test_no_step_is_trained_that_would_be_one_too_many_to_lose(
    every_steps: int, most: int, digits: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the store does: here saves take longer than steps, and every other one fails."""

    unsaved: list[int] = []

    class Poor(MemoryStore):
        def put(self, key: str, parts: Any) -> None:
            if key.startswith("packs/"):
                time.sleep(0.03)
                if int(key.split("/")[2][:8]) % 2 and len(unsaved) < 9:  # an end that is not committed is an error
                    raise Unavailable("503 SlowDown", key=key)
            super().put(key, parts)

    store, optimizer_step = Poor(), Trainer.optimizer_step

    def counting(trainer: Trainer, *arguments: Any) -> torch.Tensor:
        head = read_lineage(store).head
        unsaved.append(len(unsaved) + 1 - (head.manifest.position.step if head else 0))
        return optimizer_step(trainer, *arguments)

    config = mnist_config(checkpoint={"every_steps": every_steps, "max_lost_steps": most})
    straight = train_range(config, MemoryStore(), "r", data_folder=digits)
    monkeypatch.setattr(Trainer, "optimizer_step", counting)
    assert train_range(config, store, "r", data_folder=digits).state_digest == straight.state_digest
    assert len(unsaved) == 9
    assert max(unsaved) <= most


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"job": "training.jobs.nothing:Nothing"}, "no module"),
        ({"job": "training.jobs.mnist_cnn:Nothing"}, "'Nothing' is not a training.job.Job"),
        ({"params": {"chanels": 3}}, "unknown key 'chanels'; did you mean 'channels'"),
        ({"params": {"dropout": 2}}, "dropout"),
        ({"device": "cuda"}, "torch sees no GPU"),
    ],
)
def test_a_wrong_job_is_refused_by_name(changes: dict[str, Any], named: str, digits: Path) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(Invalid, match=named):
        Trainer(mnist_config(**changes), digits)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("epohcs=3", "unknown key 'epohcs'; did you mean 'epochs'"),
        ("checkpoint.every_step=3", "unknown key 'checkpoint.every_step'; did you mean 'every_steps'"),
        ("epochs=0", "epochs: .* got 0"),
        ("epochs", "is not key=value"),
        ("epochs.more=1", "'epochs' is a value, not a section"),
    ],
)
def test_a_wrong_override_is_refused_by_name(override: str, named: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("job: a.b:C\nepochs: 2\ncheckpoint: {every_steps: 5}\n")
    with pytest.raises(Invalid, match=named):
        load_config(file, [override])


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("job: a.b:C\nepochs: 2\nseed: 4\ncheckpoint: {every_steps: 5}\n")
    config = load_config(file, ["epochs=7", "checkpoint.deltas_per_base=2", "params.x=[1, 2]"])
    assert (config.epochs, config.seed, config.batch_size) == (7, 4, 32)
    assert (config.checkpoint.every_steps, config.checkpoint.deltas_per_base) == (5, 2)
    assert config.params == {"x": [1, 2]}
    assert config.ranges() == [(epoch, epoch + 1) for epoch in range(7)]


def test_a_frozen_configuration_and_an_absent_file() -> None:
    config = parse_config({"job": "a.b:C"})
    with pytest.raises(ValueError, match="frozen"):
        config.epochs = 3  # type: ignore[misc]
    with pytest.raises(Invalid, match="no job file"):
        load_config("nowhere.yaml")


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    trainer = Trainer(gpt_config(), corpus)
    with IncrementalCheckpointer(MemoryStore()) as checkpointer:
        checkpointer.save(trainer.state.capture())
        committed = checkpointer.wait()
        restored = checkpointer.restore()
    assert committed is not None
    assert restored is not None
    stored = [t.key for t in committed.manifest.layout.tensors]  # type: ignore[union-attr]
    assert ("model/token.weight" in stored) != ("model/head.weight" in stored)
    assert restored["model"]["token.weight"] is restored["model"]["head.weight"]
    job = load_job(gpt_config().job, gpt_config().params, corpus)
    model = job.model()
    apply_model(model, restored["model"])
    tied = dict(model.named_parameters(remove_duplicate=False))
    assert tied["head.weight"] is tied["token.weight"]


class Process:
    """A real training process, as the supervisor starts it."""

    def __init__(self, config: JobConfig, store: Path, data: Path) -> None:
        mark_run(LocalStore(store), "r")
        token = claim(LocalStore(store), "r", {})
        spec = RangeSpec(
            run="r", start=0, stop=9, token=token, store_url=str(store), config=config, data_folder=str(data)
        )
        reading, writing = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "training.process", "--messages", str(writing)],
            stdin=subprocess.PIPE,
            pass_fds=[writing],
            stderr=subprocess.PIPE,
        )
        os.close(writing)
        assert self.process.stdin is not None
        self.process.stdin.write(spec.model_dump_json().encode() + b"\n")
        self.process.stdin.flush()
        self.lines = os.fdopen(reading, "rb")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stderr, self.lines):
            if pipe is not None:
                pipe.close()
        self.process.wait()

    def messages(self) -> Iterator[Message]:
        return map(decode_message, self.lines)


def long_run(digits: Path) -> JobConfig:
    return mnist_config(epochs=100_000, checkpoint={"every_steps": 0})


def test_sigterm_ends_a_real_process_as_preempted_with_its_step_committed(digits: Path, tmp_path: Path) -> None:
    with Process(long_run(digits), tmp_path / "run", digits) as training:
        messages = training.messages()
        position = next(m.position for m in messages if m.kind == "beat")
        training.process.send_signal(signal.SIGTERM)
        last = list(messages)[-1]
        assert (last.kind, last.error) == ("failed", "Preempted")  # type: ignore[union-attr]
        assert training.process.wait(20) == Preempted.exit_code
    head = read_lineage(LocalStore(tmp_path / "run")).head
    assert head is not None
    assert head.manifest.position.step >= position.step


def test_a_real_process_ends_when_its_supervisor_lets_go_of_the_pipe(digits: Path, tmp_path: Path) -> None:
    with Process(long_run(digits), tmp_path / "run", digits) as training:
        next(m for m in training.messages() if m.kind == "beat")
        assert training.process.stdin is not None
        training.process.stdin.close()
        assert training.process.wait(2) == 128 + signal.SIGKILL


def test_check_and_evaluate_answer_with_one_line(digits: Path, tmp_path: Path) -> None:
    config = mnist_config(epochs=1)
    done = train_range(config, str(tmp_path / "run"), "r", data_folder=digits)
    question = {
        "config": config.model_dump(mode="json"),
        "data_folder": str(digits),
        "store_url": str(tmp_path / "run"),
        "run": "r",
    }

    def ask(mode: str, question: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        result = subprocess.run(
            [sys.executable, "-m", "training.process", mode],
            input=json.dumps(question) + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
        return result.returncode, json.loads(result.stdout)

    code, checked = ask("--check", question)
    assert (code, checked["samples"], checked["steps_per_epoch"], checked["total_steps"]) == (0, 60, 3, 3)
    code, evaluated = ask("--evaluate", question)
    assert (code, evaluated["state_digest"]) == (0, done.state_digest)
    assert evaluated["metrics"] == pytest.approx(done.metrics)
    code, failed = ask("--check", {**question, "data_folder": str(tmp_path / "nowhere")})
    assert (code, failed["error"]) == (Invalid.exit_code, "Invalid")


def test_a_new_run_may_start_from_the_weights_of_another_and_from_nothing_else_of_it(
    digits: Path, tmp_path: Path
) -> None:
    store = tmp_path / "champion"
    done = train_range(mnist_config(epochs=1), str(store), "champion", data_folder=digits)
    source = {"store_url": str(store), "run": "champion", **done.checkpoint.model_dump(exclude={"digest"})}
    trainer = Trainer(mnist_config(init_from=source), digits)
    weights = restore_checkpoint(LocalStore(store), done.checkpoint.token, done.checkpoint.sequence)["model"]
    assert all(torch.equal(value, weights[name]) for name, value in trainer.model.state_dict().items())
    assert not trainer.optimizer.state
    assert train_range(mnist_config(init_from=source), MemoryStore(), "next", data_folder=digits).position.step == 9


def test_an_error_of_a_subclass_crosses_a_process_as_its_kind() -> None:
    with pytest.raises(Corrupt) as caught:
        MemoryStore().get("a")
    assert caught.value.kind == "Corrupt"
    assert error_of_kind(caught.value.kind, "gone").exit_code == Corrupt.exit_code
