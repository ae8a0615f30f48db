"""Which checkpoints stay. Decides from links between checkpoints; asks no store and no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from training.checkpoint.collected import Name
from training.errors import Invalid


class Chains(Protocol):
    """What has to be known about checkpoints."""

    def parent(self, name: Name) -> Name | None:
        """The checkpoint before."""

    def needs(self, name: Name) -> Iterator[Name]:
        """A checkpoint and those below it that a restore of it reads."""

    def is_base(self, name: Name) -> bool:
        """Whether it can be restored alone: a base, or one with a rebased form that can be relied on."""

    def is_intact(self, name: Name) -> bool:
        """Whether it can be restored."""


def choose(
    chains: Chains,
    history: Iterable[Name],
    *,
    keep: int,
    pins: Iterable[Name] = (),
    aliases: Iterable[Name] = (),
    young: Iterable[Name] = (),
    writing: int | None = None,
) -> dict[Name, str]:
    """The checkpoints that stay, and why.

    Args:
        chains: the checkpoints.
        history: those that a resume may start from, newest first. Read no further than needed.
        keep: so many of the newest intact bases, and everything that is newer than the oldest of them.
        pins, aliases: named by people and by the registry.
        young: within the grace period.
        writing: the token of an attempt that may be at work. If the head is its own, the checkpoint before stays
            as well: where the answer to the head's commit was lost, the attempt goes on from the one before.

    Raises:
        Invalid: `keep` is less than 1.
    """
    if keep < 1:
        raise Invalid(
            f"keep must be at least 1, not {keep}", hint="the head's own base is one of those that are kept"
        )
    kept: dict[Name, str] = {}

    def keep_chain(name: Name, reason: str) -> None:
        for link in chains.needs(name):
            kept.setdefault(link, reason if link == name else f"needed by {name[0]}/{name[1]}")

    newest: list[Name] = []
    left = keep
    for name in history:
        newest.append(name)
        left -= chains.is_base(name) and chains.is_intact(name)
        if not left:
            break
    for number, name in enumerate(newest):
        keep_chain(name, "of the newest bases" if number else "head")
    head = newest[0] if newest else None
    before = chains.parent(head) if head is not None and head[0] == writing else None
    if before is not None:
        keep_chain(before, "the one before the head")
    for names, reason in ((pins, "pinned"), (aliases, "has an alias"), (young, "within the grace period")):
        for name in sorted(names, reverse=True):
            keep_chain(name, reason)
    return kept
