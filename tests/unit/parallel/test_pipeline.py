"""A pipeline trains, evaluates and saves what one rank alone does, whatever its schedule and other dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch

from tests.support.cuts import gpt_config, write_corpus
from tests.support.gang import gang
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.history import read_lineage
from training.checkpoint.manifest import Position
from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.restore import restore_newest
from training.checkpoint.store import LocalStore
from training.config import JobConfig, parse_config
from training.errors import Invalid
from training.parallel.ranks import standing
from training.ports import Done
from training.session import describe, train_range
from training.stopping import StopRequest
from training.trainer import Step, Trainer

pytestmark = pytest.mark.xdist_group("ranks")  # each of them needs more processes than there are cores
TWO = {"world": 2, "pipeline": 2, "microbatches": 2}
FOUR = {**TWO, "world": 4}
CUTS: dict[str, dict[str, Any]] = {
    "gpipe": {**TWO, "schedule": "gpipe", "microbatches": 1},
    "1f1b": TWO,
    "1f1b-recomputed": {**TWO, "activation_checkpointing": True},
    "1f1b3": {"world": 3, "pipeline": 3, "microbatches": 4},
    "interleaved": {**TWO, "schedule": "interleaved", "stages_per_rank": 2},
    "ddp": FOUR,
    "fsdp": {**FOUR, "data": "fsdp"},
    "tp": {**FOUR, "tensor": 2},
    "interleaved-ddp": {**FOUR, "schedule": "interleaved", "stages_per_rank": 2},
    "interleaved-fsdp": {**FOUR, "data": "fsdp", "schedule": "interleaved", "stages_per_rank": 2},
    "tp-fsdp": {**TWO, "world": 8, "tensor": 2, "data": "fsdp"},
}
OTHERS = {"alone": {}, "fsdp-only": {"world": 2, "data": "fsdp"}}
# relative to the largest weight; sums over ranks come in another order, and Adam makes small gradients large
ROUNDING = 2e-4
Arrays = dict[str, np.ndarray[Any, Any]]


def config_of(cut: str, **changes: Any) -> JobConfig:
    """Six steps on 12 and 2 samples in turn, without dropout, whose masks are each rank's own; four blocks."""
    params = {**gpt_config().params, "dropout": 0.0, "n_layer": 4}
    parallel = {**CUTS, **OTHERS}[cut]
    return gpt_config(**{"parallel": parallel, "params": params, "clip_grad_norm": 0.5, **changes})


class Told(Trainer):
    """Keeps the loss of each step, as this rank knows it."""

    losses: ClassVar[list[float]] = []

    def agree(self, position: Position, loss: torch.Tensor, stop: StopRequest) -> list[Step]:
        known = super().agree(position, loss, stop)
        self.losses.extend(float(step.loss) for step in known)
        return known


def train(
    exchange: Exchange | None, config: JobConfig, store: str, data: str, stop: int | None = None
) -> tuple[Done, list[float]]:
    """A range on one rank: its last word, and the losses of its steps."""
    ranks = standing(config.parallel, exchange, torch.device("cpu")) if exchange is not None else None
    Told.losses.clear()
    with mock.patch("training.session.Trainer", Told):
        done = train_range(config, store, "r", stop=stop, data_folder=Path(data), ranks=ranks)
    return done, [*Told.losses]


def weights(store: Path) -> Arrays:
    found = restore_newest(LocalStore(store), "r")
    assert found is not None
    return {name: value.numpy() for name, value in found["model"].items()}


class Alone:
    """What one rank alone comes to."""

    def __init__(self, folder: Path) -> None:
        self.corpus = write_corpus(folder / "corpus")
        self.store = folder / "store"
        self.done, self.losses = train(None, config_of("alone"), str(self.store), str(self.corpus))
        self.weights = weights(self.store)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


QUICK = ("1f1b",)
COUNTING = {"job": "tests.support.counting_gpt:CountingGpt"}
SLOW = [pytest.param(name, marks=pytest.mark.soak) for name in CUTS if name not in QUICK]


@pytest.mark.parametrize("cut", [*QUICK, *SLOW])
def test_a_pipeline_trains_as_one_rank_alone_and_resumes_to_the_bit(cut: str, alone: Alone, tmp_path: Path) -> None:
    config, world, corpus = config_of(cut), CUTS[cut]["world"], str(alone.corpus)
    straight = gang(world, train, config, str(tmp_path / "straight"), corpus, 3)
    gang(world, train, config, str(tmp_path / "cut"), corpus, 1)
    resumed = gang(world, train, config, str(tmp_path / "cut"), corpus, 3)
    assert {done.state_digest for done, _ in resumed} == {done.state_digest for done, _ in straight}
    assert len({done.state_digest for done, _ in straight}) == 1
    kinds = [c.manifest.kind for c in read_lineage(LocalStore(tmp_path / "cut")).chain]
    assert kinds[-1] == "delta"
    found = weights(tmp_path / "straight")
    assert list(found) == list(alone.weights)
    for name, value in alone.weights.items():
        assert np.abs(found[name] - value).max() <= ROUNDING * max(np.abs(value).max(), 1e-3), name
    done, losses = straight[0]
    assert all((other.metrics, told) == (done.metrics, losses) for other, told in straight), (
        "the same on every rank"
    )
    assert losses == pytest.approx(alone.losses, rel=1e-4)
    assert done.metrics == pytest.approx(alone.done.metrics, rel=1e-4)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("cut", "changes"),
    [
        ("1f1b", COUNTING),
        ("ddp", COUNTING),
        ("interleaved", {"precision": "bf16"}),
        ("fsdp", {"precision": "bf16"}),
    ],
)
def test_buffers_and_half_precision_resume_to_the_bit(
    cut: str, changes: dict[str, Any], alone: Alone, tmp_path: Path
) -> None:
    config, world, corpus = config_of(cut, **changes), CUTS[cut]["world"], str(alone.corpus)
    straight = gang(world, train, config, str(tmp_path / "straight"), corpus, 3)
    gang(world, train, config, str(tmp_path / "cut"), corpus, 1)
    resumed = gang(world, train, config, str(tmp_path / "cut"), corpus, 3)
    assert {done.state_digest for done, _ in [*resumed, *straight]} == {straight[0][0].state_digest}
    one, _ = train(None, config_of("alone", **changes), str(tmp_path / "alone"), corpus)
    assert straight[0][0].metrics == pytest.approx(one.metrics, rel=0.03), "buffers see other pieces"


