"""The structures of a state as its ranks hold it become the structure of the whole.

Rank 0's comes first. What every rank has is taken from there; of the others come the parts of sharded tensors and
what each rank has its own of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from training.checkpoint.manifest import Layout, Tensor
from training.errors import Invalid

_NAMED = ("d", "c")
_LISTED = ("l", "u")
_TENSORS = ("t", "n", "g")


def merge(layouts: Sequence[Layout], value_counts: Sequence[int]) -> Layout:
    """The structure of the whole.

    Args:
        layouts: of each rank, in order.
        value_counts: how many scalars each rank sends: rank 0 all of its own, the others what only they have. They
            are put one after the other.

    Raises:
        Invalid: the states of the ranks have different structures, or no rank saves a part of a tensor; named.
    """
    starts = [0, *accumulate(value_counts)]
    merging = _Merge(layouts, starts[: len(layouts)])
    for place in range(len(layouts[0].tensors)):  # where they are: nothing moves when ranks are added
        merging.tensor(0, place)
    tree = merging.node([layout.tree for layout in layouts], "")
    return Layout(tree=tree, tensors=tuple(merging.tensors))


@dataclass
class _Merge:
    layouts: Sequence[Layout]
    next_values: list[int]  # of each rank
    tensors: list[Tensor] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def tensor(self, rank: int, place: int) -> int:
        """The place in the whole of a tensor of a rank."""
        entry = self.layouts[rank].tensors[place]
        if entry.key not in self._places:
            self._places[entry.key] = len(self.tensors)
            self.tensors.append(entry)
        return self._places[entry.key]

    def node(self, nodes: Sequence[Any], path: str) -> Any:
        """One node of the whole, from the same node of each rank."""
        kind = next(iter(nodes[0]))
        _check_same(path, "kinds", (next(iter(node)) for node in nodes))
        contents = [node[kind] for node in nodes]
        first = contents[0]
        if kind in _NAMED:
            _check_same(path, "keys", ([key for key, _ in content] for content in contents))
            children = zip(*contents, strict=True)
            return {kind: [[c[0][0], self.node([node for _, node in c], f"{path}/{c[0][0]}")] for c in children]}
        if kind in _LISTED:
            _check_same(path, "lengths", map(len, contents))
            items = enumerate(zip(*contents, strict=True))
            return {kind: [self.node(item, f"{path}/{place}") for place, item in items]}
        if kind == "r":
            return {"r": [self.own(rank, content[0]) for rank, content in enumerate(contents)]}
        if kind == "s":
            return {"s": [first[0], self.parts(contents, path)]}
        if kind == "k":
            _check_same(path, "values", contents)
        elif kind in _TENSORS:
            entries = (self.layouts[rank].tensors[place] for rank, place in enumerate(contents))
            _check_same(path, "tensors", ((entry.key, entry.dtype, entry.shape) for entry in entries))
            return {kind: self.tensor(0, first)}
        return {kind: first}  # a scalar is rank 0's

    def parts(self, contents: Sequence[Any], path: str) -> list[int]:
        """The places of the parts of a sharded tensor, all ranks together."""
        _check_same(path, "shapes", (shape for shape, _ in contents))
        held = (self.tensor(rank, place) for rank, (_, own) in enumerate(contents) for place in own)
        places = list(dict.fromkeys(held))  # of a part that two ranks save, one counts
        have, need = sum(math.prod(self.tensors[place].shape) for place in places), math.prod(contents[0][0])
        if have != need:
            raise Invalid(f"{path.removeprefix('/')}: the ranks save {have} of its {need} elements")
        return places

    def own(self, rank: int, node: Any) -> Any:
        """A node that only one rank has."""
        ((kind, content),) = node.items()
        if kind in _NAMED:
            return {kind: [[name, self.own(rank, child)] for name, child in content]}
        if kind in _LISTED:
            return {kind: [self.own(rank, child) for child in content]}
        if kind in _TENSORS:
            return {kind: self.tensor(rank, content)}
        if kind == "s":
            return {"s": [content[0], [self.tensor(rank, place) for place in content[1]]]}
        if kind == "v" and rank:
            self.next_values[rank] += 1
            return {"v": self.next_values[rank] - 1}
        return node


def _check_same(path: str, what: str, of_ranks: Iterable[Any]) -> None:
    first = None
    for rank, found in enumerate(of_ranks):
        if rank == 0:
            first = found
        elif found != first:
            raise Invalid(
                f"{path.removeprefix('/') or 'the state'}: rank {rank} has other {what} than rank 0",
                hint="a group saves the same state on all ranks; wrap what differs in PerRank",
            )
