"""A few steps under torch's profiler: for each rank a timeline for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from training.config import ProfileConfig, SupervisorConfig
from training.ports import Message, Profiled
from training.progress import Progress

MOST_BYTES = 32 << 20  # of a file; what is larger, nobody loads into a browser
PROFILING = "profiling"


class Profile:
    """Profiles the configured steps, and writes one file. The steps compute what they compute without.

    Use as a context: a range that ends within these steps writes what it has, one that fails does not.

    Args:
        config: which steps; None: none.
        folder: where the file goes; None: nothing is profiled.
        rank: names the file.
        progress: is told of the pauses in which the profiler starts and writes.
        limits: how long they may take.
        report: receives the file's name.
    """

    def __init__(
        self,
        config: ProfileConfig | None,
        folder: Path | None,
        rank: int,
        progress: Progress,
        limits: SupervisorConfig,
        report: Callable[[Message], None],
    ) -> None:
        self._steps = range(config.start_step, config.start_step + config.steps) if config and folder else range(0)
        self._folder, self._rank = folder, rank
        self._progress, self._limits, self._report = progress, limits, report
        self._profiler: Any = None

    def before_step(self, step: int) -> None:
        """`step` comes next: the profiler starts with the first one of its steps, and ends after the last one."""
        if self._profiler is not None and step not in self._steps:
            self._write()
        elif self._profiler is None and step in self._steps:
            self._start()

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None and error is None:
            self._write()

    def _start(self) -> None:
        import torch.profiler

        with self._progress.pause(PROFILING, self._limits.first_step_seconds):
            self._profiler = torch.profiler.profile()  # of the CPU, and of what else there is
            self._profiler.start()

    def _write(self) -> None:
        assert self._folder is not None  # noqa: S101 - or it had not started
        profiler, self._profiler = self._profiler, None
        path = self._folder / f"rank-{self._rank}.json.gz"
        with self._progress.pause(PROFILING, self._limits.first_step_seconds):
            profiler.stop()
            profiler.export_chrome_trace(str(path))
        size = path.stat().st_size
        if size > MOST_BYTES:
            path.unlink()
            print(  # noqa: T201 - the log
                f"the profile of rank {self._rank} has {size:,} bytes and is left out: the most is {MOST_BYTES:,}; "
                "set profile.steps to fewer",
                file=sys.stderr,
                flush=True,
            )
        else:
            self._report(Profiled(rank=self._rank, path=str(path)))
