"""The stages of a pipeline that one rank holds, as one module, which all ranks of it evaluate together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.errors import Invalid
from training.parallel.line import Line, Sent


class Stages(nn.Module):
    """Parameters and buffers of some stages under their names in the whole model.

    Called, it is the whole model: every rank of the pipeline calls it with the same inputs, each computes its
    stages, and all are given the output of the last one.

    Args:
        modules: stage number -> the stage, wrapped or not.
        count: stages of the whole model; stage s is held at place s modulo the size of the group, which is over 1.
        group: the ranks of the pipeline.
        pieces: into so many an evaluated batch is cut, so that the ranks compute at the same time.
        device: of this rank.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        count: int,
        group: dist.ProcessGroup,
        pieces: int,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.wrapped = nn.ModuleDict({str(number): module for number, module in modules.items()})
        self._count, self._pieces = count, pieces
        self._line = Line(group, device)

    def stages(self) -> dict[int, nn.Module]:
        """Stage number -> the job's module."""
        return {
            int(number): module.module if isinstance(module, DistributedDataParallel) else module
            for number, module in self.wrapped.items()
        }

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Of all stages, under the names of the whole model."""
        return self._named("named_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Of all stages, under the names of the whole model."""
        return self._named("named_buffers", prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Of all stages, under the names of the whole model."""
        found: dict[str, Any] = {}
        for stage in self.stages().values():
            found.update(stage.state_dict(*args, **kwargs))
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> None:
        """Into all stages."""
        for stage in self.stages().values():
            mine = {name: state_dict[name] for name in stage.state_dict() if name in state_dict}
            stage.load_state_dict(mine, strict, assign)

    def forward(self, *inputs: Tensor) -> Any:
        """The output of the whole model, on every rank of the pipeline.

        Raises:
            Invalid: gradients are asked for: a pipeline is trained by its schedule, not by a call.
        """
        if torch.is_grad_enabled():
            raise Invalid(
                "the model of a pipeline was called with gradients enabled",
                hint="call it in evaluate() only; the training uses inputs(), stages() and loss_of()",
            )
        line, last = self._line, self._count - 1
        pieces = list(zip(*(value.chunk(self._pieces) for value in inputs), strict=True))
        sent: Sent = []
        outputs = []
        for number, stage in self.stages().items():
            for piece in pieces:
                output = stage(*(piece if number == 0 else line.receive((number - 1) % line.size)))
                if number == last:
                    outputs.append(output)
                else:
                    sent += line.send(_as_tuple(output), (number + 1) % line.size)
        for work, _ in sent:
            work.wait()
        joined = [torch.cat(parts) for parts in zip(*map(_as_tuple, outputs), strict=True)] if outputs else None
        shared = line.share(joined, last % line.size)
        return shared[0] if len(shared) == 1 else shared

    def _named(self, kind: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for stage in self.stages().values():
            for name, value in getattr(stage, kind)(prefix, recurse, remove_duplicate):
                if remove_duplicate and id(value) in seen:
                    continue
                seen.add(id(value))
                yield name, value


def _as_tuple(output: Any) -> tuple[Tensor, ...]:
    found = tuple(output) if isinstance(output, list | tuple) else (output,)
    for value in found:
        if type(value) is not Tensor:
            raise Invalid(f"a stage of a pipeline returned a {type(value).__name__}, not tensors")
    return found