def move(exchange: Exchange | None, config: JobConfig, store: str, data: str) -> None:
    """Restore a run, and save it again as it is."""
    ranks = standing(config.parallel, exchange, torch.device("cpu")) if exchange is not None else None
    trainer = Trainer(config, Path(data), ranks)
    split = trainer.must_be_finite
    holders_of, job = trainer.state.holders_of, describe(config)
    with IncrementalCheckpointer(
        store, run="r", group=exchange, split=split, holders_of=holders_of, job=job
    ) as saver:
        restored = saver.restore(trainer.state.box)
        assert restored is not None
        trainer.state.apply(restored, restored.manifest.world_size)
        saver.save(trainer.state.capture(), position=restored.position)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of a state but the random generators, which are each rank's own, by its path."""
    if isinstance(value, dict):
        return {
            k: v
            for key, child in value.items()
            if key != "randomness"
            for k, v in flat(child, f"{path}/{key}").items()
        }
    if isinstance(value, list):
        return {k: v for place, child in enumerate(value) for k, v in flat(child, f"{path}/{place}").items()}
    return {path: value.numpy().tobytes() if isinstance(value, torch.Tensor) else value}


ROUTES = ["1f1b alone fsdp-only 1f1b", "alone interleaved ddp alone", "tp interleaved-fsdp 1f1b3 fsdp"]


@pytest.mark.soak
@pytest.mark.parametrize("route", ROUTES)
def test_a_state_moves_between_pipelines_and_other_cuts_to_the_bit(
    route: str, alone: Alone, tmp_path: Path
) -> None:
    first, *others = route.split()
    store, corpus = str(tmp_path / "store"), str(alone.corpus)

    def run(work: Any, cut: str, *arguments: Any) -> None:
        if cut == "alone":
            work(None, config_of(cut), store, corpus, *arguments)
        else:
            world: Any = config_of(cut).parallel.world
            gang(world, work, config_of(cut), store, corpus, *arguments)

    run(train, first, 1)
    expected: Any = restore_newest(LocalStore(store), "r")
    one: Any = restore_newest(LocalStore(alone.store), "r")
    assert flat(expected).keys() == flat(one).keys(), "as one process has it"
    assert list(flat(expected["model"])) == list(flat(one["model"])), "and in its order"
    for cut in others:
        run(move, cut)
        found = restore_newest(LocalStore(store), "r")
        assert flat(found) == flat(expected), cut
    run(train, others[-1], 2)


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        ({"world": 4, "pipeline": 3}, "world 4 is no multiple of pipeline 3 times tensor 1"),
        ({"world": 2, "microbatches": 2}, "microbatches belongs to a pipeline"),
        ({"world": 2, "schedule": "gpipe"}, "schedule belongs to a pipeline"),
        ({**TWO, "microbatches": 1}, "1f1b needs at least 2, or take schedule: gpipe"),
        ({**TWO, "schedule": "interleaved"}, "stages_per_rank 1 with schedule interleaved"),
        ({**TWO, "stages_per_rank": 2}, "stages_per_rank 2 with schedule 1f1b"),
        (
            {**TWO, "microbatches": 5, "schedule": "interleaved", "stages_per_rank": 2},
            "microbatches 5 do not fall into 2 equal rounds of interleaved; take a multiple of pipeline 2",
        ),
        ({**FOUR, "compression": "powersgd"}, "a pipeline and compression: powersgd cannot be combined"),
        ({**TWO, "world": 8, "data": "hsdp", "replicas": 2}, "a pipeline and data: hsdp cannot be combined"),
        ({**TWO, "world": 8, "tensor": 2}, "needs data: fsdp"),
    ],
)
def test_a_pipeline_that_cannot_be_made_is_refused_by_name(parallel: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        parse_config({"job": "a:B", "parallel": parallel})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"batch_size": 6, "parallel": FOUR}, "batch_size 6 is no multiple of 4, the pieces that"),
        ({"precision": "fp16", "parallel": TWO}, "pipeline scales no loss for fp16; take precision: bf16"),
    ],
)
def test_a_training_that_no_pipeline_can_take_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        parse_config({"job": "a:B", **changes})
