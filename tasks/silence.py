"""Whether a training process is silent for longer than it may be, and what is wrong with it then."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from training.allowance import Allowance
from training.config import SupervisorConfig
from training.ports import Message

# A pause of our own loop that only a frozen machine or process explains; the process's silence proves nothing then.
SLEPT_SECONDS = 5.0


class Silence:
    """Counts the silence of one process.

    Args:
        limits: what it is allowed.
        clock: seconds, monotonic.
    """

    def __init__(self, limits: SupervisorConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits, self._clock = limits, clock
        self._allowance = Allowance(limits)
        self._heard = self._looked = clock()
        self._stopped: float | None = None  # by a signal, since then
        self.has_spoken = False

    @property
    def pause(self) -> str | None:
        """What the process has announced; None: it trains."""
        return self._allowance.pause

    @property
    def seconds(self) -> float:
        """Since the last sign of progress."""
        return self._clock() - self._heard

    def hear(self, message: Message) -> None:
        """Take what the process says."""
        self.has_spoken = True
        if self._allowance.hear(message):
            self._heard = self._clock()

    def verdict(self, status: str | None) -> str | None:
        """One clause on what is wrong; None as long as nothing is. Ask often.

        Args:
            status: of the process, as psutil names it. One that is stopped by a signal may be so for
                `silence_seconds`, whatever it has announced.
        """
        now = self._clock()
        if now - self._looked > SLEPT_SECONDS:
            self._heard, self._stopped = now, None  # we slept ourselves, perhaps together with it
        self._looked = now
        if status != psutil.STATUS_STOPPED:
            self._stopped = None
        elif self._stopped is None:
            self._stopped = now
        frozen_seconds = now - self._stopped if self._stopped is not None else 0.0
        if self.seconds <= self._allowance.seconds and frozen_seconds <= self._limits.silence_seconds:
            return None
        return f"{self._what(status)}: it said nothing for {self.seconds:.1f} s"

    def _what(self, status: str | None) -> str:
        if status == psutil.STATUS_STOPPED:
            return "was frozen (stopped by a signal)"
        place = " in the kernel, which waits for a disk or a device" if status == psutil.STATUS_DISK_SLEEP else ""
        return f"hung{place}{f' while {self.pause}' if self.pause else ''}"
