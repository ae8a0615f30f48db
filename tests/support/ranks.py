"""A group of ranks in one process: threads that save together, and tensors that look sharded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Sharded(torch.Tensor):
    """Looks like a DTensor that is sharded over the first dimensions of a mesh, and replicated over a last one.

    Args:
        whole: the whole tensor; this rank keeps its box.
        grid: into how many pieces each dimension is cut, as `torch.chunk` does.
        cell: which piece this rank has.
        replica, replicas: which copy of it.
    """

    @staticmethod
    def of(
        whole: torch.Tensor, grid: Sequence[int], cell: Sequence[int], replica: int = 0, replicas: int = 1
    ) -> Sharded:
        """See the class."""
        local, offsets = whole, [0] * whole.dim()
        for dim, (pieces, place) in enumerate(zip(grid, cell, strict=True)):
            size = -(-whole.shape[dim] // pieces)
            offsets[dim] = min(place * size, whole.shape[dim])
            local = local.narrow(dim, offsets[dim], max(0, min(size, whole.shape[dim] - offsets[dim])))
        made: Any = torch.empty(whole.shape, device="meta").as_subclass(Sharded)
        made.local, made.offsets = local.clone(), offsets
        made.placements = [_placement(replicated=False), _placement(replicated=True)]
        made.device_mesh = SimpleNamespace(
            get_coordinate=lambda: [0, replica], size=lambda dim: (math.prod(grid), replicas)[dim]
        )
        return made  # type: ignore[no-any-return]

    def to_local(self) -> torch.Tensor:
        """This rank's elements."""
        return self.local  # type: ignore[attr-defined,no-any-return]

    def __create_chunk_list__(self) -> list[Any]:
        return [SimpleNamespace(offsets=self.offsets, sizes=self.to_local().shape)]  # type: ignore[attr-defined]


def _placement(*, replicated: bool) -> Any:
    return SimpleNamespace(is_partial=lambda: False, is_replicate=lambda: replicated)


def together(work: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Do one thing on every rank at once. What is raised is returned."""

    def caught(one: Callable[[], T]) -> T | BaseException:
        try:
            return one()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(len(work)) as executor:
        return list(executor.map(caught, work))
