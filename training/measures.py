"""What a training says of its own speed: with each checkpoint, and at once when a rank holds up the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from training.checkpoint.manifest import Position
from training.ports import SLOW_RANKS, SPEED, Message, Slow
from training.progress import Progress

if TYPE_CHECKING:
    from training.parallel.pace import Pace
    from training.parallel.ranks import Ranks


class Measures:
    """Means over the steps between two saves. One rank alone has its samples per second, and nothing else.

    Args:
        ranks: the group; None: one rank alone.
        progress: counts samples and seconds.
        report: receives what is told at once.
    """

    def __init__(self, ranks: Ranks | None, progress: Progress, report: Callable[[Message], None]) -> None:
        self._progress, self._report = progress, report
        self._pace: Pace | None = ranks.pace if ranks is not None and ranks.rank == 0 else None

    def step(self, position: Position) -> None:
        """A step is done. Tells of a rank that has begun to hold up the others, or has ended to."""
        if self._pace is None or (episode := self._pace.look(position.step)) is None:
            return
        self._report(
            Slow(
                rank=episode.rank,
                since_step=episode.since_step,
                over=episode.until_step is not None,
                excess_seconds=episode.excess_seconds,
                step_seconds=episode.step_seconds,
            )
        )

    def take(self) -> dict[str, float]:
        """Metrics of the steps since the last call. Shares are of a step; see `Shares` for what is measured."""
        values: dict[str, float] = {}
        if (speed := self._progress.take_speed()) is not None:
            values[SPEED] = speed
        shares = self._pace.take() if self._pace is not None else None
        if shares is not None:
            values["group/step_seconds"] = shares.step_seconds
            values["group/communication_share"] = shares.communication_share
            for rank, (own, waiting) in enumerate(zip(shares.own_seconds, shares.waiting_shares, strict=True)):
                values[f"rank/{rank}/own_seconds"] = own
                values[f"rank/{rank}/waiting_share"] = waiting
        return values

    def notes(self) -> dict[str, Any]:
        """For the meta of a manifest: nothing, as long as no rank held up the others."""
        episodes = self._pace.episodes if self._pace is not None else []
        return {SLOW_RANKS: [asdict(episode) for episode in episodes]} if episodes else {}
