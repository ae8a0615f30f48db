"""A training that is not healthy: what stops it, what becomes head, and where the next attempt starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.support.cuts import gpt_config, mnist_config, write_corpus, write_digits
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Position
from training.checkpoint.quarantine import read_incidents
from training.checkpoint.store import MemoryStore
from training.checkpoint.token import read_seal
from training.config import HealthConfig, JobConfig
from training.data import Schedule
from training.errors import Diverged
from training.health import LossWatch, UnhealthyLoss, finite
from training.parallel.ranks import Ranks
from training.session import train_range
from training.state import finite_paths
from training.trainer import Trainer

RULE = HealthConfig(spike_factor=3, spike_window_steps=4, spike_patience_steps=2)
ROLLBACK = {"on_divergence": "rollback", "rollbacks": 2}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("data") / "digits")


def at(step: int) -> Position:
    return Position(step=step)


def watch_over(losses: list[float], watch: LossWatch | None = None, first: int = 1) -> LossWatch:
    watch = watch or LossWatch(RULE)
    for step, loss in enumerate(losses, first):
        watch.step(at(step), torch.tensor(loss))
    return watch


def test_a_spike_that_lasts_is_found_where_it_began() -> None:
    with pytest.raises(UnhealthyLoss, match="above 3 times its median") as raised:
        watch_over([1.0, 1.1, 0.9, 1.0, 4.0, 5.0])
    assert (raised.value.position.step, raised.value.since_step) == (6, 5)
    assert raised.value.kind == "Diverged"


@pytest.mark.parametrize(
    "losses",
    [
        [1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 9.0, 1.0],  # no patience is used up
        [1.0, 9.0, 9.0, 9.0, 9.0],  # nothing is usual yet
        [4.0, 3.0, 2.0, 1.0, 2.9, 1.0],  # within the factor
        [-1.0, -1.0, -1.0, -1.0, 5.0, 5.0, 5.0],  # a factor of what is negative means nothing
    ],
    ids=["single spikes", "before the window is full", "small", "negative"],
)
def test_what_is_no_lasting_spike_passes(losses: list[float]) -> None:
    watch_over(losses)


def test_losses_of_a_spike_are_not_taken_for_usual() -> None:
    watch = watch_over([1.0, 1.0, 1.0, 1.0, 9.0])
    assert watch.memory() == {"losses": [1.0, 1.0, 1.0, 1.0], "spike": [5]}


def test_a_watch_goes_on_where_the_one_before_stopped() -> None:
    before = watch_over([1.0, 1.0, 1.0, 1.0, 9.0]).memory()
    with pytest.raises(UnhealthyLoss) as raised:
        watch_over([9.0], LossWatch(RULE, memory=before), first=6)
    assert raised.value.since_step == 5


def test_without_the_rule_nothing_is_kept_and_nothing_is_read() -> None:
    watch = LossWatch(HealthConfig())
    watch.step(at(1), torch.tensor(torch.nan))
    assert watch.memory() == {}


def test_losses_are_read_at_the_steps_that_are_logged() -> None:
    watch = LossWatch(RULE, every_steps=10)
    losses = [1.0] * 5 + [9.0] * 4
    watch_over(losses, watch)
    with pytest.raises(UnhealthyLoss) as raised:
        watch.step(at(10), torch.tensor(9.0))
    assert raised.value.since_step == 6


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_loss_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(UnhealthyLoss, match="step 3"):
        finite(torch.tensor(value), at(3))


def test_data_is_left_out_up_to_the_last_step_of_the_epoch() -> None:
    schedule = Schedule(samples=60, batch_size=6, accumulate_batches=4)  # 3 steps an epoch
    assert schedule.skip(Position(epoch=1, step=3, sample=60), 1) == Position(epoch=1, step=4, sample=84)
    assert schedule.skip(Position(epoch=1, step=3, sample=60), 99) == Position(epoch=1, step=5, sample=108)
    assert schedule.skip(Position(epoch=1, step=5, sample=108), 2) == Position(epoch=1, step=5, sample=108)


Harm = Callable[[Trainer, Tensor], Tensor]


def weight_to_nan(trainer: Trainer, loss: Tensor) -> Tensor:
    next(trainer.model.parameters()).detach().view(-1)[-1] = torch.nan
    return loss


def moment_to_inf(trainer: Trainer, loss: Tensor) -> Tensor:
    state = next(iter(trainer.optimizer.state.values()))
    next(value for value in state.values() if value.dim() > 0).view(-1)[0] = torch.inf
    return loss


def loss_to_nan(trainer: Trainer, loss: Tensor) -> Tensor:
    return loss * torch.nan


def loss_times_100(trainer: Trainer, loss: Tensor) -> Tensor:
    return loss.abs() * 100 + 100


def train(config: JobConfig, store: MemoryStore, data: Path, harm: dict[int, Harm] | None = None) -> str:
    """One attempt. `harm` is done after optimizer steps, counted over the run by its data."""
    done: list[int] = []

    class Sick(Trainer):
        """A trainer that falls ill at given steps of the data."""

        def batches(self, position: Position) -> Iterator[Any]:
            done[:] = [position.step]
            return super().batches(position)

        def optimizer_step(self, batches: Iterator[Any], window_samples: int) -> Tensor:
            loss = super().optimizer_step(batches, window_samples)
            done[0] += 1
            act = (harm or {}).get(done[0])
            return act(self, loss) if act is not None else loss

    with mock.patch("training.session.Trainer", Sick):
        return train_range(config, store, "r", data_folder=data).state_digest


def steps_of(store: MemoryStore) -> list[int]:
    return [committed.manifest.position.step for committed in read_lineage(store).chain]


@pytest.mark.parametrize(
    ("harm", "steps", "name"),
    [
        (weight_to_nan, [6], "model/"),
        (weight_to_nan, [5], "loss"),
        (moment_to_inf, [6], "optimizer/state/"),
        (moment_to_inf, [5], "model/"),
        (loss_to_nan, [5, 6], "loss"),
    ],
    ids=["a weight", "a weight, seen in the loss", "a moment", "a moment, seen in a weight", "the loss"],
)
def test_a_run_that_falls_ill_between_two_saves_keeps_its_last_healthy_checkpoint(
    harm: Harm, steps: list[int], name: str, digits: Path
) -> None:
    store = MemoryStore()
    config = mnist_config(
        checkpoint={"every_steps": 2}, epochs=4, clip_grad_norm=None, log_every_steps=1000, batch_size=2
    )
    with pytest.raises(Diverged):
        train(config, store, digits, dict.fromkeys(steps, harm))
    assert steps_of(store) == [2, 4]
    incident = read_incidents(store)[0]
    assert incident.name.startswith(name)
    assert incident.since_step > 4


def test_an_infinite_buffer_of_the_model_is_legitimate(digits: Path) -> None:
    class Masked(Trainer):
        """A model with a mask."""

        def __init__(self, config: JobConfig, data_folder: Path | None, ranks: Ranks | None = None) -> None:
            super().__init__(config, data_folder, ranks)
            self.model.register_buffer("mask", torch.full((4,), -torch.inf))

    store = MemoryStore()
    with mock.patch("training.session.Trainer", Masked):
        train_range(mnist_config(epochs=1), store, "r", data_folder=digits)
    assert read_incidents(store) == []


def test_tied_weights_and_all_moments_are_looked_at(tmp_path: Path) -> None:
    trainer = Trainer(gpt_config(), write_corpus(tmp_path / "corpus"))
    names = set(trainer.must_be_finite)
    assert "optimizer/state" in names
    parameters = {f"model/{name}" for name, _ in trainer.model.named_parameters(remove_duplicate=False)}
    assert parameters <= names
    assert not any(f"model/{name}" in names for name, _ in trainer.model.named_buffers())


def rolled_back(store: MemoryStore, digits: Path, harm: dict[int, Harm], **health: Any) -> str:
    """Attempts until one ends well; the illness comes with the data, so that it comes again with the same."""
    config = mnist_config(checkpoint={"every_steps": 1}, epochs=3, log_every_steps=1, health={**ROLLBACK, **health})
    for _ in range(4):
        try:
            return train(config, store, digits, harm)
        except Diverged:
            continue
    raise AssertionError("it never ended well")


def test_a_rolled_back_run_is_the_same_when_it_is_done_again(digits: Path) -> None:
    harm: dict[int, Harm] = {5: loss_to_nan}
    first, second = MemoryStore(), MemoryStore()
    digest = rolled_back(first, digits, harm, skip_steps=1)
    assert rolled_back(second, digits, harm, skip_steps=1) == digest
    straight = MemoryStore()
    assert train(mnist_config(), straight, digits) != digest, "nothing was left out"
    seal = read_seal(first, 2)
    assert seal.rollback is not None
    assert seal.rollback.since_step == 5
    assert steps_of(first) == [1, 2, 3, 4, 6, 7, 8, 9]
    told = [c.manifest.meta.get("rollback") for c in read_lineage(first).chain]
    assert [found is not None for found in told] == [False] * 4 + [True] * 4


def test_killed_before_its_first_commit_a_rolled_back_attempt_ends_the_same(digits: Path) -> None:
    harm: dict[int, Harm] = {5: loss_to_nan}
    digest = rolled_back(MemoryStore(), digits, harm, skip_steps=1)

    class Killed(BaseException):
        """Nothing that the code catches."""

    def kill(trainer: Trainer, loss: Tensor) -> Tensor:
        raise Killed

    store = MemoryStore()
    config = mnist_config(checkpoint={"every_steps": 1}, log_every_steps=1, health={**ROLLBACK, "skip_steps": 1})
    with pytest.raises(Diverged):
        train(config, store, digits, harm)
    with pytest.raises(Killed):
        train(config, store, digits, {6: kill})
    assert train(config, store, digits, harm) == digest


def test_a_spike_rolls_back_to_before_it_began_and_voids_what_was_saved_since(digits: Path) -> None:
    store = MemoryStore()
    health = {"spike_factor": 5, "spike_window_steps": 3, "spike_patience_steps": 3, "skip_steps": 3}
    harm: dict[int, Harm] = {5: loss_times_100, 6: loss_times_100, 7: loss_times_100}
    config = mnist_config(
        checkpoint={"every_steps": 1}, epochs=1, batch_size=2, log_every_steps=1, health={**ROLLBACK, **health}
    )
    with pytest.raises(Diverged, match="above 5 times"):
        train(config, store, digits, harm)
    assert steps_of(store) == [1, 2, 3, 4, 5, 6]
    train(config, store, digits, harm)
    seal = read_seal(store, 2)
    assert seal.rollback is not None
    assert seal.rollback.since_step == 5
    assert steps_of(store) == [1, 2, 3, 4, 8]
    assert {skipped.key[-7:-5] for skipped in seal.skipped} == {"05", "04"}


def test_a_resumed_run_sees_a_spike_at_the_same_step_as_a_straight_one(digits: Path) -> None:
    health = {"spike_factor": 5, "spike_window_steps": 3, "spike_patience_steps": 2}
    harm: dict[int, Harm] = {5: loss_times_100, 6: loss_times_100}
    config = mnist_config(checkpoint={"every_steps": 1}, epochs=1, batch_size=2, log_every_steps=1, health=health)

    class Killed(BaseException):
        """Nothing that the code catches."""

    def kill(trainer: Trainer, loss: Tensor) -> Tensor:
        raise Killed

    store = MemoryStore()
    with pytest.raises(Killed):
        train(config, store, digits, {5: kill})
    with pytest.raises(Diverged, match="step 6"):
        train(config, store, digits, harm)
    assert read_incidents(store)[0].since_step == 5


def test_rolling_back_to_the_same_data_ends_when_the_rollbacks_are_used_up(digits: Path) -> None:
    store = MemoryStore()
    with pytest.raises(AssertionError, match="never ended well"):
        rolled_back(store, digits, {5: loss_to_nan})
    seals = [read_seal(store, token).rollback for token in (1, 2, 3, 4)]
    assert len({rollback.token for rollback in seals if rollback is not None}) == 2


def test_a_layer_that_training_does_not_touch_is_looked_at_too() -> None:
    model = nn.Linear(2, 2)
    model.weight.requires_grad = False
    assert "model/weight" in finite_paths(model)
