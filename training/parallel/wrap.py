"""The job's model, cut over the ranks by torch's own means: DDP, FSDP2, hybrid sharding, tensor parallelism."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from training.errors import Invalid
from training.parallel.compression import Residuals, compress
from training.parallel.ranks import Ranks

if TYPE_CHECKING:
    from training.job import Job


def cut(model: nn.Module, job: Job[Any], ranks: Ranks, precision: str) -> tuple[nn.Module, Residuals | None]:
    """The model as this rank trains it, and the memory of a compression. Every rank comes with the same weights.

    Raises:
        Invalid: the strategy needs a plan, or blocks, that the job does not give.
    """
    config, mesh = ranks.config, ranks.mesh
    if config.tensor > 1:
        _share_layers(model, job, mesh["tp"], sequence=config.sequence)
    if config.activation_checkpointing:
        _recompute(model, job)
    if config.data == "ddp":
        if config.data_ranks == 1 or (config.local_steps > 1 and not config.local_after_steps):
            return model, None  # no gradient is ever summed
        # After its first step DDP puts gradients into other buckets, unless it looks for unused parameters. In a
        # ring of three the bucket says in which order a sum is taken: a resume would not be the same run.
        devices = [ranks.device] if ranks.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=devices, find_unused_parameters=True)
        return wrapped, compress(wrapped, config)
    names = ("replicate", "shard") if config.data == "hsdp" else ("dp",)
    _shard(model, job, mesh[names] if config.tensor > 1 or len(names) > 1 else mesh, precision)
    return model, None


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


def _shard(model: nn.Module, job: Job[Any], mesh: Any, precision: str) -> None:
    """Each block is gathered and freed by itself; the rest of the model as one."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh}
    if precision == "bf16":  # parameters stay in float32, and so do the sums of gradients
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in job.blocks(model):
        fully_shard(block, **options)
    fully_shard(model, **options)


def _share_layers(model: nn.Module, job: Job[Any], mesh: Any, *, sequence: bool) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    plan = job.sequence_plan(model, mesh.size()) if sequence else job.tensor_plan(model)
    if not plan:
        name, off = ("sequence", "false") if sequence else ("tensor", "1")
        raise Invalid(
            f"parallel.{name} needs a plan, and {type(job).__name__} gives none",
            hint=f"write {name}_plan() in the job, or set parallel.{name}={off}",
        )
    parallelize_module(model, mesh, plan)


def _recompute(model: nn.Module, job: Job[Any]) -> None:
    from torch.distributed._composable.checkpoint_activation import checkpoint  # changes no name of a parameter

    blocks = job.blocks(model)
    if not blocks:
        raise Invalid(
            f"parallel.activation_checkpointing needs blocks, and {type(job).__name__} names none",
            hint="write blocks() in the job, or set parallel.activation_checkpointing=false",
        )
    for block in blocks:
        checkpoint(block)
