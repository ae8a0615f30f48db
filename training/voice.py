"""The training process towards its supervisor: what it says, and how it hears that it should leave."""

from __future__ import annotations

import os
import threading
from io import FileIO

from training.allowance import Allowance
from training.checkpoint.manifest import Position
from training.config import SupervisorConfig
from training.errors import Preempted
from training.guard import HangTimer
from training.ports import Beat, Failed, Message, Restored, encode_message
from training.stopping import StopRequest


class Voice:
    """What the process says, and how it hears that it should leave.

    Args:
        out: receives the messages.
        limits: the silences that the supervisor allows.

    Attributes:
        request: asked by SIGTERM.
    """

    def __init__(self, out: FileIO, limits: SupervisorConfig) -> None:
        self.request = StopRequest()
        self._out, self._allowance, self._timer = out, Allowance(limits), HangTimer()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._restored: Position | None = None
        self._has_trained = False

    def say(self, message: Message) -> None:
        """Send a message. A sign of progress winds the hang timer."""
        if isinstance(message, Restored):
            self._restored = message.position
        elif isinstance(message, Beat):
            self._has_trained = message.position != self._restored
        with self._lock:  # beats come from the loop, saved checkpoints from the background
            self._out.write(encode_message(message))
            if self._allowance.hear(message):
                self._timer.wind(self._allowance.seconds)

    def on_sigterm(self, *_: object) -> None:
        """In the main thread. With nothing to save leave at once: a restore may take longer than the grace."""
        if os.getpid() != self._pid:  # in a forked loader worker, which ends with its parent
            return
        if not self._has_trained:
            left = Failed(error=Preempted.__name__, message="asked to stop before the first step")
            os.write(self._out.fileno(), encode_message(left))  # the lock may be held by what was interrupted
            os._exit(Preempted.exit_code)
        self.request.ask()
