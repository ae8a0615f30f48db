"""What a person sees while a run is followed: a live panel in a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from infra import beat
from tasks.follow import Look

LINE_SECONDS = 5.0
AFTER_TRAINING = ("evaluating", "registering", "done")


class Display(Protocol):
    """Shows looks at a run."""

    def __enter__(self) -> Display:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """End; what was shown stays."""

    def show(self, look: Look) -> None:
        """Bring the display up to date."""


def display_on(console: Console) -> Display:
    """The display that suits the console."""
    return LiveDisplay(console) if console.is_terminal else LineDisplay(console)


def phase_of(look: Look) -> str:
    """One clause on what is happening."""
    if look.milestone is None:
        late = (
            " (is a worker of pool cpu running? see `retoma status`)" if look.flow_run.state_name == "Late" else ""
        )
        return f"waiting for a worker{late}" if look.flow_run.state != "RUNNING" else "starting"
    if look.milestone.phase == "training" and look.progress is None:
        return "waiting for a worker of pool gpu" if look.waiting else "starting a range"
    return look.progress.phase if look.progress else look.milestone.phase


def range_text(progress: beat.Progress, ranges: int | None) -> str:
    """`range 2 of 3 (epochs 2 to 4), attempt 1, try 1, token 2`."""
    width = max(1, progress.stop - progress.start)
    of = f"range {progress.start // width + 1} of {ranges} " if ranges else ""
    tries = f", try {progress.tries}" if progress.tries > 1 else ""
    return f"{of}(epochs {progress.start} to {progress.stop}), attempt {progress.attempt}{tries}"


def checkpoint_text(progress: beat.Progress) -> str | None:
    """Kind, bytes, ratio and stall of the last checkpoint."""
    if progress.checkpoint is None or not progress.state_bytes or progress.written_bytes is None:
        return None
    share = 100 * progress.written_bytes / progress.state_bytes
    stall = 1000 * (progress.stall_seconds or 0.0)
    return (
        f"{progress.checkpoint_kind} {progress.checkpoint}, {decimal(progress.written_bytes)} "
        f"({share:.1f} % of the state), stall {stall:.1f} ms"
    )


class LineDisplay:
    """A line when something changed, at most every few seconds while training, and never the same twice on end."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._last: object = None
        self._shown = -LINE_SECONDS
        self._text = ""

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, look: Look) -> None:
        """See `Display.show`."""
        progress = look.progress
        key = (phase_of(look), progress and (progress.start, progress.flow_run_id, progress.token, progress.error))
        step = progress.step if progress else None
        now = self._clock()
        if key == self._last and (step is None or now - self._shown < LINE_SECONDS):
            return
        self._last, self._shown = key, now
        if (text := self._line(look)) != self._text:
            self._text = text
            self._console.print(text, markup=False)

    def _line(self, look: Look) -> str:
        progress = look.progress
        parts = [phase_of(look)]
        if progress is not None:
            parts.append(range_text(progress, look.milestone.ranges if look.milestone else None))
            if progress.total_steps:
                parts.append(f"step {progress.step}/{progress.total_steps}, epoch {progress.epoch}")
            if progress.loss is not None:
                parts.append(f"loss {progress.loss:.4f}")
            if progress.samples_per_second:
                parts.append(f"{progress.samples_per_second:,.0f} samples/s")
            if progress.slow_rank is not None:
                parts.append(f"rank {progress.slow_rank} holds up the others")
            trouble = progress.error.splitlines()[0] if progress.error else None
            parts += [text for text in (checkpoint_text(progress), trouble) if text]
        return "; ".join(parts)


class LiveDisplay:
    """A panel that is redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("waiting", total=None)
        self._live = Live(console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveDisplay:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, look: Look) -> None:
        """See `Display.show`."""
        progress = look.progress
        if progress is not None and progress.total_steps:
            self._bar.update(self._task, total=progress.total_steps, completed=progress.step)
        elif look.milestone is not None and look.milestone.phase in AFTER_TRAINING:
            self._bar.update(self._task, total=1, completed=1)
        self._bar.update(self._task, description=phase_of(look))
        self._live.update(Group(self._bar, self._facts(look)))

    def _facts(self, look: Look) -> Table:
        table = Table.grid(padding=(0, 2))
        progress = look.progress
        if progress is None:
            return table
        rows = {
            "range": range_text(progress, look.milestone.ranges if look.milestone else None),
            "position": f"epoch {progress.epoch}, step {progress.step} of {progress.total_steps or '?'}",
            "loss": None if progress.loss is None else f"{progress.loss:.4f}",
            "speed": f"{progress.samples_per_second:,.0f} samples/s" if progress.samples_per_second else None,
            "restored": progress.restored,
            "checkpoint": checkpoint_text(progress),
            "slow rank": None if progress.slow_rank is None else str(progress.slow_rank),
            "trouble": progress.error,
        }
        for title, text in rows.items():
            if text is not None:
                table.add_row(Text(title, style="dim"), Text(text, style="red" if title == "trouble" else ""))
        return table
