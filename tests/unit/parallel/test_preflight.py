"""What a job does not give for its strategy is told by one process, before anything is scheduled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from tests.support.cuts import gpt_config, mnist_config, write_digits
from training.errors import Invalid
from training.job import Job, load_job
from training.jobs.char_gpt import CharGpt
from training.parallel.config import ParallelConfig
from training.parallel.preflight import check_cut
from training.process import _check


class Misspelt(CharGpt):
    """Its plan names what the model has not."""

    def tensor_plan(self, model: nn.Module) -> dict[str, Any]:
        return {**super().tensor_plan(model), "blocks.*.mlp_inn": ColwiseParallel()}


def gpt(**params: Any) -> Job[Any]:
    return load_job(gpt_config().job, {**gpt_config().params, **params}, None)


@pytest.mark.parametrize(
    "parallel",
    [
        {"world": 4, "data": "fsdp", "tensor": 2, "activation_checkpointing": True},
        {"world": 2, "tensor": 2, "sequence": True},
        {"world": 4, "pipeline": 2, "microbatches": 2, "data": "fsdp"},
    ],
)
def test_what_the_job_gives_is_enough(parallel: dict[str, Any]) -> None:
    job = gpt(n_layer=2)
    check_cut(job.model(), job, ParallelConfig(**parallel))


@pytest.mark.parametrize(
    ("parallel", "named"),
    [
        ({"world": 2, "tensor": 2}, "parallel.tensor needs a plan, and MnistCnn gives none"),
        ({"world": 2, "tensor": 2, "sequence": True}, "parallel.sequence needs a plan"),
        ({"world": 2, "activation_checkpointing": True}, "needs blocks, and MnistCnn names none"),
        ({"world": 2, "pipeline": 2, "microbatches": 2}, "parallel.pipeline needs inputs"),
    ],
)
def test_what_the_job_lacks_is_named_by_the_check_of_a_run(
    parallel: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = mnist_config(parallel=parallel, batch_size=8)
    question = {"config": config.model_dump(mode="json"), "data_folder": str(write_digits(tmp_path / "digits"))}
    with pytest.raises(Invalid, match=named):
        _check(question)


def test_an_entry_of_a_plan_that_stands_for_no_module_is_named() -> None:
    config = gpt_config()
    job = Misspelt(CharGpt.Params.model_validate(config.params), None)  # type: ignore[arg-type] # they are its own
    with pytest.raises(Invalid, match=r"tensor_plan\(\) of Misspelt has 'blocks\.\*\.mlp_inn'"):
        check_cut(job.model(), job, ParallelConfig(world=2, tensor=2))


def test_too_few_stages_are_named() -> None:
    job = gpt(n_layer=1)
    with pytest.raises(Invalid, match="stages"):
        check_cut(job.model(), job, ParallelConfig(world=4, pipeline=4, microbatches=4))
