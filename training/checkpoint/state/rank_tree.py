"""The tree of a whole state, as one rank of a group is given it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

_NAMED = ("d", "c")
_LISTED = ("l", "u", "r")


def of_rank(tree: Any, rank: int) -> Any:
    """The tree with the values of one rank in the places of those that each rank has its own of."""
    ((kind, content),) = tree.items()
    if kind == "r":
        return content[rank] if rank < len(content) else {"k": None}
    if kind in _NAMED:
        return {kind: [[key, of_rank(node, rank)] for key, node in content]}
    if kind in _LISTED:
        return {kind: [of_rank(node, rank) for node in content]}
    return tree


def without(tree: Any, tensors: Collection[int]) -> Any:
    """The tree without the entries of its dicts that refer to tensors, and to none but these."""
    ((kind, content),) = tree.items()
    if kind in _NAMED:
        return {kind: [[key, without(node, tensors)] for key, node in content if not _is_of(node, tensors)]}
    if kind in _LISTED:
        return {kind: [without(node, tensors) for node in content]}
    return tree


def _is_of(node: Any, tensors: Collection[int]) -> bool:
    places = list(_places(node))
    return bool(places) and all(place in tensors for place in places)


def _places(tree: Any) -> Iterator[int]:
    """The tensors that it refers to."""
    ((kind, content),) = tree.items()
    if kind in ("t", "n", "g"):
        yield content
    elif kind == "s":
        yield from content[1]
    elif kind in _NAMED:
        for _, node in content:
            yield from _places(node)
    elif kind in _LISTED:
        for node in content:
            yield from _places(node)
