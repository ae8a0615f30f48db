"""The face of the engine: incremental checkpoints in any training loop, without a server.

    checkpointer = IncrementalCheckpointer("./checkpoints")
    state = checkpointer.restore()                        # the newest intact state, or None
    checkpointer.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, ...)

`save` returns when the state is copied; encoding and writing go on in the background.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from datetime import UTC, datetime
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from torch import nn
from torch.optim import Optimizer

from training.checkpoint import patience
from training.checkpoint.attempt import Attempt
from training.checkpoint.coding.bounded import BoundedCodec
from training.checkpoint.coding.codec import release_gil
from training.checkpoint.document import plain_json
from training.checkpoint.draft import Draft
from training.checkpoint.flight import Flight
from training.checkpoint.manifest import Committed, Health, MetricPoint, Position
from training.checkpoint.policy import ChainPolicy
from training.checkpoint.quarantine import RollbackPolicy
from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.ranks.group import GroupAttempt
from training.checkpoint.restore import RestoredState
from training.checkpoint.state.boxes import BoxOf, no_box
from training.checkpoint.state.buffers import BufferPair
from training.checkpoint.state.overlap import Overlap
from training.checkpoint.state.parts import box_like
from training.checkpoint.state.share import ALONE, HoldersOf, Share
from training.checkpoint.state.tree import flatten
from training.checkpoint.store import Store, open_store
from training.checkpoint.token import Rollback, run_of
from training.errors import Invalid, RetomaError

DEFAULT_RUN = "default"


class IncrementalCheckpointer:
    """Saves what changed since the last committed checkpoint, and restores the newest intact one.

    One object is one attempt at a run: it claims a fencing token when it first touches the store. A newer attempt
    on the same store fences it, and its saves fail with `Fenced` from then on.

    Args:
        save_dir: folder or URL of the run's store, or an open `Store`.
        interval: epochs between checkpoints, for `due(epoch)`. `save` and `save_checkpoint` always save.
        run: name of the run; default: the one that the store holds.
        token: a token that the caller has claimed for this attempt; default: claim one.
        deltas_per_base: at most so many deltas after a base; default: decided by what they cost to restore.
        restore_seconds: how long a restore may take; a base follows before a chain would take longer.
        bounded: `int8` or `int4`: deltas with a bounded error, see `BoundedCodec`. A resume is not bit-exact then.
        on_busy: what `save` does while the one before is in flight: `wait` for it, or `skip` and return None.
        max_failed_saves: so many failed saves in a row, with the store not answering, are told to `on_failed` only;
            the next one is raised. 0: the first one is raised, by the next call.
        must_be_finite: keys of tensors, or of parts of the state (`model`, `optimizer/state`), without a NaN or an
            infinity. A save that holds one is not committed: `Diverged`. Leave out buffers: a mask may be infinite.
        group: the ranks that save together, each with its own object and the same calls in the same order; see
            `training.checkpoint.ranks`, and `host_exchange` in its `hosted` for a loop of your own.
        split: keys of tensors, or of parts of the state, that are alike on all ranks of the group bit for bit: each
            rank saves some of them. All else that is not sharded is rank 0's.
        patience_seconds: in a group, how long a rank that lives may take to write its share, before the save fails
            on all.
        holders_of: the ranks that hold a tensor, by its key, in order, where a state has a `Pooled` in it: what is
            said of all ranks above is true of these then. Default: all ranks hold all tensors.
        rollback: after such a save, or `quarantine`, the next attempt starts from before the trouble.
        encode_threads: threads that compress in the background.
        upload_threads: threads that put packs.
        job, data: JSON that every manifest repeats: the job's identity and the data version.
        who: JSON for the claim: who made this attempt.
        on_saved: called in the background with each committed checkpoint.
        on_failed: called with each failed save, and how many in a row have failed.
        clock: seconds since the epoch; informational timestamps only.
    """

    def __init__(
        self,
        save_dir: str | Path | Store,
        interval: int = 1,
        *,
        run: str | None = None,
        token: int | None = None,
        deltas_per_base: int | None = None,
        restore_seconds: float | None = None,
        bounded: Literal["int8", "int4"] | BoundedCodec | None = None,
        on_busy: Literal["wait", "skip"] = "wait",
        max_failed_saves: int = 0,
        must_be_finite: Iterable[str] = (),
        group: Exchange | None = None,
        split: Iterable[str] = (),
        patience_seconds: float = 600.0,
        holders_of: HoldersOf | None = None,
        rollback: RollbackPolicy | None = None,
        encode_threads: int = 1,
        upload_threads: int = 2,
        job: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        who: Mapping[str, Any] | None = None,
        on_saved: Callable[[Committed], None] | None = None,
        on_failed: Callable[[RetomaError, int], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if interval < 1 or encode_threads < 1 or upload_threads < 1:
            raise Invalid("interval, encode_threads and upload_threads must be at least 1")
        if min(deltas_per_base or 0, max_failed_saves) < 0 or on_busy not in ("wait", "skip"):
            raise Invalid("deltas_per_base and max_failed_saves must be at least 0, on_busy wait or skip")
        for name, value in (("restore_seconds", restore_seconds), ("patience_seconds", patience_seconds)):
            if value is not None and not value > 0:
                raise Invalid(f"{name} must be more than 0, not {value}")
        self.store = open_store(save_dir) if isinstance(save_dir, str | Path) else save_dir
        self.interval = interval
        self.run = run if run is not None else run_of(self.store) or DEFAULT_RUN
        self.skipped_saves = 0
        self.group = group
        self._skip_when_busy = on_busy == "skip"
        self._flight = Flight(max_failed_saves, on_failed)
        self._on_saved = on_saved
        self._clock = clock
        self._closed = False
        share = Share(group.rank, group.size, frozenset(split), holders_of) if group is not None else ALONE
        self._buffers = BufferPair(share)
        self._overlap = Overlap(self._let_step)
        self._saver = futures.ThreadPoolExecutor(1, "retoma-save")
        self._encoders = futures.ThreadPoolExecutor(encode_threads, "retoma-encode")
        self._uploaders = futures.ThreadPoolExecutor(upload_threads, "retoma-upload")
        options: dict[str, Any] = {}
        if group is not None:
            options = {"exchange": group, "share": share, "patience_seconds": patience_seconds}
        self._attempt = (Attempt if group is None else GroupAttempt)(
            **options,
            store=self.store,
            run=self.run,
            token=token,
            who={"host": socket.gethostname(), "pid": os.getpid(), **plain_json(dict(who or {}), "who")},
            job=plain_json(dict(job or {}), "job"),
            data=plain_json(dict(data or {}), "data"),
            policy=ChainPolicy(deltas_per_base, restore_seconds),
            must_be_finite=must_be_finite,
            rollback_policy=rollback,
            bounded=BoundedCodec(bounded) if isinstance(bounded, str) else bounded,
            encoders=self._encoders,
            uploaders=self._uploaders,
            now=self._now,
        )
        release_gil()

    @property
    def token(self) -> int | None:
        """Of the attempt; None until it has claimed one."""
        return self._attempt.token

    @property
    def head(self) -> Committed | None:
        """The newest checkpoint that was restored or committed."""
        return self._attempt.head

    @property
    def rollback(self) -> Rollback | None:
        """That this attempt has made when it was opened."""
        return self._attempt.rollback

    def restore(self, like: Mapping[str, Any] | BoxOf | None = None) -> RestoredState | None:
        """The newest intact state of the run, or None if it has none yet.

        Args:
            like: in a group, the live state, or the part that is needed by the key of a tensor: of one that is
                sharded there, its part comes back, as a plain tensor. Every other tensor comes back whole; of a
                `Pooled` only what it holds there. Later calls without it need the same as the one before.

        The first call opens the attempt: claims a token, restores, and seals what it restored. Later calls return
        the newest state that this attempt committed.

        Raises:
            Corrupt: the run has checkpoints, and none is intact.
            Fenced: a newer attempt has taken over.
        """
        if like is not None:
            self._attempt.box_of = like if callable(like) else box_like(like)
        if not self._attempt.is_open:
            return self._attempt.open()
        self.wait()
        return self._attempt.read_again()

    def has_checkpoint(self) -> bool:
        """Whether there is anything to restore. In a group all ranks get the same answer.

        Claims the token: what an older attempt writes from now on is void, so that the answer stays true.
        """
        return self.head is not None if self._attempt.is_open else self._attempt.has_checkpoint()

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that could not be saved, by name, before any training is done."""
        flatten(dict(state), self.group.rank if self.group is not None else None)

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Have memory for states of this structure made in the background, so that the first save stalls no longer
        than the others. Call it when the optimizer has taken its first step; later calls do nothing.
        """
        self._buffers.prepare(state)

    def overlap(self, model: nn.Module, *optimizers: Optimizer) -> None:
        """Let the copy of a save go on beside the next forward and backward pass.

        From now on `save` copies at once only what may change before the next optimizer step: buffers, random
        states, counters. The rest is copied in the background, and `step` of these optimizers waits for it.

        This is a promise of the caller: until then, nothing but `step` writes to the parameters of `model` or to
        the state of `optimizers`. A write that breaks it fails the save by name; one through `.data` is not seen.
        `wait()` returns when everything is copied and stored.
        """
        self._overlap.add(model, optimizers)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        position: Position | None = None,
        base: bool = False,
        meta: Mapping[str, Any] | None = None,
        metrics: Iterable[MetricPoint] = (),
        health: Health | None = None,
        interval: Mapping[str, Any] | None = None,
    ) -> float | None:
        """Copy `state` and commit it in the background. Never waits for this save, at most for the one before.

        Args:
            state: nested dicts, lists and tuples of tensors, arrays and plain scalars.
            position: what comes next when a run resumes from here.
            base: write everything, whatever changed.
            meta: the caller's own JSON. NaN and infinities come back as the strings "NaN", "Infinity", "-Infinity".
            metrics: values since the previous save. Those of a failed or skipped save go with the next one.
            health: whether the state is finite.
            interval: JSON: how the caller chose to save now.

        Returns:
            Seconds that the copy took; None if it was skipped since the save before is in flight.

        Raises:
            Any error of the save before it, which is lost; the reference for deltas is unchanged.
            Unavailable: only after more than `max_failed_saves` in a row.
            Fenced: final for this object.
            Invalid: the state cannot be saved; names the leaf. Or the object is closed.
        """
        self._flight.metrics.extend(metrics)
        if self._skip_when_busy and self.busy:
            self.skipped_saves += 1
            return None
        self.settle()
        if self._closed:
            raise Invalid("this checkpointer is closed", hint="make a new IncrementalCheckpointer")
        if not self._attempt.is_open:
            self._open_for(state)
        try:
            plain_meta = plain_json(dict(meta or {}), "meta")
            plain_interval = plain_json(dict(interval or {}), "interval")
            started = time.perf_counter()
            snapshot, copying, buffers = self._buffers.take(state, self._overlap.promised())
            stall_seconds = time.perf_counter() - started
        except BaseException as error:
            self._attempt.give_up(error)
            raise
        draft = Draft(
            snapshot=snapshot,
            copying=copying,
            buffers=buffers,
            position=position or Position(),
            stall_seconds=stall_seconds,
            base=base,
            meta=plain_meta,
            metrics=self._flight.take_metrics(),
            health=health or Health(),
            interval=plain_interval,
        )
        self._flight.start(draft, self._saver.submit(self._write, draft))
        return stall_seconds

    def withdraw(self, error: BaseException) -> None:
        """In a group: this rank cannot take part in the save that the others begin, and here is why.

        It stands in place of `save`, and fails the save on all ranks: they would wait for this one otherwise.
        Without a group nothing is done.
        """
        if self.group is not None:
            self.settle()
            if not self._attempt.is_open:
                self._attempt.open()
            self._attempt.give_up(error)

    def quarantine(self, name: str, reason: str, *, position: Position, since_step: int) -> None:
        """Keep on record what is wrong with this attempt, for people and for the rollback of the next one.

        Args:
            name: of what is not healthy: `loss`, or a tensor.
            reason: one clause.
            position: where it was found.
            since_step: the first step that is not healthy. A rollback starts from before it.
        """
        keep = self._saver.submit(  # behind the save in flight, which takes a sequence, too
            self._attempt.quarantine, name, reason, position, since_step
        )
        patience.result(keep)

    def save_checkpoint(self, state: Mapping[str, Any], epoch: int, **meta: Any) -> None:
        """Save with the epoch as the only position, for loops that count nothing else.

        `epoch` comes back as `restore().epoch`, as it was given.
        """
        try:
            position = Position(epoch=index(epoch))
        except (TypeError, ValueError) as error:
            raise Invalid(f"epoch must be a whole number of at least 0, not {epoch!r}") from error
        self.save(state, position=position, meta=meta)

    def due(self, epoch: int) -> bool:
        """Whether `epoch` is a multiple of `interval`."""
        return epoch % self.interval == 0

    @property
    def failed_saves(self) -> int:
        """Saves of this object that failed so far."""
        return self._flight.failed

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._flight.busy

    def wait(self) -> Committed | None:
        """Wait until the save in flight is committed; raise its error if it failed. Returns the head."""
        self._flight.wait()
        return self.head

    def settle(self) -> None:
        """Like `wait`, but a store that does not answer is forgiven `max_failed_saves` times in a row."""
        self._flight.settle()

    def close(self) -> None:
        """Wait for the save in flight, raise its error, and stop the background threads."""
        try:
            self.wait()
        finally:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:  # the error that is on its way matters more than that of a save
            self._stop()

    def _open_for(self, state: Mapping[str, Any]) -> None:
        """Open the attempt without `restore`: of sharded tensors only what this rank saves is read."""
        if self.group is not None:
            with contextlib.suppress(Invalid, RecursionError):  # the copy will say which tensor it is
                self._attempt.box_of = box_like(state)
        self._attempt.open()
        self._attempt.box_of = no_box

    def _stop(self) -> None:
        self._closed = True
        for executor in (self._saver, self._encoders, self._uploaders):
            executor.shutdown()
        self._buffers.close()
        self._overlap.close()

    def _let_step(self, optimizer: Optimizer, gradients_stay: bool) -> None:
        """Before a step of an optimizer of `overlap`: the step harms no copy when this returns."""
        if self._flight.draft is not None:
            self._flight.draft.copying.let_step(optimizer, gradients_stay=gradients_stay)

    def _write(self, draft: Draft) -> Committed:
        """In the background."""
        try:
            committed = self._attempt.write(draft, self._flight.failed, self.skipped_saves)
        except BaseException:
            self._buffers.give_back(draft.buffers)
            raise
        self._buffers.hold(draft.buffers)
        if self._on_saved is not None:
            self._on_saved(committed)
        return committed

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
