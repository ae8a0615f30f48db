"""A mark in a state that a group saves: here each rank has entries of its own, and the whole has those of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pooled:
    """A dict, or a list of strings, of which a rank may hold some entries only: the layers of its pipeline stage.

    A checkpoint holds an ordinary dict or list with the entries of all ranks, in the order of a process that has
    them all. What several ranks hold must be alike on them. Without a group it is what it holds.

    Attributes:
        value: the entries that this rank has, by name; or the names themselves.
        order: names of the whole, in order; the same on all ranks. They need not all be held.
    """

    value: dict[str, Any] | list[str]
    order: Sequence[str]
