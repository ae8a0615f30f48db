"""How many ranks made which steps of a training, as its checkpoints tell."""

from __future__ import annotations

from collections.abc import Iterable

from tasks.drill.recording import CommitSeen, Recording
from training.straight import Segment


def segments(commits: Iterable[CommitSeen]) -> tuple[Segment, ...]:
    """The steps that lasted, cut where the number of ranks has changed.

    A group only begins at a checkpoint that lasted, so that all steps between two of them are the later one's.
    """
    found: list[Segment] = []
    for commit in sorted((c for c in commits if not c.void), key=lambda c: c.sequence):
        if found and commit.step <= found[-1].step:
            continue  # the same step again, with the evaluation that was missing
        if found and found[-1].ranks == commit.ranks:
            found.pop()
        found.append(Segment(commit.ranks, commit.step))
    return tuple(found)


def numbers(recording: Recording) -> tuple[int, ...]:
    """Of ranks, over time."""
    return tuple(segment.ranks for segment in segments(recording.commits))


def in_words(recording: Recording) -> str:
    """As people read it: `2, 1, 2 ranks`; empty for one process."""
    found = numbers(recording)
    return "" if set(found) <= {1} else f"{', '.join(map(str, found))} ranks"


def shrank_at(recording: Recording, after: float, ranks: int, until: float | None) -> float | None:
    """When the first checkpoint of fewer ranks appeared."""
    return _first(recording, after, until, range(1, ranks))


def grew_at(recording: Recording, after: float, ranks: int) -> float | None:
    """When the first checkpoint of so many ranks appeared."""
    return _first(recording, after, None, range(ranks, ranks + 1))


def _first(recording: Recording, after: float, until: float | None, ranks: range) -> float | None:
    times = [
        commit.at
        for commit in recording.commits
        if not commit.void and commit.ranks in ranks and commit.at > after and (until is None or commit.at < until)
    ]
    return min(times, default=None)
