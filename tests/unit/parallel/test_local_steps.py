"""Steps that each rank takes for itself: the training that the papers mean, and one that resumes to the bit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.bits import bits, tensor_bytes
from tests.support.cuts import gpt_config, write_corpus
from tests.support.gang import gang
from tests.support.launched import Launched
from tests.support.local_sgd import Replicas
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Position
from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.restore import restore_newest
from training.checkpoint.store import LocalStore
from training.config import JobConfig, parse_config
from training.errors import Invalid, Preempted
from training.parallel.config import ParallelConfig
from training.parallel.local import LocalSteps
from training.parallel.ranks import standing
from training.parallel.whereabouts import whereabouts
from training.ports import Done, Failed
from training.session import train_range
from training.stopping import GroupStop, StopRequest
from training.trainer import Step, Trainer

pytestmark = pytest.mark.xdist_group("ranks")  # each of them needs more processes than there are cores
KILLED = 9
ROUNDING = 2e-4  # relative to the largest weight; Adam makes small gradients large
AVERAGE = {"local_steps": 4}
NESTEROV = {"local_steps": 4, "outer": "nesterov"}
MARGIN = 0.15  # nats a byte; 0.10 was measured, and 0.002 after 320 steps instead of 120
CHANCE = 5.5  # of 256 bytes


def config_of(world: int, parallel: dict[str, Any], dropout: float = 0.2, **changes: Any) -> JobConfig:
    """Two epochs of six steps, each on 8 samples but for the last, on one: some ranks have none then."""
    params = {**gpt_config().params, "dropout": dropout, "windows_per_epoch": 41}
    values = {"epochs": 2, "accumulate_batches": 2, "clip_grad_norm": 0.5, "log_every_steps": 1, **changes}
    return gpt_config(parallel={"world": world, **parallel}, params=params, **values)


class Cut(Trainer):
    """Ends its process after the optimizer step `die_at`, and notes each step.

    Attributes:
        notes: step, digest of the weights, collectives begun so far.
    """

    die_at = 0
    notes: ClassVar[list[tuple[int, int, int]]] = []

    def optimizer_step(self, batches: Iterator[Any], window_samples: int) -> Tensor:
        self.taken = getattr(self, "taken", 0) + 1
        loss = super().optimizer_step(batches, window_samples)
        if self.taken == Cut.die_at:
            os._exit(KILLED)
        return loss

    def agree(self, position: Position, loss: Tensor, stop: StopRequest) -> list[Step]:
        steps = super().agree(position, loss, stop)
        digest = xxhash.xxh3_64()
        for parameter in self.model.parameters():
            digest.update(tensor_bytes(parameter))
        Cut.notes.append((position.step, digest.intdigest(), whereabouts().begun))
        return steps


def train(
    exchange: Exchange,
    config: JobConfig,
    store: str,
    data: str,
    stop: int | None = None,
    die_at: int = 0,
    wish_at: int = 0,
) -> tuple[str, list[tuple[int, int, int]]]:
    """A range on one rank; the last one dies. Returns the digest of the state, and what was noted."""
    ranks = standing(config.parallel, exchange, torch.device("cpu"))
    last = exchange.rank == exchange.size - 1
    Cut.die_at, Cut.notes = die_at if last else 0, []
    request = GroupStop()

    class Wishing(Cut):
        def agree(self, position: Position, loss: Tensor, stop: StopRequest) -> list[Step]:
            if last and position.step == wish_at:
                request.ask()
            return super().agree(position, loss, stop)

    with mock.patch("training.session.Trainer", Wishing):
        try:
            done = train_range(config, store, "r", stop=stop, data_folder=Path(data), ranks=ranks, request=request)
        except Preempted as error:
            return error.message, Cut.notes
    return done.state_digest, Cut.notes


def digests(answers: list[Any]) -> set[str]:
    return {digest for digest, _ in answers}


def points(store: Path) -> list[Any]:
    """What was logged of the training, in the order of the checkpoints that it came with; not how fast it was."""
    chain = read_lineage(LocalStore(store)).chain
    every = [point for committed in chain for point in committed.manifest.metrics]
    return [point for point in every if "train/loss" in point.values or "eval/val_loss" in point.values]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("local") / "corpus")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, NESTEROV),
        (3, NESTEROV),
        (2, AVERAGE),
        (3, AVERAGE),
        (2, {**AVERAGE, "local_after_steps": 3}),
        (2, {**NESTEROV, "local_after_steps": 3, "outer_lr": 0.5}),
    ],
)
def test_ranks_train_what_replicas_in_one_process_train(
    world: int, parallel: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    config = config_of(world, parallel, dropout=0.0)
    gang(world, train, config, str(tmp_path / "run"), str(corpus))
    found = restore_newest(LocalStore(tmp_path / "run"), "r")
    assert found is not None
    for name, value in Replicas(config, corpus).train().items():
        limit = ROUNDING * max(np.abs(value).max(), 1e-3)
        assert np.abs(found["model"][name].numpy() - value).max() <= limit, name


def sgd_both_ways(exchange: Exchange) -> float:
    """The largest difference between weights that are averaged after each step of SGD, and those of DDP."""
    torch.manual_seed(0)
    summed, averaged = nn.Linear(5, 3), nn.Linear(5, 3)
    averaged.load_state_dict(summed.state_dict())
    wrapped = DistributedDataParallel(summed)
    local = LocalSteps(averaged, ParallelConfig(world=exchange.size), exchange.size)
    local.start(0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (summed, averaged)]
    torch.manual_seed(exchange.rank)
    for _ in range(5):
        batch = torch.randn(4, 5)
        for model, optimizer in zip((wrapped, averaged), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        local.stepped(last=False)
    return max(float((a - b).abs().max()) for a, b in zip(summed.parameters(), averaged.parameters(), strict=True))


@pytest.mark.soak
def test_the_average_after_every_step_of_sgd_is_ddp() -> None:
    assert max(gang(3, sgd_both_ways)) < 1e-6


@pytest.mark.parametrize(
    ("world", "parallel", "die_at"),
    [
        (2, NESTEROV, 9),  # between synchronisations
        pytest.param(3, NESTEROV, 9, marks=pytest.mark.soak),
        pytest.param(2, NESTEROV, 6, marks=pytest.mark.soak),  # while the others synchronise
        pytest.param(2, AVERAGE, 9, marks=pytest.mark.soak),
        pytest.param(3, AVERAGE, 10, marks=pytest.mark.soak),
        pytest.param(3, {**AVERAGE, "local_after_steps": 3}, 4, marks=pytest.mark.soak),
        pytest.param(2, {**NESTEROV, "local_after_steps": 3}, 8, marks=pytest.mark.soak),
    ],
)
def test_a_group_that_is_killed_ends_as_the_straight_one_and_is_one_at_each_checkpoint(
    world: int, parallel: dict[str, Any], die_at: int, corpus: Path, tmp_path: Path
) -> None:
    saves = {"every_steps": 1, "deltas_per_base": 3, "max_lost_steps": 4, "overlap_copy": True}
    config = config_of(world, parallel, checkpoint=saves)
    straight = gang(world, train, config, str(tmp_path / "straight"), str(corpus))
    _check_rounds([notes for _, notes in straight], config.parallel.local_after_steps)
    with pytest.raises(AssertionError, match=r"a rank died|Connection"):
        gang(world, train, config, str(tmp_path / "cut"), str(corpus), None, die_at)
    committed = restore_newest(LocalStore(tmp_path / "cut"), "r")
    assert committed is None or committed.position.step < die_at
    again = gang(world, train, config, str(tmp_path / "cut"), str(corpus))
    assert committed is None or again[0][1][0][0] == committed.position.step + 1, "it went on from there"
    assert digests(again) == digests(straight)
    assert len(digests(again)) == 1
    assert bits([p.model_dump() for p in points(tmp_path / "cut")]) == bits(
        [p.model_dump() for p in points(tmp_path / "straight")]
    )


def _check_rounds(ranks: list[list[tuple[int, int, int]]], after: int) -> None:
    """Weights are the same exactly after a synchronisation, and not a collective is begun between them."""
    alone = 0
    for before, notes in zip([None, *zip(*ranks, strict=True)], zip(*ranks, strict=True), strict=False):
        step = notes[0][0]
        alone = 0 if step <= after else alone + 1
        synchronises = step <= after or alone == 4 or step % 6 == 0
        assert (len({weights for _, weights, _ in notes}) == 1) == synchronises, f"step {step}"
        if before is not None and not synchronises:
            assert [now for *_, now in notes] == [then for *_, then in before], f"step {step} exchanges something"
        alone = 0 if synchronises else alone


@pytest.mark.soak
def test_a_wish_to_stop_is_granted_at_the_next_synchronisation(corpus: Path, tmp_path: Path) -> None:
    config = config_of(2, AVERAGE)
    straight = gang(2, train, config, str(tmp_path / "straight"), str(corpus))
    told = gang(2, train, config, str(tmp_path / "cut"), str(corpus), None, 0, 7)
    assert digests(told) == {"asked to stop; epoch 1, step 10 is committed"}
    assert digests(gang(2, train, config, str(tmp_path / "cut"), str(corpus))) == digests(straight)


@pytest.mark.soak
@pytest.mark.parametrize("lost", ["outer momentum", "own moments"])
def test_a_resume_without_all_of_the_state_is_another_training(lost: str, corpus: Path, tmp_path: Path) -> None:
    config = config_of(2, NESTEROV)
    straight = gang(2, train, config, str(tmp_path / "straight"), str(corpus))
    gang(2, train, config, str(tmp_path / "cut"), str(corpus), 1)
    assert digests(gang(2, train_without, lost, config, str(tmp_path / "cut"), str(corpus))) != digests(straight)


def train_without(exchange: Exchange, lost: str, config: JobConfig, store: str, data: str) -> Any:
    def of_rank_0(self: LocalSteps, saved: Any, saved_by: int) -> Any:
        told = [saved]
        dist.broadcast_object_list(told, src=0)
        return told[0]

    forget = {"apply": lambda self, saved: None} if lost == "outer momentum" else {"moments": of_rank_0}
    with mock.patch.multiple(LocalSteps, **forget):
        return train(exchange, config, store, data)


def moments_after(exchange: Exchange, config: JobConfig, store: str, data: str) -> tuple[Any, str]:
    """What this rank has restored of the optimizer's state, as bits, and the digest after the rest of the run."""
    kept: list[Any] = []

    class Telling(Trainer):
        def start(self, position: Position) -> None:
            super().start(position)
            kept.append(bits(self.state.capture()["optimizer"]["state"].value))

    ranks = standing(config.parallel, exchange, torch.device("cpu"))
    with mock.patch("training.session.Trainer", Telling):
        done = train_range(config, store, "r", data_folder=Path(data), ranks=ranks)
    return kept[0], done.state_digest


