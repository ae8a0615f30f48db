"""What is written down of all ranks when one of them holds up the group: for people. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterable

from training.parallel.wire import Whereabouts


def report(told: Iterable[tuple[int, Whereabouts | None]]) -> str:
    """Where each rank is, the newest call and collective first. Ranks that are at the same place stand together.

    Args:
        told: rank, and what it has told; None: it did not answer.
    """
    places: dict[Whereabouts | None, list[int]] = {}
    for rank, where in sorted(told, key=lambda one: one[0]):
        places.setdefault(where, []).append(rank)
    return "\n".join(_of(ranks, where) for where, ranks in places.items())


def _of(ranks: list[int], where: Whereabouts | None) -> str:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    if where is None:
        return f"{who}: no answer"
    head = f"{who}: {where.begun} collectives begun" + (", the newest first:" if where.recent else "")
    verb = "waiting in" if where.waits else "in"
    stack = [f" {verb}", *(f"  {call}" for call in where.stack)] if where.stack else []
    return "\n".join([head, *(f"  {collective}" for collective in where.recent), *stack])
