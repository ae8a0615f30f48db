"""Tensors from one rank of a pipeline to the next, where the receiver does not know their shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint.state.dtypes import DTYPES
from training.errors import Invalid

_DTYPES = list(DTYPES.values())
_HEADER_ITEMS = 64
Sent = list[tuple[dist.Work, Tensor]]  # on their way, and not to be freed before


class Line:
    """The ranks of a pipeline, in order.

    Args:
        group: of these ranks.
        device: of this one.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self.size, self.place = dist.get_world_size(group), dist.get_rank(group)

    def send(self, tensors: Sequence[Tensor], place: int) -> Sent:
        """Begin to send; wait for what is returned before the end."""
        sent: Sent = []
        for tensor in self._with_header(tensors):
            work = dist.isend(tensor, group=self._group, group_dst=place)
            assert work is not None  # noqa: S101 - None: this rank is not of the group
            sent.append((work, tensor))
        return sent

    def receive(self, place: int) -> tuple[Tensor, ...]:
        """What the rank at a place sends next."""
        header = self._empty_header()
        dist.recv(header, group=self._group, group_src=place)
        tensors = self._described(header)
        for tensor in tensors:
            dist.recv(tensor, group=self._group, group_src=place)
        return tensors

    def share(self, tensors: Sequence[Tensor] | None, place: int) -> tuple[Tensor, ...]:
        """Give what the rank at a place has to all; the others have None."""
        if tensors is not None:
            header, *found = self._with_header(tensors)
            dist.broadcast(header, group=self._group, group_src=place)
        else:
            header = self._empty_header()
            dist.broadcast(header, group=self._group, group_src=place)
            found = list(self._described(header))
        for tensor in found:
            dist.broadcast(tensor, group=self._group, group_src=place)
        return tuple(found)

    def _empty_header(self) -> Tensor:
        return torch.zeros(_HEADER_ITEMS, dtype=torch.int64, device=self._device)

    def _with_header(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors after their number, and dtype and shape of each."""
        numbers = [len(tensors)]
        for tensor in tensors:
            numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        if len(numbers) > _HEADER_ITEMS:
            raise Invalid(f"{len(tensors)} tensors between two stages are too many; put them together")
        numbers += [0] * (_HEADER_ITEMS - len(numbers))
        header = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        return [header, *(tensor.contiguous() for tensor in tensors)]

    def _described(self, header: Tensor) -> tuple[Tensor, ...]:
        """Memory for the tensors that a header tells of."""
        count, *numbers = header.tolist()
        tensors = []
        for _ in range(count):
            dtype, dims, *numbers = numbers
            shape, numbers = numbers[:dims], numbers[dims:]
            tensors.append(torch.empty(shape, dtype=_DTYPES[dtype], device=self._device))
        return tuple(tensors)
