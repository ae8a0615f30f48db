"""The stages that a job makes are the whole model, each tensor of it once, or what is wrong is named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from training.checkpoint.state.pooled import Pooled
from training.errors import Invalid
from training.job import Job, Params
from training.jobs.char_gpt import CharGpt, GptParams
from training.parallel.config import ParallelConfig
from training.parallel.division import Division, divide

SMALL = GptParams(n_layer=4, n_head=2, d_model=16, context=8)


def gpt() -> CharGpt:
    return CharGpt(SMALL, None)


def division_of(
    job: Job[Any], rank: int, model: nn.Module | None = None, **parallel: Any
) -> tuple[list[nn.Module], Division]:
    config = ParallelConfig.model_validate({"world": 2, "pipeline": 2, "microbatches": 2, **parallel})
    place = rank // (config.world // config.pipeline)
    ranks: Any = SimpleNamespace(rank=rank, size=config.world, config=config, place=place)
    return divide(model or job.model(), job, ranks)


def captured(stages: list[nn.Module]) -> dict[str, Any]:
    """As a rank captures its stages, before the first names are put in."""
    model = {name: value for stage in stages for name, value in stage.state_dict(keep_vars=True).items()}
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    state = {name: {"exp_avg": torch.zeros(1)} for name in names}
    return {"model": model, "optimizer": {"kind": "AdamW", "state": state, "groups": [{"lr": 1, "params": names}]}}


def test_stages_keep_the_names_of_the_model_and_share_its_tensors() -> None:
    model = gpt().model()
    stages, _ = division_of(gpt(), 0, model)
    whole = dict(model.named_parameters(remove_duplicate=False))
    parts = [dict(stage.named_parameters(remove_duplicate=False)) for stage in stages]
    assert {name for part in parts for name in part} == whole.keys()
    assert all(part[name] is whole[name] for part in parts for name in part)
    tokens = torch.randint(256, (2, 8))
    hidden = tokens
    for stage in stages:
        hidden = stage(hidden)
    assert torch.equal(hidden, model(tokens))


def test_a_tied_tensor_is_saved_by_those_that_have_its_first_name_and_needed_by_all_that_use_it() -> None:
    model, job = gpt().model(), gpt()
    first_stages, first = division_of(job, 0, model, world=4)
    last_stages, last = division_of(job, 2, model, world=4)
    assert first.tied == {"token.weight": (0, 1)}
    assert first.holders("model/token.weight") == last.holders("model/token.weight") == (0, 1)
    assert first.holders("optimizer/state/head.weight/exp_avg") == (0, 1)
    assert first.holders("model/blocks.3.qkv.weight") == (2, 3)
    assert first.holders("scheduler/base_lrs") == (0, 1, 2, 3)
    of_first, of_last = first.pool(captured(first_stages[:1])), last.pool(captured(last_stages[1:]))
    assert {"token.weight", "head.weight"} <= of_first["model"].value.keys()
    assert not {"token.weight", "head.weight"} & of_last["model"].value.keys()
    assert "token.weight" in of_last["optimizer"]["groups"][0]["params"].value
    assert not {"token.weight", "head.weight"} & of_last["optimizer"]["state"].value.keys()
    together = of_first["model"].value.keys() | of_last["model"].value.keys()
    assert together == set(model.state_dict())
    assert last.key("optimizer/state/token.weight/exp_avg") == "optimizer/state/head.weight/exp_avg"
    assert last.key("model/token.weight") == "model/head.weight"
    assert last.key("model/position.weight") is None
    assert last.key("model/of another model") == "model/of another model"


def test_a_rank_takes_its_part_of_a_whole_state_under_its_own_names() -> None:
    model, job = gpt().model(), gpt()
    stages, last = division_of(job, 1, model)
    whole = captured([model])
    whole["model"]["unknown"] = torch.zeros(1)
    part = last.part(whole)
    own = {name for name, _ in stages[1].named_parameters()}
    assert part["model"].keys() == stages[1].state_dict().keys() | {"unknown"}
    assert part["optimizer"]["state"].keys() == own
    assert set(part["optimizer"]["groups"][0]["params"]) == own


def test_order_is_that_of_the_whole_model() -> None:
    model, job = gpt().model(), gpt()
    stages, division = division_of(job, 1, model)
    pooled = division.pool(captured(stages[1:]))["model"]
    assert isinstance(pooled, Pooled)
    assert list(pooled.order) == list(model.state_dict())


class Made(Job[Params]):
    """Stages as a test wants them."""

    made: list[nn.Module]

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    optimizer = train_data = loss = evaluate = None  # type: ignore[assignment]

    def stages(self, model: nn.Module, count: int) -> list[nn.Module]:
        return self.made

    def inputs(self, batch: Any) -> torch.Tensor:
        return batch  # type: ignore[no-any-return]

    def loss_of(self, output: Any, batch: Any) -> torch.Tensor:
        return output  # type: ignore[no-any-return]


class Without(CharGpt):
    loss_of = Job.loss_of


def named(**modules: nn.Module) -> nn.Module:
    return nn.ModuleDict({name.removeprefix("n"): module for name, module in modules.items()})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: [], "needs 2 stages, and Made gives none"),
        (lambda m: [m], "needs 2 stages, and Made gives 1"),
        (lambda m: [named(n0=m[0]), named(n2=m[1])], "stage 1 has '2.weight', and the model has not"),
        (lambda m: [named(n0=m[0]), named(n1=nn.Linear(2, 2))], "'1.weight' of stage 1 is not the model's own"),
        (lambda m: [named(n0=m[0]), nn.Identity()], "no stage has '1.weight'"),
    ],
)
def test_stages_that_do_not_make_up_the_model_are_refused_by_name(make: Any, message: str) -> None:
    job = Made(Params(), None)
    model = job.model()
    job.made = make(model)
    with pytest.raises(Invalid, match=message):
        division_of(job, 0, model)


def test_a_job_that_cannot_be_cut_is_refused_by_name() -> None:
    with pytest.raises(Invalid, match=r"needs loss_of\(\), and Without has none"):
        division_of(Without(SMALL, None), 0)
    with pytest.raises(Invalid, match="5 stages for 4 blocks"):
        division_of(gpt(), 0, world=5, pipeline=5, microbatches=5)


def test_two_stages_of_one_rank_cannot_share_a_tensor_that_is_replicated_or_sharded() -> None:
    job = Made(Params(), None)
    model: Any = job.model()
    job.made = [named(n0=model[0]), named(n1=model[1]), named(n0=model[0]), nn.Identity()]
    interleaved = {"schedule": "interleaved", "stages_per_rank": 2}
    division_of(job, 0, model, **interleaved)
    with pytest.raises(Invalid, match=r"two stages of the same rank hold '0.weight', which ddp cannot share"):
        division_of(job, 0, model, world=4, **interleaved)
