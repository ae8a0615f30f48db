"""A few steps under torch's profiler: for each rank a timeline for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from training.config import ProfileConfig, SupervisorConfig
from training.ports import Message, Profiled
from training.progress import Progress

MOST_BYTES = 32 << 20  # of a file; what is larger, nobody loads into a browser
PROFILING = "profiling"
_NO_KINETO_LINES = "6"  # above all of its levels: it would note in the log that it starts and stops


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
        self._mark: Any = None  # around the step, in the timeline

    def before_step(self, step: int) -> None:
        """`step` comes next: the profiler starts with the first one of its steps, and ends after the last one."""
        if self._profiler is not None and step not in self._steps:
            self._write()
        elif self._profiler is None and step in self._steps:
            self._start()
        if self._profiler is not None:
            self._mark_step(step)

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is not None and error is None:
            self._write()

    def _mark_step(self, step: int | None) -> None:
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        if step is not None:
            import torch.profiler

            self._mark = torch.profiler.record_function(f"step {step}")
            self._mark.__enter__()

    def _start(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", _NO_KINETO_LINES)  # read at its first start
        import torch.profiler

        with self._progress.pause(PROFILING, self._limits.first_step_seconds):
            self._profiler = torch.profiler.profile()  # of the CPU, and of what else there is
            self._profiler.start()

    def _write(self) -> None:
        assert self._folder is not None  # noqa: S101 - or it had not started
        self._mark_step(None)
        profiler, self._profiler = self._profiler, None
        path = self._folder / f"rank-{self._rank}.json.gz"
        with self._progress.pause(PROFILING, self._limits.first_step_seconds):
            profiler.stop()
            try:
                profiler.export_chrome_trace(str(path))
                size = path.stat().st_size
            except OSError as error:  # no disk space, mostly: nothing that a training should end for
                self._leave_out(path, str(error))
                return
        if size > MOST_BYTES:
            self._leave_out(path, f"it has {size:,} bytes, the most is {MOST_BYTES:,}; set profile.steps to fewer")
        else:
            self._report(Profiled(rank=self._rank, path=str(path)))

    def _leave_out(self, path: Path, why: str) -> None:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        print(  # noqa: T201 - the log
            f"the profile of rank {self._rank} is left out: {why}", file=sys.stderr, flush=True
        )
