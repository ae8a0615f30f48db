"""Boxes of a tensor: a part as it was saved, a part as it is wanted, and where they overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from training.checkpoint.manifest import Tensor

PART_MARK = "~@"  # in the key of a part, before its place; a `~` of the user's own is escaped
RANK_MARK = "/~r"  # before the number of a rank, in the key of what each rank has its own of


class Box(NamedTuple):
    """Where a part of a tensor begins, and how far it reaches."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlap(self, other: Box) -> Box | None:
        """What both cover, within the whole tensor."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = [
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def hull(self, other: Box) -> Box:
        """The smallest box that holds both."""
        starts = tuple(map(min, self.offsets, other.offsets))
        stops = (
            max(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        return Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Its place in the elements of a box that holds it."""
        starts = (mine - theirs for mine, theirs in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def span(self, outer: Box) -> range:
        """The elements of a box that holds it, in the order of the memory, from its first to its last."""
        first = last = 0
        for place, size in zip(self.within(outer), outer.sizes, strict=True):
            first, last = first * size + place.start, last * size + place.stop - 1
        return range(first, last + 1)


def part_key(offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """`~@0.128/64.64`: what makes the key of a part out of that of its tensor."""
    return f"{PART_MARK}{'.'.join(map(str, offsets))}/{'.'.join(map(str, sizes))}"


def whole_key(key: str) -> str:
    """The key of the tensor that a part belongs to."""
    return key.partition(PART_MARK)[0]


def rank_of(key: str) -> int | None:
    """The rank whose own a tensor is, or None."""
    _, mark, rest = key.partition(RANK_MARK)
    return int(rest.partition("/")[0]) if mark else None


def is_own(key: str) -> bool:
    """Whether not all ranks have this tensor: a part, or what each rank has its own of."""
    return PART_MARK in key or RANK_MARK in key


BoxOf = Callable[[str], Box | None]
NOTHING = Box((0,), (-1,))  # what a rank needs of a tensor that it does not hold at all


def no_box(key: str) -> None:
    """Every tensor is wanted whole."""


@dataclass(frozen=True)
class Wanted:
    """What one rank needs of a state. The default is everything, as one process wants it.

    Attributes:
        rank: of the group; None: what each rank has its own of is wanted of all of them.
        box_of: what this rank needs of a tensor, by its key; None: all.
    """

    rank: int | None = None
    box_of: BoxOf = no_box

    def leaves_out(self, entry: Tensor) -> bool:
        """Whether a tensor is none of this rank's, so that even its place in the state is."""
        return self.rank is not None and self.box_of(whole_key(entry.key)) is NOTHING

    def box(self, key: str, shape: Sequence[int]) -> Box:
        """The part that is wanted of a tensor of this shape, by the key of the tensor or of one of its parts."""
        box = self.box_of(whole_key(key))
        whole = Box((0,) * len(shape), tuple(shape))
        return box if box is not None and len(box.sizes) == len(shape) else whole

    def needs(self, entry: Tensor) -> bool:
        """Whether anything of a saved tensor is needed, if only the fact that it is empty."""
        return bool(self.items(entry)) or (0 in entry.shape and not self.leaves_out(entry))

    def items(self, entry: Tensor) -> range:
        """The elements of a saved tensor, or part of one, that are needed, in the order of the memory."""
        everything = range(math.prod(entry.shape))
        if self.rank is None:
            return everything
        if (owner := rank_of(entry.key)) is not None:
            return everything if owner == self.rank else range(0)
        wanted = self.box_of(whole_key(entry.key))
        if wanted is NOTHING:
            return range(0)
        if wanted is None or len(wanted.sizes) != len(entry.shape):
            return everything
        saved = Box(entry.offsets, entry.shape)
        common = saved.overlap(wanted)
        return common.span(saved) if common is not None else range(0)


EVERYTHING = Wanted()
