"""The structures of a state as its ranks hold it become the structure of the whole.

Rank 0's comes first. What every rank has is taken from there; of the others come the parts of sharded tensors, what
each rank has its own of, and the entries that they add to what is pooled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from training.checkpoint.manifest import Layout, Tensor
from training.checkpoint.state.dtypes import dtype_of
from training.errors import Invalid

_NAMED = ("d", "c")
_LISTED = ("l", "u")
_TENSORS = ("t", "n", "g")
_Nodes = Sequence[tuple[int, Any]]  # of ranks, with their numbers, in order


def merge(layouts: Sequence[Layout], value_counts: Sequence[int]) -> Layout:
    """The structure of the whole.

    Args:
        layouts: of each rank, in order.
        value_counts: how many scalars each rank sends: rank 0 all of its own, the others what not all have. They
            are put one after the other.

    Raises:
        Invalid: the states of the ranks have different structures, or no rank saves a part of a tensor; named.
    """
    starts = [0, *accumulate(value_counts)]
    merging = _Merge(layouts, [{}, *map(_sent, layouts[1:], starts[1:])])
    for place in range(len(layouts[0].tensors)):  # where they are: nothing moves when ranks are added
        merging.tensor(0, place)
    tree = merging.node([(rank, layout.tree) for rank, layout in enumerate(layouts)], "")
    _check_apart(merging.tensors)
    return Layout(tree=tree, tensors=tuple(merging.tensors))


@dataclass
class _Merge:
    layouts: Sequence[Layout]
    values: Sequence[dict[int, int]]  # of each rank but rank 0: place of a scalar there -> place in the whole
    tensors: list[Tensor] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def tensor(self, rank: int, place: int) -> int:
        """The place in the whole of a tensor of a rank."""
        entry = self.layouts[rank].tensors[place]
        if entry.key not in self._places:
            self._places[entry.key] = len(self.tensors)
            self.tensors.append(entry)
        return self._places[entry.key]

    def node(self, nodes: _Nodes, path: str) -> Any:
        """One node of the whole, from the same node of each rank that has it."""
        rank, node = nodes[0]
        kind = next(iter(node))
        _check_same(path, "kinds", ((other, next(iter(node))) for other, node in nodes))
        contents = [(other, node[kind]) for other, node in nodes]
        first = contents[0][1]
        if kind == "p":
            return self.pool(contents, path)
        if kind in _NAMED:
            _check_same(path, "keys", ((other, [key for key, _ in content]) for other, content in contents))
            children = [[(other, content[place][1]) for other, content in contents] for place in range(len(first))]
            names = [key for key, _ in first]
            return {kind: [[k, self.node(c, f"{path}/{k}")] for k, c in zip(names, children, strict=True)]}
        if kind in _LISTED:
            _check_same(path, "lengths", ((other, len(content)) for other, content in contents))
            children = [[(other, content[place]) for other, content in contents] for place in range(len(first))]
            return {kind: [self.node(child, f"{path}/{place}") for place, child in enumerate(children)]}
        if kind == "r":
            return {"r": [self.node([(other, content[0])], path) for other, content in contents]}
        if kind == "s":
            return {"s": [first[0], self.parts(contents, path)]}
        if kind == "k":
            _check_same(path, "values", contents)
        elif kind in _TENSORS:
            entries = ((other, self.layouts[other].tensors[place]) for other, place in contents)
            _check_same(path, "tensors", ((other, (e.key, e.dtype, e.shape)) for other, e in entries))
            return {kind: self.tensor(rank, first)}
        elif kind == "v" and rank:
            return {"v": self.values[rank][first]}
        return {kind: first}  # a scalar of all ranks is rank 0's

    def pool(self, contents: _Nodes, path: str) -> Any:
        """A dict or list with the entries of all ranks, in the order of the whole."""
        kind = next(iter(contents[0][1][1]))
        _check_same(path, "kinds", ((rank, next(iter(node))) for rank, (_, node) in contents))
        found: dict[int, list[tuple[int, Any]]] = {}
        for rank, (places, node) in contents:
            for place, entry in zip(places, node[kind], strict=True):
                found.setdefault(place, []).append((rank, entry))
        held = [found[place] for place in sorted(found)]
        if kind in _LISTED:
            return {kind: [self.node(entries, f"{path}/{place}") for place, entries in enumerate(held)]}
        for entries in held:
            _check_same(path, "names in this place", ((rank, name) for rank, (name, _) in entries))
        names = [entries[0][1][0] for entries in held]
        if len(set(names)) < len(names):
            raise Invalid(f"{path.removeprefix('/')}: the ranks do not agree on the order of its entries")
        nodes = ([(rank, node) for rank, (_, node) in entries] for entries in held)
        return {kind: [[k, self.node(n, f"{path}/{k}")] for k, n in zip(names, nodes, strict=True)]}

    def parts(self, contents: _Nodes, path: str) -> list[int]:
        """The places of the parts of a sharded tensor, all ranks together."""
        _check_same(path, "shapes", ((rank, shape) for rank, (shape, _) in contents))
        held = (self.tensor(rank, place) for rank, (_, own) in contents for place in own)
        places = list(dict.fromkeys(held))  # of a part that two ranks save, one counts
        have, need = sum(math.prod(self.tensors[place].shape) for place in places), math.prod(contents[0][1][0])
        if have != need:
            raise Invalid(f"{path.removeprefix('/')}: the ranks save {have} of its {need} elements")
        return places


def _sent(layout: Layout, start: int) -> dict[int, int]:
    """The scalars that a rank sends, in the order in which it does: place there -> place in the whole."""
    return {place: start + number for number, place in enumerate(_scalars(layout.tree, within=False))}


def _scalars(node: Any, *, within: bool) -> Iterable[int]:
    """The scalars of what is a rank's own, or pooled."""
    ((kind, content),) = node.items()
    if kind == "v":
        return [content] if within else []
    if kind in _NAMED:
        children = [child for _, child in content]
    elif kind in (*_LISTED, "r"):
        children = content
    else:
        children = [content[1]] if kind == "p" else []
    return [place for child in children for place in _scalars(child, within=within or kind in ("r", "p"))]


def _check_same(path: str, what: str, of_ranks: Iterable[tuple[int, Any]]) -> None:
    first: tuple[int, Any] | None = None
    for rank, found in of_ranks:
        if first is None:
            first = rank, found
        elif found != first[1]:
            raise Invalid(
                f"{path.removeprefix('/') or 'the state'}: rank {rank} has other {what} than rank {first[0]}",
                hint="a group saves the same state on all ranks; wrap what differs in PerRank, and a dict of "
                "which a rank has some entries only in Pooled",
            )


def _check_apart(tensors: Iterable[Tensor]) -> None:
    """Ranks that disagree on who holds what would lay different tensors into the same bytes."""
    places = sorted(
        (entry.chunk, entry.start, entry.start + math.prod(entry.shape) * dtype_of(entry.dtype).itemsize, entry.key)
        for entry in tensors
        if 0 not in entry.shape
    )
    for (chunk, _, stop, key), (other, start, _, other_key) in pairwise(places):
        if chunk == other and start < stop:
            raise Invalid(
                f"{key} and {other_key} overlap in chunk {chunk}: the ranks do not agree on who holds them"
            )
