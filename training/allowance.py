"""How long a training process may be silent: by what it said last, counted alike on both sides of the pipe."""

from __future__ import annotations

from training.config import SupervisorConfig
from training.ports import Beat, Message, Pause, Present, Profiled, Saved, SaveFailed, Slow

STEPS_OF_SILENCE = 4  # of the longest recent step: slow training is not silent training


class Allowance:
    """The silence that is allowed now.

    Attributes:
        seconds: from the last sign of progress.
        pause: what the process has announced that it does; None: it trains.
    """

    def __init__(self, limits: SupervisorConfig) -> None:
        self._limits = limits
        self.seconds = limits.start_seconds
        self.pause: str | None = "starting"

    def hear(self, message: Message) -> bool:
        """Take a message. True: it is a sign of progress, and silence counts from now.

        What the background says about saves is none: a loop that hangs may still have one in flight, and an
        announced pause goes on. Neither is what is only told about the training.
        """
        if isinstance(message, Saved | SaveFailed | Present | Slow | Profiled):
            return False
        if isinstance(message, Pause):
            self.seconds, self.pause = message.allowance_seconds, message.what
            return True
        step_seconds = message.step_seconds if isinstance(message, Beat) else 0.0
        self.seconds = max(self._limits.silence_seconds, STEPS_OF_SILENCE * step_seconds)
        self.pause = None
        return True
