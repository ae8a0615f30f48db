"""A checkpoint's metrics as MLflow's: never the same metric and step twice in one run, whoever publishes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from infra.mlflow_runs import Point, RunRecord, Runs
from infra.mlflow_text import milliseconds, ratio
from training.checkpoint.manifest import Committed
from training.parallel.pace import scaling_efficiency
from training.ports import SPEED

_BAD_IN_NAME = re.compile(r"[^\w\-. /:]")
_NAME_CHARACTERS = 250


class MetricLog:
    """Keeps (metric, step) of one run from being logged twice.

    What a run has at first comes from MLflow. Only for a step that is not newer than the metric's newest one is the
    whole history asked for, once.
    """

    def __init__(self, runs: Runs, record: RunRecord) -> None:
        self._runs = runs
        self._id = record.id
        self._newest = dict(record.steps)
        self._steps: dict[str, set[int]] = {}

    def log(self, points: Iterable[Point]) -> None:
        """Log those that are new to the run."""
        new: dict[tuple[str, int], Point] = {}
        for point in points:
            if not self._has(point):
                new.setdefault((point.key, point.step), point)
        if not new:
            return
        self._runs.log_points(self._id, new.values())
        for key, step in new:
            self._newest[key] = max(step, self._newest.get(key, -1))
            if key in self._steps:
                self._steps[key].add(step)

    def _has(self, point: Point) -> bool:
        if point.step > self._newest.get(point.key, -1):
            return False  # the usual case: nothing to ask
        if point.key not in self._steps:
            self._steps[point.key] = self._runs.steps_of(self._id, point.key)
        return point.step in self._steps[point.key]


def points_of(committed: Committed) -> list[Point]:
    """Metrics of a checkpoint. The time is the manifest's, so that a point published twice is the same point."""
    manifest, costs, share = committed.manifest, committed.manifest.costs, ratio(committed)
    timestamp = milliseconds(manifest.writer.created)
    points = [
        Point(_metric_name(key), float(value), point.step, timestamp)
        for point in manifest.metrics
        for key, value in point.values.items()
        if math.isfinite(value)
    ]
    own = {"written_bytes": float(costs.written_bytes), "stall_seconds": costs.stall_seconds}
    if share is not None:
        own["ratio"] = share
    named = {f"checkpoint/{name}": value for name, value in own.items()}
    if manifest.world_size > 1:
        written = manifest.written_by_rank().items()
        named.update({f"rank/{rank}/written_bytes": float(size) for rank, size in written})
    return points + [Point(name, value, manifest.position.step, timestamp) for name, value in named.items()]


def efficiency_of(committed: Committed, one_rank_speed: float | None) -> list[Point]:
    """The scaling efficiency of a group; nothing of one rank alone, or without the speed of one in samples/s."""
    manifest = committed.manifest
    if manifest.world_size == 1 or not one_rank_speed:
        return []
    found = [
        (point.step, scaling_efficiency(point.values[SPEED], manifest.world_size, one_rank_speed))
        for point in manifest.metrics
        if SPEED in point.values
    ]
    timestamp = milliseconds(manifest.writer.created)
    return [Point("group/scaling_efficiency", value, step, timestamp) for step, value in found]


def _metric_name(name: str) -> str:
    return _BAD_IN_NAME.sub("_", name)[:_NAME_CHARACTERS] or "_"
