"""The job's model, cut over the ranks by torch's own means.

DDP, FSDP2, hybrid sharding, tensor parallelism, pipelines.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.checkpoint.state.parts import PIPELINE
from training.config import JobConfig
from training.parallel.compression import Residuals, compress
from training.parallel.division import Division, divide
from training.parallel.plans import recomputed_blocks, sharing_plan
from training.parallel.ranks import Ranks
from training.parallel.stages import Stages

if TYPE_CHECKING:
    from training.job import Job
    from training.parallel.pipeline import Autocast, Pipeline


@dataclass(frozen=True)
class Cut:
    """A model as one rank trains it.

    Attributes:
        model: to be trained.
        residuals: memory of a compression.
        pipeline: takes the steps, if the model is one of its stages, or several.
        division: who holds what of the whole model then.
    """

    model: nn.Module
    residuals: Residuals | None = None
    pipeline: Pipeline | None = None
    division: Division | None = None


def cut(model: nn.Module, job: Job[Any], ranks: Ranks, training: JobConfig, autocast: Autocast) -> Cut:
    """Every rank comes with the whole model and the same weights.

    Raises:
        Invalid: the strategy needs a plan, blocks or stages that the job does not give.
    """
    config, mesh = ranks.config, ranks.mesh
    if config.tensor > 1:
        from torch.distributed.tensor.parallel import parallelize_module

        parallelize_module(model, mesh["tp"], sharing_plan(model, job, config))
    if config.activation_checkpointing:
        from torch.distributed._composable.checkpoint_activation import checkpoint  # changes no parameter's name

        for block in recomputed_blocks(model, job):
            checkpoint(block)
    if config.pipeline > 1:
        return _pipe(model, job, ranks, training, autocast)
    if config.data == "ddp":
        if config.data_ranks == 1 or (config.local_steps > 1 and not config.local_after_steps):
            return Cut(model)  # no gradient is ever summed
        wrapped = _replicate(model, ranks)
        return Cut(wrapped, compress(wrapped, config))
    names = ("replicate", "shard") if config.data == "hsdp" else ("dp",)
    _shard(model, job.blocks(model), mesh[names] if mesh.ndim > len(names) else mesh, training.precision)
    return Cut(model)


def _pipe(model: nn.Module, job: Job[Any], ranks: Ranks, training: JobConfig, autocast: Autocast) -> Cut:
    """The stages of this rank, replicated or sharded over its data-parallel ranks; the other stages are let go."""
    from training.parallel.pipeline import Pipeline

    config, blocks = ranks.config, job.blocks(model)
    stages, division = divide(model, job, ranks)
    wrapped: dict[int, nn.Module] = {}
    for number in range(ranks.place, config.stages, config.pipeline):
        stage = stages[number].to(ranks.device)
        if config.data == "fsdp":
            inside = set(stage.modules())
            own = [block for block in blocks if block in inside]
            _shard(stage, own, ranks.mesh["dp"], training.precision, reshard_after_forward=False)
        elif config.data_ranks > 1 and any(parameter.requires_grad for parameter in stage.parameters()):
            stage = _replicate(stage, ranks)
        wrapped[number] = stage
    group = ranks.mesh[PIPELINE].get_group()
    held = Stages(wrapped, config.stages, group, config.microbatches, ranks.device)
    pipeline = Pipeline(held, division, job, ranks, training.batch_size, autocast)
    return Cut(held, pipeline=pipeline, division=division)


def without_sync(model: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Around a micro-batch: gradients are summed over the ranks after the last one of a step only."""
    if isinstance(model, DistributedDataParallel):
        return nullcontext() if last else cast("AbstractContextManager[None]", model.no_sync())
    if hasattr(model, "set_requires_gradient_sync"):
        cast("Any", model).set_requires_gradient_sync(last)
    return nullcontext()


def replica(model: nn.Module) -> nn.Module:
    """The model without what sums its gradients over the ranks, or compares anything else between them."""
    return cast("nn.Module", model.module) if isinstance(model, DistributedDataParallel) else model


def _replicate(model: nn.Module, ranks: Ranks) -> DistributedDataParallel:
    # After its first step DDP puts gradients into other buckets, unless it looks for unused parameters. In a
    # ring of three the bucket says in which order a sum is taken: a resume would not be the same run.
    return DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        process_group=ranks.mesh["dp"].get_group() if ranks.mesh.ndim > 1 else None,
        find_unused_parameters=True,
    )


def _shard(model: nn.Module, blocks: list[nn.Module], mesh: Any, precision: str, **options: Any) -> None:
    """Each block is gathered and freed by itself; the rest of the model as one."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options["mesh"] = mesh
    if precision == "bf16":  # parameters stay in float32, and so do the sums of gradients
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
