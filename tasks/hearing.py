"""What a training process says, turned into the progress of the attempt that is shown and watched."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from infra.beat import Progress
from tasks.order import Publisher
from training.ports import Beat, Done, Message, Pause, Profiled, Restored, Saved, SaveFailed, Slow

TRAINING = "training"


class Hearing:
    """Hears the training processes of one attempt at a range, one after the other.

    Args:
        progress: where the attempt stands.
        on_progress: receives it when it has changed. Its `beats` grow with each message and, from the first one
            on, with each word of the supervisor: whoever watches them sees that both are alive.
        publisher: is told of commits.
        logger: of the attempt.
    """

    def __init__(
        self,
        progress: Progress,
        on_progress: Callable[[Progress], None],
        publisher: Publisher,
        logger: logging.Logger | logging.LoggerAdapter[Any],
    ) -> None:
        self.progress = progress
        self._on_progress, self._publisher, self._logger = on_progress, publisher, logger

    def report(self, **fields: Any) -> None:
        """Change the progress, by a word of the supervisor itself."""
        self._tell(beats=self.progress.beats + bool(self.progress.beats), **fields)

    def vouch(self, what: str | None) -> None:
        """The process is silent, and may be so: `what` is what it has announced."""
        self.report(phase=what or TRAINING)

    def hear(self, message: Message) -> None:
        """Take a message."""
        beats = self.progress.beats + 1
        if isinstance(message, Restored):
            self._hear_restored(message, beats)
        elif isinstance(message, Pause):
            # short ones come with each save and are not worth showing: the vouching shows those that last
            phase = self.progress.phase if self.progress.phase == TRAINING else message.what
            self._tell(phase=phase, beats=beats)
        elif isinstance(message, Beat):
            self._tell(
                phase=TRAINING,
                epoch=message.position.epoch,
                step=message.position.step,
                loss=message.loss if message.loss is not None else self.progress.loss,
                samples_per_second=message.samples_per_second,
                beats=beats,
            )
        elif isinstance(message, Saved):
            self._hear_saved(message, beats)
        elif isinstance(message, SaveFailed):
            self._logger.warning("save failed, %s in a row: %s", message.failures_in_a_row, message.message)
            self._tell(failed_saves=self.progress.failed_saves + 1)
        elif isinstance(message, Slow):
            self._hear_slow(message)
        elif isinstance(message, Profiled):
            self._publisher.profiled(message.path)
        elif isinstance(message, Done):
            self._publisher.notify()
            self._tell(epoch=message.position.epoch, step=message.position.step, beats=beats)

    def _hear_restored(self, message: Restored, beats: int) -> None:
        self._logger.info("token %s starts from %s", self.progress.token, message.checkpoint or "nothing")
        for skipped in message.skipped:
            self._logger.warning("skipped %s: %s", skipped.key, skipped.reason)
        self._tell(
            phase=TRAINING,
            error=None,  # what ended the try before is over
            slow_rank=None,
            restored=str(message.checkpoint) if message.checkpoint else "nothing",
            skipped=len(message.skipped),
            total_steps=message.total_steps,
            steps_per_epoch=message.steps_per_epoch,
            epoch=message.position.epoch,
            step=message.position.step,
            beats=beats,
        )

    def _hear_slow(self, message: Slow) -> None:
        if message.over:
            self._logger.info("rank %s does not hold up the others any more", message.rank)
            self._tell(slow_rank=None)
            return
        self._logger.warning(
            "rank %s holds up the others since step %s: of a step's %.1f ms it needs %.1f more than their median",
            message.rank,
            message.since_step,
            1000 * message.step_seconds,
            1000 * message.excess_seconds,
        )
        self._tell(slow_rank=message.rank)

    def _hear_saved(self, message: Saved, beats: int) -> None:
        self._publisher.notify()
        newest = max(self.progress.step, message.position.step)  # the loop is ahead of its saves
        self._tell(
            step=newest,
            checkpoint=str(message.checkpoint),
            checkpoint_kind=message.checkpoint_kind,
            written_bytes=message.written_bytes,
            state_bytes=message.state_bytes,
            stall_seconds=message.stall_seconds,
            checkpoints=self.progress.checkpoints + 1,
            beats=beats,
        )

    def _tell(self, **fields: Any) -> None:
        self.progress = self.progress.model_copy(update=fields)
        self._on_progress(self.progress)
