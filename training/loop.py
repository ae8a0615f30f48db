"""The training loop over a half-open range of epochs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from training.cadence import Cadence
from training.checkpoint.checkpointer import IncrementalCheckpointer
from training.checkpoint.manifest import Health, MetricPoint, Position
from training.errors import Diverged, Preempted
from training.ports import Beat, Message
from training.trainer import Trainer

_BEAT_SECONDS = 0.2


def train_epochs(
    trainer: Trainer,
    checkpointer: IncrementalCheckpointer,
    position: Position,
    stop: int,
    report: Callable[[Message], None],
    should_stop: Callable[[], bool] = lambda: False,
    cadence: Cadence | None = None,
) -> tuple[Position, dict[str, float]]:
    """Train from `position` until epoch `stop` begins; every step of the way is resumable.

    Args:
        trainer: the job, with its state already at `position`.
        checkpointer: an opened attempt.
        position: what comes next.
        stop: first epoch that is not trained.
        report: receives beats.
        should_stop: asked after each step; true ends the range early, after a save.
        cadence: says when to save within an epoch; default: by the configuration, knowing of no failures.

    Returns:
        The position at `stop`, and the metrics of the last evaluation; everything is committed.

    Raises:
        Preempted: `should_stop` said so; the state is committed.
        Diverged: the loss is not finite; nothing of it was published.
        Fenced: a newer attempt has taken over.
        Unavailable: the store failed several saves in a row.
    """
    saver = _Saver(trainer, checkpointer)
    progress = _Progress(report, position)
    metrics: dict[str, float] = {}
    first_step = position.step + 1
    cadence = cadence or Cadence(trainer.config.checkpoint, checkpointer)
    while position.epoch < stop:
        epoch = position.epoch
        if trainer.config.loader_workers:
            checkpointer.settle()  # forking while the encoder holds a lock could hang a worker
        batches = trainer.batches(position)
        stopping = False
        while position.epoch == epoch and not stopping:
            loss = trainer.optimizer_step(batches, trainer.schedule.window_at(position))
            position = trainer.schedule.after(position)
            saver.log(position, loss)
            progress.step(position, loss)
            if position.step == first_step:
                checkpointer.prepare(trainer.state.capture())  # now the optimizer has its state
            cadence.step()
            stopping = should_stop()
            if (stopping or cadence.due(position.step)) and position.epoch == epoch:
                if stopping:
                    checkpointer.settle()  # the last one is never skipped
                cadence.saved(saver.save(position, loss, interval=cadence.explain()))
        if position.epoch > epoch:
            metrics = trainer.evaluate()
            cadence.saved(saver.save(position, loss, metrics, cadence.explain()))
        if stopping and position.epoch < stop:
            checkpointer.wait()
            raise Preempted(f"asked to stop; epoch {position.epoch}, step {position.step} is committed")
    checkpointer.wait()
    return position, metrics


class _Saver:
    """Collects metrics between saves, and refuses to publish what is not finite."""

    def __init__(self, trainer: Trainer, checkpointer: IncrementalCheckpointer) -> None:
        self._trainer = trainer
        self._checkpointer = checkpointer
        self._points: list[MetricPoint] = []

    def log(self, position: Position, loss: Tensor) -> None:
        """Keep the loss of every n-th step. Counted by step, so that a resumed run logs the same ones."""
        if position.step % self._trainer.config.log_every_steps == 0:
            values = {"train/loss": _finite(loss, position), "train/learning_rate": self._trainer.learning_rate()}
            self._points.append(MetricPoint(step=position.step, values=values))

    def save(
        self,
        position: Position,
        loss: Tensor,
        metrics: dict[str, float] | None = None,
        interval: dict[str, Any] | None = None,
    ) -> float | None:
        """Start a save. Returns the seconds that training waited for it; None if it was skipped."""
        value = _finite(loss, position)
        if metrics:
            values = {f"eval/{name}": number for name, number in metrics.items() if math.isfinite(number)}
            self._points.append(MetricPoint(step=position.step, values=values))
            self._checkpointer.settle()  # the end of an epoch is never skipped
        points, self._points = self._points, []
        return self._checkpointer.save(
            self._trainer.state.capture(),
            position=position,
            metrics=points,
            meta={"metrics": metrics or {}},
            health=Health(finite=True, loss=value),
            interval=interval,
        )


class _Progress:
    """Beats at a bounded rate. Only a finished step makes one, so that a hung loop is silent."""

    def __init__(self, report: Callable[[Message], None], position: Position) -> None:
        self._report = report
        self._last = (time.monotonic(), position.sample)

    def step(self, position: Position, loss: Tensor) -> None:
        """Tell the supervisor, at most every `_BEAT_SECONDS`."""
        now = time.monotonic()
        then, sample = self._last
        if now - then >= _BEAT_SECONDS:
            self._last = (now, position.sample)
            rate = (position.sample - sample) / (now - then)
            self._report(Beat(position=position, loss=_finite(loss, position), samples_per_second=rate))


def _finite(loss: Tensor, position: Position) -> float:
    value = float(loss)
    if not math.isfinite(value):
        raise Diverged(
            f"the loss is {value} at step {position.step}",
            hint="lower the learning rate or set clip_grad_norm; the last checkpoint is healthy",
        )
    return value
