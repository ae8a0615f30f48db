"""Lines out of a pipe: split, bounded in length and rate, with the tail kept for an error report."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

LINE_LIMIT_BYTES = 1 << 20
SHOWN_CHARACTERS = 2000
TAIL_LINES = 30


class LineSplitter:
    """Cuts a stream of bytes into lines. A line without end cannot grow without bound: it is cut."""

    def __init__(self, limit_bytes: int = LINE_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that are complete now, without their ends. Empty lines are left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._limit_bytes:
            lines, self._rest = [*lines, self._rest], b""
        yield from (line for line in lines if line.strip())

    def flush(self) -> Iterator[bytes]:
        """What came after the last line end."""
        rest, self._rest = self._rest, b""
        if rest.strip():
            yield rest


class Relay:
    """Passes text lines on at a bounded rate. A job that prints in its inner loop must not drown the server.

    Args:
        show: receives a line.
        lines_per_second: what is passed on in the long run; `burst_lines` may come at once.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        show: Callable[[str], None],
        *,
        lines_per_second: float = 10.0,
        burst_lines: int = 100,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._show = show
        self._rate = lines_per_second
        self._burst = float(burst_lines)
        self._clock = clock
        self._allowance, self._then = self._burst, clock()
        self._left_out = 0
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, those that were not passed on included."""
        return tuple(self._tail)

    def line(self, data: bytes) -> None:
        """Take one line."""
        text = data.decode("utf-8", "replace").rstrip("\r")[:SHOWN_CHARACTERS]
        self._tail.append(text)
        now = self._clock()
        self._allowance = min(self._burst, self._allowance + (now - self._then) * self._rate)
        self._then = now
        if self._allowance < 1:
            self._left_out += 1
            return
        self._allowance -= 1
        self._report_left_out()
        self._show(text)

    def close(self) -> None:
        """Say how many lines were left out last."""
        self._report_left_out()

    def _report_left_out(self) -> None:
        if self._left_out:
            self._show(f"... {self._left_out} lines left out")
            self._left_out = 0
