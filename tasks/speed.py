"""How fast a group of ranks is, and how its ranks share the work: read from the manifests of a run."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from infra.settings import Settings
from tasks.runs import run_names
from training.checkpoint.history import Lineage, head_ref, read_committed, read_lineage
from training.checkpoint.manifest import Committed, Manifest
from training.checkpoint.store import open_store
from training.errors import RetomaError
from training.parallel.pace import scaling_efficiency
from training.ports import SLOW_RANKS, SPEED


class OneRank(NamedTuple):
    """What one rank alone has reached on the same job: the median over its checkpoints."""

    run: str
    samples_per_second: float


def group_row(settings: Settings, lineage: Lineage) -> dict[str, Any] | None:
    """What is shown of the ranks; None: the newest attempt is of one rank alone, or has told nothing.

    Figures are medians over the checkpoints of the newest attempt, each of which tells means since the one before.
    Bytes are those of the listed chain.
    """
    head = lineage.head.manifest if lineage.head else None
    if head is None or head.world_size == 1:
        return None
    newest = [c.manifest for c in lineage.chain if c.manifest.token == head.token]
    told = _medians(newest)
    speed, one = told.get(SPEED), one_rank(settings, lineage)
    written: Counter[int] = Counter()
    for committed in lineage.chain:
        written.update(committed.manifest.written_by_rank())
    share = None
    if speed is not None and one is not None:
        share = scaling_efficiency(speed, head.world_size, one.samples_per_second)
    return {
        "world_size": head.world_size,
        "samples_per_second": speed,
        "step_seconds": told.get("group/step_seconds"),
        "communication_share": told.get("group/communication_share"),
        "scaling_efficiency": share,
        "one_rank": one._asdict() if one else None,
        "ranks": [
            {
                "rank": rank,
                "own_seconds": told.get(f"rank/{rank}/own_seconds"),
                "waiting_share": told.get(f"rank/{rank}/waiting_share"),
                "written_bytes": written.get(rank, 0),
            }
            for rank in range(head.world_size)
        ],
        "slow_ranks": _episodes(lineage.chain),
    }


def one_rank(settings: Settings, lineage: Lineage) -> OneRank | None:
    """The same job on one rank alone: a range of this run, else the newest such run; None: there is none.

    It counts on whatever machine that was.
    """
    assert lineage.head is not None  # noqa: S101 - the caller looked
    own = lineage.head.manifest
    found = _alone(lineage.chain)
    if found is not None:
        return OneRank(own.run, found)
    runs: list[tuple[str, OneRank]] = []
    for run in run_names(settings):
        if run == own.run:
            continue
        try:
            head = _head(settings, run)
            if head is None or head.world_size != 1 or head.job.get("digest") != own.job.get("digest"):
                continue
            found = _alone(read_lineage(open_store(settings.run_url(run))).chain)
        except RetomaError:  # a run that is damaged, or of another version, tells nothing here
            continue
        if found is not None:
            runs.append((head.writer.created, OneRank(run, found)))
    return max(runs)[1] if runs else None


def _head(settings: Settings, run: str) -> Manifest | None:
    store = open_store(settings.run_url(run))
    ref = head_ref(store)
    return read_committed(store, ref.token, ref.sequence, run).manifest if ref else None


def _alone(chain: Iterable[Committed]) -> float | None:
    return _medians([c.manifest for c in chain if c.manifest.world_size == 1]).get(SPEED)


def _medians(manifests: Iterable[Manifest]) -> dict[str, float]:
    """Of each metric."""
    values: dict[str, list[float]] = {}
    for manifest in manifests:
        for point in manifest.metrics:
            for name, value in point.values.items():
                values.setdefault(name, []).append(value)
    return {name: statistics.median(found) for name, found in values.items()}


def _episodes(chain: Iterable[Committed]) -> list[dict[str, Any]]:
    """Ranks that held up the others, as the newest manifest that tells of each has it."""
    found: dict[tuple[int, int, int], dict[str, Any]] = {}
    for committed in chain:
        token = committed.manifest.token
        for episode in committed.manifest.meta.get(SLOW_RANKS, []):
            found[token, episode["rank"], episode["since_step"]] = {"token": token, **episode}
    return list(found.values())
