"""Steps that each rank takes for itself, and the synchronisations that make its replicas one again.

`average` is post-local SGD (Lin et al., ICLR 2020, arXiv 1808.07217): all go on from the mean of their weights.
`nesterov` is DiLoCo (Douillard et al., arXiv 2311.08105): the mean of what they have changed is the gradient of an
outer step with momentum. Either way all weights are the same after a synchronisation, and only then a checkpoint is
taken. The moments of the inner optimizer are each rank's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.utils import _sync_params_and_buffers

from training.parallel.config import ParallelConfig
from training.state import trained_parameters, unwrapped

_BROADCAST_BYTES = 256 * 1024 * 1024


class LocalSteps:
    """Counts the steps of a rank, and synchronises its weights with those of the others when it is time.

    Args:
        model: whose trained parameters, and buffers, are kept together.
        config: after how many steps, and how.
        ranks: of the group; 1: there is none.
    """

    def __init__(self, model: nn.Module, config: ParallelConfig, ranks: int) -> None:
        self._model, self._config, self._ranks = unwrapped(model), config, ranks
        trained = trained_parameters(model)
        self._names, self._parameters = list(trained), cast("list[Tensor]", list(trained.values()))
        self._step = self._alone = 0  # steps of the run, and of them since the last synchronisation
        self._anchors: list[Tensor] = []
        self._outer: torch.optim.SGD | None = None
        if config.outer == "nesterov":
            self._anchors = [parameter.detach().clone() for parameter in self._parameters]
            self._outer = torch.optim.SGD(
                self._anchors, lr=config.outer_lr, momentum=config.outer_momentum, nesterov=True
            )
            for anchor in self._anchors:  # SGD would make it in its first step: so the structure never changes
                self._outer.state[anchor]["momentum_buffer"] = torch.zeros_like(anchor)

    @property
    def sums_gradients(self) -> bool:
        """Whether the next step is one of all ranks, on the sum of their gradients."""
        return self._step < self._config.local_after_steps

    @property
    def is_synchronised(self) -> bool:
        """Whether all ranks have the same weights now."""
        return self._alone == 0

    @property
    def round_steps(self) -> int:
        """Steps until the next synchronisation, at most."""
        return 1 if self.sums_gradients else self._config.local_steps - self._alone

    @property
    def moments_differ(self) -> bool:
        """Whether each of several ranks has moments of its own by now."""
        return self._ranks > 1 and self._step > self._config.local_after_steps

    @property
    def outer_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The one that takes the outer steps, if there is one."""
        return () if self._outer is None else (self._outer,)

    def start(self, step: int) -> None:
        """Begin, or go on, after `step` steps of the run, at a synchronisation. All ranks take rank 0's weights."""
        self._step, self._alone = step, 0
        self._take_rank_0s([*self._parameters, *self._model.buffers()])
        self._drop_anchors()

    def synchronises(self, *, last: bool) -> bool:
        """Whether a synchronisation follows the step that is being taken; `last`: it ends an epoch."""
        return not self.sums_gradients and (last or self.round_steps == 1)

    def stepped(self, *, last: bool) -> None:
        """A step is done. Synchronises if it is time, and else not a byte is exchanged."""
        synchronises, summed = self.synchronises(last=last), self.sums_gradients
        self._step += 1
        self._alone += not summed
        if synchronises:
            self._synchronise()
        elif summed and not self.sums_gradients:  # from here on each goes on for itself
            self._take_rank_0s(list(self._model.buffers()))
            self._drop_anchors()

    def capture(self) -> dict[str, Tensor]:
        """The momentum of the outer optimizer, by the names of the parameters; the same on all ranks.

        Not the anchors: at a synchronisation they are the weights.
        """
        if self._outer is None:
            return {}
        states = [self._outer.state[anchor] for anchor in self._anchors]
        return {name: state["momentum_buffer"] for name, state in zip(self._names, states, strict=True)}

    def apply(self, saved: Mapping[str, Tensor]) -> None:
        """Put the momentum back."""
        for name, momentum in self.capture().items():
            momentum.copy_(saved[name])

    def moments(self, saved: Any, saved_by: int) -> Any:
        """What the inner optimizer of this rank goes on with.

        Args:
            saved: what was restored of it: this rank's own; or None, where this rank is new: it takes rank 0's, as
                moments that are a guess do less harm than none; or the list of all, where there is no group.
            saved_by: how many ranks saved it.
        """
        if self._ranks == 1:
            return saved[0] if isinstance(saved, list) else saved
        if saved_by >= self._ranks:
            return saved
        told = [saved if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told, src=0)
        return told[0] if saved is None else saved

    @torch.no_grad()
    def _synchronise(self) -> None:
        self._alone = 0
        if self._outer is None:
            torch._foreach_copy_(self._parameters, self._mean([p.detach() for p in self._parameters]))
        else:
            changes = self._mean(list(torch._foreach_sub(self._anchors, self._parameters)))
            for anchor, change in zip(self._anchors, changes, strict=True):
                anchor.grad = change
            self._outer.step()
            self._outer.zero_grad(set_to_none=True)
            torch._foreach_copy_(self._parameters, self._anchors)
        self._take_rank_0s(list(self._model.buffers()))

    def _mean(self, tensors: list[Tensor]) -> list[Tensor]:
        """Over all ranks, as torch's averagers take it, in one collective; the tensors become views of it."""
        if self._ranks > 1:
            average_parameters(cast("Any", iter(tensors)), cast("Any", dist.group.WORLD))
        return tensors

    @torch.no_grad()
    def _take_rank_0s(self, tensors: list[Tensor]) -> None:
        if self._ranks > 1:
            _sync_params_and_buffers(cast("Any", dist.group.WORLD), tensors, _BROADCAST_BYTES, 0)

    @torch.no_grad()
    def _drop_anchors(self) -> None:
        """Where the weights are now."""
        if self._outer is not None:
            torch._foreach_copy_(self._anchors, self._parameters)
