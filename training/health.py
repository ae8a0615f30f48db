"""Whether a training is healthy, by its loss: finite, and (if asked for) no spike that lasts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

from torch import Tensor

from training.checkpoint.manifest import Position
from training.config import HealthConfig
from training.errors import Diverged

_HINT = (
    "lower the learning rate or set clip_grad_norm; or go on from the last healthy checkpoint with "
    "health.on_divergence=rollback and health.skip_steps"
)


class UnhealthyLoss(Diverged):
    """A loss that is no number, or a spike that lasts. Set `position`, where it was found, and `since_step`."""

    position = Position()
    since_step = 0


def finite(loss: Tensor, position: Position) -> float:
    """The loss as a number; reading it waits for the device.

    Raises:
        UnhealthyLoss: it is not finite.
    """
    value = float(loss)
    if not math.isfinite(value):
        raise _unhealthy(f"the loss is {value}", position, position.step)
    return value


class LossWatch:
    """Looks at the losses of a training, in order, and stops it where they are not healthy.

    Its memory goes into each checkpoint, so that a resumed run sees a spike at the same step as one that was never
    interrupted.

    Args:
        config: the rules.
        every_steps: losses are read at these steps, and before a save: reading one waits for the device.
        memory: of the checkpoint that was restored.
    """

    def __init__(
        self,
        config: HealthConfig,
        every_steps: int = 1,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        self._config, self._every_steps = config, every_steps
        memory = memory or {}
        self._window: deque[float] = deque(memory.get("losses", ()), maxlen=config.spike_window_steps)
        self._spike: list[int] = list(memory.get("spike", ()))  # steps of the spike that is going on
        self._unread: list[tuple[Position, Tensor]] = []

    def step(self, position: Position, loss: Tensor) -> None:
        """An optimizer step is done. Raises `UnhealthyLoss` when a spike has lasted."""
        if self._config.spike_factor is None:
            return
        self._unread.append((position, loss))
        if position.step % self._every_steps == 0:
            self._read()

    def memory(self) -> dict[str, Any]:
        """What the next attempt must know; empty without a rule about spikes. Raises like `step`."""
        if self._config.spike_factor is None:
            return {}
        self._read()
        return {"losses": list(self._window), "spike": self._spike}

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for position, loss in unread:
            self._judge(position, finite(loss, position))

    def _judge(self, position: Position, loss: float) -> None:
        """Losses of a spike are not what the next ones are held against; before the window is full, nothing is."""
        full = len(self._window) == self._config.spike_window_steps
        usual = median(self._window) if full else 0.0
        factor = self._config.spike_factor or math.inf
        if usual <= 0 or loss <= factor * usual:
            self._window.append(loss)
            self._spike = []
            return
        self._spike.append(position.step)
        if len(self._spike) >= self._config.spike_patience_steps:
            usually = f"{factor:g} times its median {usual:.6g}"
            reason = f"the loss is {loss:.6g}, above {usually} for {len(self._spike)} steps"
            raise _unhealthy(reason, position, self._spike[0])


def _unhealthy(reason: str, position: Position, since_step: int) -> UnhealthyLoss:
    error = UnhealthyLoss(f"{reason}, at step {position.step}", hint=_HINT)
    error.position, error.since_step = position, since_step
    return error
