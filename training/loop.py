"""The training loop over a half-open range of epochs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from training.cadence import Cadence
from training.checkpoint.checkpointer import IncrementalCheckpointer
from training.checkpoint.manifest import Health, MetricPoint, Position
from training.errors import Preempted, Unavailable
from training.health import LossWatch, finite
from training.measures import Measures
from training.ports import EVALUATION_DUE, Message
from training.profile import Profile
from training.progress import Progress
from training.stopping import StopRequest
from training.trainer import Step, Trainer


def train_epochs(
    trainer: Trainer,
    checkpointer: IncrementalCheckpointer,
    position: Position,
    last: int,
    report: Callable[[Message], None],
    stop: StopRequest | None = None,
    cadence: Cadence | None = None,
    evaluation_due: bool = False,
    watch: LossWatch | None = None,
    profile_folder: Path | None = None,
) -> tuple[Position, dict[str, float]]:
    """Train from `position` until epoch `last` begins; every step of the way is resumable.

    Args:
        trainer: the job, with its state already at `position`.
        checkpointer: an opened attempt.
        position: what comes next.
        last: first epoch that is not trained.
        report: receives beats and pauses.
        stop: asked after each step; ends the range early, after a save. It ends an evaluation at once.
        cadence: says when to save within an epoch; default: by the configuration, knowing of no failures.
        evaluation_due: the evaluation at `position` was given up and comes first.
        watch: of the loss, with what it knew at `position`; default: one that knows nothing yet.
        profile_folder: where a profile goes; default: none is made.

    Returns:
        The position at `last`, and the metrics of the last evaluation; everything is committed.

    Raises:
        Preempted: `stop` was asked; the state is committed, or the message says why not.
        Diverged: the loss or the state is not healthy; nothing of it was published, but for the start of a spike.
        Fenced: a newer attempt has taken over.
        Unavailable: the store failed several saves in a row.
    """
    stop = stop or StopRequest()
    limits = trainer.config.supervisor
    progress = Progress(report, position, limits)
    watch = watch or LossWatch(trainer.config.health, trainer.config.log_every_steps)
    measures = Measures(trainer.ranks, progress, report)
    saver = _Saver(trainer, checkpointer, progress, position, watch, measures)
    cadence = cadence or Cadence(trainer.config.checkpoint, checkpointer)
    profile = Profile(trainer.config.profile, profile_folder, trainer.rank, progress, limits, report)
    first_step = position.step + 1
    trainer.start(position)
    with progress.until_the_end(), profile:
        if evaluation_due:
            cadence.saved(saver.evaluate(position, stop, cadence))
        while position.epoch < last and not stop.asked:
            epoch, batches, fresh = position.epoch, saver.batches(position), trainer.config.loader_workers > 0
            while position.epoch == epoch and saver.may_go_on(position, stop, cadence):
                window = trainer.schedule.window_at(position)
                profile.before_step(position.step)
                progress.before_step(window, fresh)
                loss = trainer.optimizer_step(batches, window)
                position, fresh = trainer.schedule.after(position), False
                if trainer.synchronises(position):
                    progress.before_synchronisation()
                steps = trainer.agree(position, loss, stop)
                saver.log(steps)
                progress.step(position, steps[-1].loss if steps else None)
                measures.step(position)
                if position.step == first_step:
                    checkpointer.prepare(trainer.state.capture())  # now the optimizer has its state
                cadence.step()
                saver.surface()
                due = cadence.due(position.step, trainer.is_synchronised)
                if due and position.epoch == epoch and not stop.asked:
                    cadence.saved(saver.save(position, cadence))
            if position.epoch > epoch:
                cadence.saved(saver.evaluate(position, stop, cadence))
        if stop.asked and (position.epoch < last or saver.evaluation_due):
            saver.leave(position, cadence)
        saver.wait()
        return position, saver.metrics


class _Saver:
    """Collects metrics between saves, and refuses to publish what is not finite.

    Attributes:
        metrics: of the last evaluation.
        evaluation_due: it was given up.
    """

    def __init__(
        self,
        trainer: Trainer,
        checkpointer: IncrementalCheckpointer,
        progress: Progress,
        position: Position,
        watch: LossWatch,
        measures: Measures,
    ) -> None:
        self._trainer, self._checkpointer, self._progress, self._watch = trainer, checkpointer, progress, watch
        self._measures = measures
        self._limits = trainer.config.supervisor
        self._points: list[MetricPoint] = []
        self._loss: Tensor | None = None
        self._saved = position
        self.metrics: dict[str, float] = {}
        self.evaluation_due = False

    def batches(self, position: Position) -> Iterator[Any]:
        """Micro-batches of the rest of the epoch."""
        if self._trainer.config.loader_workers:
            self._settle()  # forking while the encoder holds a lock could hang a worker
        return self._trainer.batches(position)

    def log(self, steps: Iterable[Step]) -> None:
        """Keep the loss of every n-th step. Counted by step, so that a resumed run logs the same ones."""
        for position, loss, learning_rate in steps:
            self._loss = loss
            self._watch.step(position, loss)
            if learning_rate is not None:
                values = {"train/loss": finite(loss, position), "train/learning_rate": learning_rate}
                self._points.append(MetricPoint(step=position.step, values=values))

    def may_go_on(self, position: Position, stop: StopRequest, cadence: Cadence) -> bool:
        """Return when the steps until the next save are none too many to lose; False if `stop` came first.

        Where the ranks differ nothing can be saved, and nobody leaves.
        """
        if not self._trainer.is_synchronised:
            return True
        limit = self._trainer.config.checkpoint.max_lost_steps
        most = math.inf if limit is None else limit - self._trainer.round_steps
        while self._unsaved_steps(position) > most and not stop.asked:
            self._settle()
            if self._unsaved_steps(position) > most:
                cadence.saved(self.save(position, cadence))
        return not stop.asked

    def surface(self) -> None:
        """Raise the error of a save that has just ended: a fenced attempt trains no further."""
        if not self._checkpointer.busy:
            self._checkpointer.settle()

    def evaluate(self, position: Position, stop: StopRequest, cadence: Cadence) -> float | None:
        """Evaluate and save. An evaluation that is given up leaves a checkpoint that says that it is due."""
        with self._progress.pause("evaluating", self._limits.evaluation_seconds):
            metrics = self._trainer.evaluate(stop)
        self.metrics, self.evaluation_due = metrics or {}, metrics is None
        if metrics is None:
            return None
        values = {f"eval/{name}": number for name, number in metrics.items() if math.isfinite(number)}
        if values:
            self._points.append(MetricPoint(step=position.step, values=values))
        self._settle()  # the end of an epoch is never skipped
        return self.save(position, cadence)

    def save(self, position: Position, cadence: Cadence) -> float | None:
        """Start a save. Returns the seconds that training waited for it; None if it was skipped."""
        loss = finite(self._loss, position) if self._loss is not None else None
        meta: dict[str, Any] = {"metrics": self.metrics if self._trainer.schedule.offset(position) == 0 else {}}
        if self.evaluation_due:
            meta[EVALUATION_DUE] = True
        if memory := self._watch.memory():
            meta["health"] = memory
        if self._checkpointer.rollback is not None:
            meta["rollback"] = self._checkpointer.rollback.model_dump()
        meta.update(self._measures.notes())
        if speed := self._measures.take():
            self._points.append(MetricPoint(step=position.step, values=speed))
        points, self._points = self._points, []
        with self._progress.pause("saving", self._limits.save_seconds):
            stall_seconds = self._checkpointer.save(
                self._trainer.state.capture(),
                position=position,
                metrics=points,
                meta=meta,
                health=Health(finite=True, loss=loss),
                interval=cadence.explain(),
            )
        if stall_seconds is not None:
            self._saved = position
        return stall_seconds

    def leave(self, position: Position, cadence: Cadence) -> None:
        """Save what is not saved yet, wait for it, and raise `Preempted`."""
        where = f"epoch {position.epoch}, step {position.step}"
        try:
            if position != self._saved:
                self._settle()  # the last one is never skipped
                self.save(position, cadence)
            self.wait()
        except Unavailable as error:
            raise Preempted(f"asked to stop; {where} could not be saved: {error.message}") from error
        raise Preempted(f"asked to stop; {where} is committed")

    def wait(self) -> None:
        """Return when everything is committed."""
        with self._progress.pause("saving", self._limits.save_seconds):
            self._checkpointer.wait()

    def _unsaved_steps(self, position: Position) -> int:
        head = self._checkpointer.head
        return position.step - (head.manifest.position.step if head else 0)

    def _settle(self) -> None:
        with self._progress.pause("saving", self._limits.save_seconds):
            self._checkpointer.settle()
