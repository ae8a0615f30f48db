"""Training steps of a pipeline, by torch's own schedules.

GPipe (Huang et al., NeurIPS 2019) computes all forward passes first; 1F1B (Narayanan et al., SOSP 2019) takes turns
and keeps fewer activations; interleaved 1F1B (Narayanan et al., SC 2021) gives each rank several stages, and idles
less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from training.checkpoint.state.parts import PIPELINE, is_sharded
from training.data import rows
from training.parallel.division import Division
from training.parallel.ranks import Ranks
from training.parallel.stages import Stages

if TYPE_CHECKING:
    from training.job import Job

Autocast = Callable[[], AbstractContextManager[Any]]


class Pipeline:
    """What a rank does in it.

    Args:
        stages: of this rank.
        division: of the model.
        job: gives inputs and loss.
        ranks: where this rank stands.
        batch_size: samples of a micro-batch of the group.
        autocast: precision of the forward passes.
    """

    def __init__(
        self, stages: Stages, division: Division, job: Job[Any], ranks: Ranks, batch_size: int, autocast: Autocast
    ) -> None:
        config, self._job, self._ranks = ranks.config, job, ranks
        self._count = batch_size // config.data_ranks  # samples of each rank, in so many pieces
        self._pieces, self._autocast = config.microbatches, autocast
        self._parts: list[
            tuple[Any, int, float]
        ] = []  # of each piece what counts, how many samples, and its weight
        group = ranks.mesh[PIPELINE].get_group()
        self._stages = [
            _Stage(module, int(number), config.stages, ranks.device, group, autocast)
            for number, module in stages.wrapped.items()
        ]
        self._is_first, self._is_last = self._stages[0].is_first, self._stages[-1].is_last
        options: dict[str, Any] = {
            "n_microbatches": self._pieces,
            "loss_fn": self._loss_of_piece,
            "scale_grads": False,  # the weights of the pieces do it
        }
        self._schedule: Any
        if config.schedule == "interleaved":
            self._schedule = ScheduleInterleaved1F1B(cast("Any", self._stages), **options)
        else:
            kind = ScheduleGPipe if config.schedule == "gpipe" else Schedule1F1B
            self._schedule = kind(self._stages[0], **options)
        self._tied = _tied_parameters(stages, division, ranks)
        self._counted_elsewhere = {
            id(parameter) for name, parameter in stages.named_parameters() if not division.saves(name)
        }

    def step(self, batch: Any, samples: int, window_samples: int, *, last: bool) -> Tensor:
        """Forward and backward passes of one micro-batch.

        Args:
            batch: collated, on the device; the same on all ranks of a pipeline.
            samples: of it that count; the others are there for their shape.
            window_samples: of the whole optimizer step.
            last: whether it is the last micro-batch of the step: gradients are summed over the ranks then.

        Returns:
            This rank's part of the loss: 0 where the last stage is not.
        """
        loaded = max(samples, 1)
        if loaded < self._count:  # at the end of an epoch
            batch = rows(batch, torch.arange(self._count, device=self._ranks.device).clamp(max=loaded - 1))
        size, data_ranks = self._count // self._pieces, self._ranks.config.data_ranks
        self._parts = []
        for start in range(0, self._count, size):
            counting = min(max(samples - start, 0), size)
            kept = max(counting, 1)  # there is a loss of every piece, if only with weight zero
            weight = counting / window_samples * data_ranks  # gradients are averaged over these ranks
            self._parts.append((rows(batch, slice(start, start + kept)), kept, weight))
        inputs = self._job.inputs(batch) if self._is_first else ()
        losses: list[Tensor] = []
        for stage in self._stages:
            stage.sums = last
        self._schedule.step(
            *(inputs if isinstance(inputs, tuple) else (inputs,)),
            target=torch.arange(self._pieces),
            losses=losses,
            return_outputs=False,
        )
        self._parts = []
        total = torch.zeros((), device=self._ranks.device)
        for loss in losses:
            total += loss.detach() / data_ranks
        if last:
            self._sum_tied()
        return total

    def begin(self) -> None:
        """Before the first micro-batch of an optimizer step: the ranks of a stage have the same buffers."""
        for stage in self._stages:
            if isinstance(stage.submod, DistributedDataParallel):
                stage.submod.require_forward_param_sync = True  # within no_sync DDP leaves them alone otherwise

    def total_norm(self, of_rank: Tensor) -> Tensor:
        """The norm of the gradients of all stages, from that of those which this rank counts."""
        squared = of_rank.double().square()
        dist.all_reduce(squared, group=self._ranks.mesh[PIPELINE].get_group())
        return squared.sqrt().to(of_rank.dtype)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank counts a parameter, of those that hold it tied."""
        return id(parameter) not in self._counted_elsewhere

    def _loss_of_piece(self, output: Any, number: Tensor) -> Tensor:
        """Of the samples that count; `number` stands for the target, which may be any batch."""
        piece, kept, weight = self._parts[int(number)]
        with self._autocast():
            return self._job.loss_of(rows(output, slice(0, kept)), piece) * weight

    def _sum_tied(self) -> None:
        """A tensor that several stages use has the sum of its gradients in each of them."""
        for group, parameters in self._tied:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = parameter.grad
                dist.all_reduce(cast("Any", gradient).to_local() if is_sharded(gradient) else gradient, group=group)


class _Stage(PipelineStage):
    """A stage of torch's, in the precision of the training, that sums its gradients when it is told to.

    Attributes:
        sums: gradients are summed over the data-parallel ranks after the last piece.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        count: int,
        device: torch.device,
        group: dist.ProcessGroup,
        autocast: Autocast,
    ) -> None:
        super().__init__(module, number, count, device, group=group)
        self.sums = True
        self._autocast = autocast

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """See `PipelineStage`."""
        with self._autocast():
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """See `PipelineStage`."""
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward and self.sums)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """See `PipelineStage`."""
        if self.sums:
            super().perform_reduce_grad(grad_scale_factor)

    def _compute_outputs(self, *args: Tensor, module: nn.Module, **kwargs: Any) -> Any:
        """A first pass of which torch keeps the shapes only: a resumed run has it, and a straight one has not."""
        inner = module.module if isinstance(module, DistributedDataParallel) else module
        with self._autocast(), _same_buffers(inner):
            return super()._compute_outputs(*args, module=inner, **kwargs)


@contextmanager
def _same_buffers(module: nn.Module) -> Iterator[None]:
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    yield
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if not torch.equal(buffer, before[name]):
                buffer.copy_(before[name])


def _tied_parameters(
    stages: Stages, division: Division, ranks: Ranks
) -> list[tuple[dist.ProcessGroup, list[nn.Parameter]]]:
    """The trained tensors that this rank shares with other places, by the group of the ranks that have the same.

    Every rank makes all groups, in the same order.
    """
    mine: Mapping[str, nn.Parameter] = dict(stages.named_parameters(remove_duplicate=False))
    found = []
    for places in sorted({tuple(sorted(places)) for places in division.tied.values()}):
        names = sorted(name for name, held in division.tied.items() if tuple(sorted(held)) == places)
        for members in zip(*(division.ranks[place] for place in places), strict=True):
            group = dist.new_group(members)
            if ranks.rank in members:
                held = [mine[local] for name in names if (local := division.local(name) or "") in mine]
                found.append((group, [parameter for parameter in held if parameter.requires_grad]))
    return found
