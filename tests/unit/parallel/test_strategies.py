"""Every strategy trains what one rank alone trains, and resumes to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.cuts import gpt_config, write_corpus
from tests.support.gang import gang
from training.checkpoint.manifest import Position
from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.restore import restore_newest
from training.checkpoint.store import LocalStore
from training.config import JobConfig, parse_config
from training.errors import Invalid
from training.jobs.char_gpt import CharGpt, GptParams
from training.parallel.ranks import standing
from training.session import train_range
from training.trainer import Trainer

pytestmark = pytest.mark.xdist_group("ranks")  # each of them needs more processes than there are cores
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"world": 2},
    "ddp3": {"world": 3},
    "ddp-recomputed": {"world": 2, "activation_checkpointing": True},
    "ddp-fp16": {"world": 2, "compression": "fp16"},
    "ddp-powersgd": {"world": 2, "compression": "powersgd", "powersgd_start_steps": 2},
    "fsdp": {"world": 3, "data": "fsdp"},
    "fsdp-recomputed": {"world": 2, "data": "fsdp", "activation_checkpointing": True},
    "hsdp": {"world": 4, "data": "hsdp", "replicas": 2},
    "tp": {"world": 2, "tensor": 2},
    "tp-fsdp": {"world": 4, "data": "fsdp", "tensor": 2},
    "sequence": {"world": 2, "tensor": 2, "sequence": True},
    "sequence-recomputed": {"world": 2, "tensor": 2, "sequence": True, "activation_checkpointing": True},
    "sequence-fsdp": {"world": 4, "data": "fsdp", "tensor": 2, "sequence": True},
}
# relative to the largest weight; sums over ranks come in another order, and Adam makes small gradients large
ROUNDING = 2e-4
TOLERANCE = {"ddp-fp16": 0.05, "ddp-powersgd": 0.5}


def config_of(strategy: str, **changes: Any) -> JobConfig:
    """Six steps without dropout, whose masks are each rank's own; the gradients are clipped."""
    parallel = STRATEGIES.get(strategy, {})
    params = {**gpt_config().params, "dropout": 0.0}
    return gpt_config(parallel=parallel, params=params, clip_grad_norm=0.5, **changes)


def train(exchange: Exchange, config: JobConfig, store: str, data: str, stop: int) -> str:
    """A range on one rank. Returns the digest of the state."""
    ranks = standing(config.parallel, exchange, torch.device("cpu"))
    return train_range(config, store, "r", stop=stop, data_folder=Path(data), ranks=ranks).state_digest


def weights(store: Path) -> dict[str, np.ndarray[Any, Any]]:
    found = restore_newest(LocalStore(store), "r")
    assert found is not None
    return {name: value.numpy() for name, value in found["model"].items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray[Any, Any]]]:
    """The corpus, and the weights that one rank alone ends with."""
    folder = tmp_path_factory.mktemp("alone")
    corpus = write_corpus(folder / "corpus")
    train_range(config_of("alone"), str(folder / "store"), "r", data_folder=corpus)
    return corpus, weights(folder / "store")


QUICK = ("ddp3",)  # the others need as long, and go to `make soak`


SLOW = [pytest.param(name, marks=pytest.mark.soak) for name in STRATEGIES if name not in QUICK]


@pytest.mark.parametrize("strategy", [*QUICK, *SLOW])
def test_a_strategy_trains_as_one_rank_alone_and_resumes_to_the_bit(
    strategy: str, alone: tuple[Path, dict[str, np.ndarray[Any, Any]]], tmp_path: Path
) -> None:
    corpus, expected = alone
    config, world = config_of(strategy), STRATEGIES[strategy]["world"]
    straight = gang(world, train, config, str(tmp_path / "straight"), str(corpus), 3)
    assert len(set(straight)) == 1
    gang(world, train, config, str(tmp_path / "cut"), str(corpus), 1)
    resumed = gang(world, train, config, str(tmp_path / "cut"), str(corpus), 3)
    assert resumed == straight
    found = weights(tmp_path / "straight")
    for name, value in expected.items():
        limit = TOLERANCE.get(strategy, ROUNDING) * max(np.abs(value).max(), 1e-3)
        assert np.abs(found[name] - value).max() <= limit, name


def shapes_seen(exchange: Exchange, config: JobConfig, data: str) -> dict[str, Any]:
    """What this rank holds of the activations of a step: local shapes, and how those are cut that tell."""
    trainer = Trainer(config, Path(data), standing(config.parallel, exchange, torch.device("cpu")))
    seen: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            local = output.to_local() if hasattr(output, "to_local") else output
            seen[name] = (tuple(local.shape), str(getattr(output, "placements", "")))

        return hook

    for name in ("blocks.0", "blocks.0.mlp_norm", "blocks.0.drop", "blocks.0.qkv", "head"):
        trainer.model.get_submodule(name).register_forward_hook(note(name))
    trainer.optimizer_step(trainer.batches(Position()), 4)
    return seen


def test_ranks_that_share_the_sequence_hold_a_part_of_it(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    for seen in gang(2, shapes_seen, config_of("sequence"), str(corpus)):
        assert seen == {
            "blocks.0": ((4, 8, 16), ""),  # samples, bytes, width; a context has 16 bytes
            "blocks.0.mlp_norm": ((4, 8, 16), "(Shard(dim=1),)"),
            "blocks.0.drop": ((4, 8, 16), ""),
            "blocks.0.qkv": ((4, 16, 48), ""),
            "head": ((4, 16, 256), ""),
        }


def test_a_sequence_that_has_no_equal_parts_is_refused_by_name() -> None:
    job = CharGpt(GptParams(context=15), None)
    with pytest.raises(Invalid, match="context 15 is no multiple"):
        job.sequence_plan(job.model(), 2)


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        ({"world": 3, "tensor": 2}, "world 3 is no multiple of tensor 2"),
        ({"world": 4, "data": "hsdp"}, "hsdp needs replicas >= 2"),
        ({"world": 2, "replicas": 2}, "replicas belong to hsdp, not to ddp"),
        ({"world": 2, "data": "fsdp", "compression": "fp16"}, "compression fp16 is a hook of ddp"),
        ({"world": 4, "tensor": 2}, "needs data: fsdp"),
        ({"world": 2, "sequence": True}, "sequence belongs to tensor >= 2"),
        ({"wrold": 2}, "unknown key 'parallel.wrold'; did you mean 'world'"),
    ],
)
def test_a_cut_that_cannot_be_made_is_refused_by_name(parallel: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        parse_config({"job": "a:B", "parallel": parallel})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"checkpoint": {"every_steps": "auto"}}, "every_steps as a number"),
        ({"checkpoint": {"every_seconds": 3}}, "no every_seconds"),
        ({"checkpoint": {"on_busy": "skip"}}, "on_busy: wait"),
        ({"precision": "fp16", "parallel": {"world": 2, "data": "fsdp"}}, "take precision: bf16"),
    ],
)
def test_what_ranks_could_not_agree_on_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(Invalid, match=named):
        parse_config({"job": "a:B", "parallel": {"world": 2}, **changes})