@pytest.mark.soak
def test_a_rank_that_is_new_takes_the_moments_of_rank_0(corpus: Path, tmp_path: Path) -> None:
    gang(2, train, config_of(2, NESTEROV), str(tmp_path / "run"), str(corpus), 1)
    restored = gang(3, moments_after, config_of(3, NESTEROV), str(tmp_path / "run"), str(corpus))
    first, second, new = (moments for moments, _ in restored)
    assert first == new
    assert first != second
    assert len({digest for _, digest in restored}) == 1


@pytest.mark.soak
def test_the_loss_of_local_steps_is_near_that_of_summed_gradients(corpus: Path, tmp_path: Path) -> None:
    params = {
        "n_layer": 2,
        "n_head": 2,
        "d_model": 32,
        "context": 32,
        "windows_per_epoch": 640,
        "hold_out_bytes": 200,
    }
    losses = {}
    short_rounds = {**NESTEROV, "outer_lr": 0.4, "outer_momentum": 0.6}  # DiLoCo's own are for long ones
    ways: dict[str, dict[str, Any]] = {"ddp": {}, "average": AVERAGE, "nesterov": short_rounds}
    for name, parallel in ways.items():
        changes = {"epochs": 3, "batch_size": 16, "accumulate_batches": 1, "params": params}
        config = gpt_config(**changes, parallel={"world": 2, **parallel}, checkpoint={"every_steps": 0})
        losses[name] = gang(2, val_loss, config, str(tmp_path / name), str(corpus))[0]
    assert losses["ddp"] < CHANCE / 2
    for name in ("average", "nesterov"):
        assert abs(losses[name] - losses["ddp"]) < MARGIN, losses


