"""The face of the engine: incremental checkpoints in any training loop, without a server.

    checkpointer = IncrementalCheckpointer("./checkpoints")
    state = checkpointer.restore()                        # the newest intact state, or None
    checkpointer.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, ...)

`save` returns when the state is copied; encoding and writing go on in the background.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from datetime import UTC, datetime
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from training.checkpoint.codec import release_gil
from training.checkpoint.commit import commit
from training.checkpoint.document import plain_json
from training.checkpoint.draft import Draft
from training.checkpoint.manifest import Committed, Health, MetricPoint, Position
from training.checkpoint.pack import PackWriter, Reference, write_packs
from training.checkpoint.restore import RestoredState, restore_checkpoint, restore_newest
from training.checkpoint.snapshot import SnapshotBuffers
from training.checkpoint.store import Store, open_store
from training.checkpoint.token import Seal, claim, claim_key, mark_run, prove_put_if_absent, run_of, seal
from training.checkpoint.tree import flatten
from training.errors import Fenced, Invalid

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
        deltas_per_base: after this many deltas follows a base. Bounds the time of a restore.
        encode_threads: threads that compress in the background.
        job, data: JSON that every manifest repeats: the job's identity and the data version.
        who: JSON for the claim: who made this attempt.
        on_saved: called in the background with each committed checkpoint.
        clock: seconds since the epoch; informational timestamps only.
    """

    def __init__(
        self,
        save_dir: str | Path | Store,
        interval: int = 1,
        *,
        run: str | None = None,
        token: int | None = None,
        deltas_per_base: int = 8,
        encode_threads: int = 1,
        job: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        who: Mapping[str, Any] | None = None,
        on_saved: Callable[[Committed], None] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if interval < 1 or deltas_per_base < 0 or encode_threads < 1:
            raise Invalid("interval and encode_threads must be at least 1, deltas_per_base at least 0")
        self.store = open_store(save_dir) if isinstance(save_dir, str | Path) else save_dir
        self.interval = interval
        self.deltas_per_base = deltas_per_base
        self.run = run if run is not None else run_of(self.store) or DEFAULT_RUN
        self.token = token
        self.head: Committed | None = None
        self._job, self._data = plain_json(dict(job or {}), "job"), plain_json(dict(data or {}), "data")
        self._who = {"host": socket.gethostname(), "pid": os.getpid(), **plain_json(dict(who or {}), "who")}
        self._on_saved = on_saved
        self._clock = clock
        self._opened = self._closed = False
        self._opened_at: str | None = None  # told once: a seal that is put again must have the same bytes
        self._fenced: Fenced | None = None
        self._sequence = 0
        self._reference: Reference | None = None
        self._spare: SnapshotBuffers | None = None  # free to be written
        self._held: SnapshotBuffers | None = None  # backs the reference
        self._pending: futures.Future[Committed] | None = None
        self._saver = futures.ThreadPoolExecutor(1, "retoma-save")
        self._encoders = futures.ThreadPoolExecutor(encode_threads, "retoma-encode")
        release_gil()

    def restore(self) -> RestoredState | None:
        """The newest intact state of the run, or None if it has none yet.

        The first call opens the attempt: claims a token, restores, and seals what it restored. Later calls return
        the newest state that this attempt committed.

        Raises:
            Corrupt: the run has checkpoints, and none is intact.
            Fenced: a newer attempt has taken over.
        """
        if not self._opened:
            return self._open()
        self.wait()
        if self.head is None:
            return None
        return restore_checkpoint(self.store, self.head.ref.token, self.head.ref.sequence, self.run)

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that could not be saved, by name, before any training is done."""
        flatten(dict(state))

    def save(
        self,
        state: Mapping[str, Any],
        *,
        position: Position | None = None,
        base: bool = False,
        meta: Mapping[str, Any] | None = None,
        metrics: Iterable[MetricPoint] = (),
        health: Health | None = None,
    ) -> float:
        """Copy `state` and commit it in the background. Waits for the save before it, never for this one.

        Args:
            state: nested dicts, lists and tuples of tensors, arrays and plain scalars.
            position: what comes next when a run resumes from here.
            base: write everything, whatever changed.
            meta: the caller's own JSON. NaN and infinities come back as the strings "NaN", "Infinity", "-Infinity".
            metrics: values since the previous save.
            health: whether the state is finite.

        Returns:
            Seconds that the copy took.

        Raises:
            Any error of the save before it, which is lost; the reference for deltas is unchanged.
            Fenced: final for this object.
            Invalid: the state cannot be saved; names the leaf. Or the object is closed.
        """
        self.wait()
        if self._closed:
            raise Invalid("this checkpointer is closed", hint="make a new IncrementalCheckpointer")
        if not self._opened:
            self._open()
        plain_meta = plain_json(dict(meta or {}), "meta")
        started = time.perf_counter()
        buffers = self._spare or SnapshotBuffers()
        self._spare = None
        snapshot = buffers.take(state)
        stall_seconds = time.perf_counter() - started
        draft = Draft(
            snapshot=snapshot,
            buffers=buffers,
            position=position or Position(),
            stall_seconds=stall_seconds,
            base=base,
            meta=plain_meta,
            metrics=tuple(metrics),
            health=health or Health(),
        )
        self._pending = self._saver.submit(self._write, draft)
        return stall_seconds

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

    def wait(self) -> Committed | None:
        """Wait until the save in flight is committed; raise its error if it failed. Returns the head."""
        if self._fenced is not None:
            raise self._fenced
        if self._pending is not None:
            futures.wait([self._pending])  # interrupted here, the save is still ours to wait for
            pending, self._pending = self._pending, None
            try:
                pending.result()
            except Fenced as error:
                self._fenced = error
                raise
        return self.head

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

    def _stop(self) -> None:
        self._closed = True
        self._saver.shutdown()
        self._encoders.shutdown()

    def _open(self) -> RestoredState | None:
        """Claim, then look, restore, and seal what was really restored."""
        notes = mark_run(self.store, self.run)
        prove_put_if_absent(self.store, self.run)
        if self._opened_at is None:
            self._opened_at = self._now()
        if self.token is None:
            self.token = claim(self.store, self.run, self._who, self._opened_at)
        elif not self.store.exists(claim_key(self.token)):
            raise Invalid(f"token {self.token} was not claimed: nothing would fence it", run=self.run)
        state, reference, skipped = restore_newest(self.store, self.run, before=self.token, notes=notes)
        self.head = state.checkpoint if state is not None else None  # a state may be empty
        head = self.head.ref if self.head else None
        document = Seal(run=self.run, token=self.token, head=head, skipped=tuple(skipped), created=self._opened_at)
        seal(self.store, document)
        self._reference = reference
        self._sequence = head.sequence + 1 if head else 0
        self._opened = True
        return state

    def _write(self, draft: Draft) -> Committed:
        """In the background: packs, then the commit. Only then does the snapshot become the reference."""
        sequence, self._sequence = self._sequence, self._sequence + 1  # never reused, also after a failure
        head = self.head.manifest if self.head else None
        base = draft.base or head is None or head.deltas_since_base >= self.deltas_per_base
        assert self.token is not None  # noqa: S101 - the attempt is open
        writer = PackWriter(self.store, self.token, sequence)
        written = write_packs(draft.snapshot, None if base else self._reference, writer, self._encoders)
        manifest = draft.manifest(
            written,
            run=self.run,
            token=self.token,
            sequence=sequence,
            parent=self.head,
            base=base,
            job=self._job,
            data=self._data,
            created=self._now(),
        )
        committed = Committed(manifest, commit(self.store, manifest))
        self.head = committed
        self._reference = Reference(draft.snapshot.chunks, written.digests)
        self._spare, self._held = self._held or draft.buffers.twin(), draft.buffers
        if self._on_saved is not None:
            self._on_saved(committed)
        return committed

    def _now(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds")