def val_loss(exchange: Exchange, config: JobConfig, store: str, data: str) -> float:
    ranks = standing(config.parallel, exchange, torch.device("cpu"))
    return train_range(config, store, "r", data_folder=Path(data), ranks=ranks).metrics["val_loss"]


@pytest.mark.soak
@pytest.mark.parametrize("parallel", [AVERAGE, NESTEROV])
def test_a_launched_group_whose_rank_is_killed_ends_as_the_straight_one(
    parallel: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    orders = tmp_path / "orders"
    orders.mkdir()
    config = config_of(2, parallel).model_dump() | {"job": "tests.support.slow_gpt:SlowGpt", "epochs": 4}
    config["params"]["folder"] = str(orders)
    slow = parse_config(config)
    (orders / "slow").write_text("0.1")
    with closing(Launched(slow, tmp_path / "cut", corpus)) as cut:
        cut.until_step(8)
        cut.ranks()[1].kill()
        failed = cut.end()
        assert isinstance(failed, Failed)
        assert re.search(r"rank 1 \(pid \d+\) was killed by SIGKILL", failed.message), failed
    (orders / "slow").unlink()
    with closing(Launched(slow, tmp_path / "cut", corpus)) as again:
        done = again.end()
        assert again.restored().position.step in (4, 6, 10, 12)
    with closing(Launched(slow, tmp_path / "straight", corpus)) as straight:
        expected = straight.end()
    assert isinstance(done, Done)
    assert isinstance(expected, Done)
    assert done.state_digest == expected.state_digest


@pytest.mark.soak
@pytest.mark.parametrize("parallel", [AVERAGE, NESTEROV])
def test_one_rank_alone_goes_on_from_a_group(parallel: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    gang(2, train, config_of(2, parallel), str(tmp_path / "run"), str(corpus), 1)
    done = train_range(config_of(1, parallel), str(tmp_path / "run"), "r", data_folder=corpus)
    assert done.position.step == 12
    straight = train_range(config_of(1, parallel), str(tmp_path / "alone"), "r", data_folder=corpus)
    train_range(config_of(1, parallel), str(tmp_path / "cut"), "r", stop=1, data_folder=corpus)
    again = train_range(config_of(1, parallel), str(tmp_path / "cut"), "r", data_folder=corpus)
    assert again.state_digest == straight.state_digest


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"parallel": {"world": 2, "data": "fsdp", **AVERAGE}}, "local_steps 4 needs whole replicas: data: ddp"),
        ({"parallel": {"world": 2, "tensor": 2, **AVERAGE}}, "local_steps 4 needs whole replicas"),
        ({"parallel": {"world": 2, "compression": "fp16", **AVERAGE}}, "drop compression"),
        ({"parallel": {"world": 2, "outer": "nesterov"}}, "outer belong to local_steps >= 2"),
        ({"parallel": {"world": 2, "local_after_steps": 3}}, "local_after_steps and outer belong"),
        ({"parallel": {"world": 2, "outer_lr": 1.0, **AVERAGE}}, "belong to outer: nesterov, not to average"),
        ({"parallel": {"world": 2, **AVERAGE}, "precision": "fp16"}, "take precision: bf16"),
        (
            {"parallel": {"world": 2, **AVERAGE}, "checkpoint": {"max_lost_steps": 3}},
            "max_lost_steps 3 is less than parallel.local_steps 4",
        ),
        ({"parallel": {"world": 2, "local_step": 3}}, "did you mean 'local_steps'"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        parse_config({"job": "a:B", **changes})


def test_a_run_does_not_go_on_with_other_local_steps(corpus: Path, tmp_path: Path) -> None:
    train_range(config_of(1, AVERAGE), str(tmp_path / "run"), "r", stop=1, data_folder=corpus)
    with pytest.raises(Invalid, match=r"local was .*'average'.*, is .*'nesterov'"):
        train_range(config_of(1, NESTEROV), str(tmp_path / "run"), "r", data_folder=corpus)
