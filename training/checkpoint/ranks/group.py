"""An attempt of a group of ranks: each writes its share, rank 0 commits, and all take its outcome for their own.

Two phases: every rank tells its part of the manifest and that its packs are stored, or its error; rank 0 waits for
all of them, commits, and tells the outcome. No collective of the training is used, so that a dead rank fails a save
and blocks nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from training.checkpoint.attempt import Attempt
from training.checkpoint.commit import commit
from training.checkpoint.draft import Draft
from training.checkpoint.manifest import Committed, Manifest, Position
from training.checkpoint.pack import Written
from training.checkpoint.policy import Cost, work_of
from training.checkpoint.ranks.contribution import Contribution, Failure, Look, Outcome, Parcel
from training.checkpoint.ranks.exchange import Exchange
from training.checkpoint.ranks.leader import Leader, Ready
from training.checkpoint.ranks.messages import Messages
from training.checkpoint.restore import Found, RestoredState, View, load_checkpoint
from training.checkpoint.state.boxes import Wanted
from training.checkpoint.state.share import Share
from training.checkpoint.token import Skipped
from training.errors import Corrupt, Invalid, RetomaError, Unavailable

Explain = Callable[[Manifest, Cost], Manifest]  # with the reason for its kind
EARLY_SECONDS = 1.0  # that rank 0 waits for the others' parts before it looks what became of its own packs


@dataclass(kw_only=True)
class GroupAttempt(Attempt):
    """One rank's view of the attempt of its group. All ranks call `open` and `write` in the same order.

    Attributes:
        exchange: with the other ranks; used by one thread at a time.
        share: of this rank.
        patience_seconds: how long a rank that lives may take to write its share.
    """

    exchange: Exchange
    share: Share
    patience_seconds: float = 600.0
    _looks: int = 0
    _asked: int = 0
    _next_base: tuple[bool, str] = (True, "")
    _told_layout: str = ""  # digest of the structure that rank 0 has of this rank

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange.taken:
            raise Invalid("an exchange serves one checkpointer", hint="make an exchange for each, on all ranks")
        self.exchange.taken = True
        self._messages = Messages(self.exchange, self.patience_seconds)
        self._leader = Leader(self.exchange.size) if self.exchange.rank == 0 else None

    def open(self) -> RestoredState | None:
        """See `Attempt.open`. All ranks restore the same checkpoint, or raise the same error."""
        return self._start_from(self._follow()) if self._leader is None else self._lead(self._leader)

    def write(self, draft: Draft, failed_saves: int, skipped_saves: int) -> Committed:
        """See `Attempt.write`. All ranks return the same checkpoint, or raise the same error."""
        sequence = self.take_sequence()
        base, reason = (True, "asked for") if draft.base else self._next_base
        if self._leader is None:
            written, outcome, committed = self._contribute(draft, sequence, base)
        else:
            explain = partial(
                self.policy.explain, reason=reason, failed_saves=failed_saves, skipped_saves=skipped_saves
            )
            written, outcome, committed = self._lead_save(self._leader, draft, sequence, base, explain)
        self._next_base, self._told_layout = outcome.next_base, draft.snapshot.layout_digest
        self._reference, self.head = written.reference, committed
        return committed

    def read_again(self) -> RestoredState | None:
        """See `Attempt.read_again`: this rank's part of it."""
        if self.head is None:
            return None
        return self._load(self.head.ref.token, self.head.ref.sequence, []).state

    def has_checkpoint(self) -> bool:
        """See `Attempt.has_checkpoint`. Rank 0 looks, and tells all."""
        key, self._asked = f"asked/{self._asked}", self._asked + 1
        if self._leader is None:
            look = self._messages.take(key, 0, Look)
            if look.failure is not None:
                raise look.failure.error()
            return look.found
        try:
            found = super().has_checkpoint()
        except BaseException as error:
            self._messages.post(key, Look(failure=Failure.of(error)))
            raise
        self._messages.post(key, Look(token=self._my_token, found=found))
        return found

    def give_up(self, error: BaseException) -> None:
        """Tell the others, who have begun the same save. It fails on all ranks."""
        sequence = self.take_sequence()
        with suppress(Unavailable):  # what the caller is about to raise is the cause
            self._tell_failed(sequence, error)

    def quarantine(self, name: str, reason: str, position: Position, since_step: int) -> None:
        """See `Attempt.quarantine`: all ranks find it, and rank 0 keeps it."""
        if self._leader is not None:
            super().quarantine(name, reason, position, since_step)
        else:
            self.take_sequence()

    def _lead(self, leader: Leader) -> RestoredState | None:
        """Rank 0: claim, look for a checkpoint that all ranks can read, and seal it."""
        try:
            found = self._find_and_seal(self._claim(), self._load_together)
            restored = self._start_from(found)
            if found is not None:
                leader.start_from(found.chain)
        except BaseException as error:
            self._messages.post(self._look_key(), Look(failure=Failure.of(error)))
            raise
        self._next_base = self.policy.decide()
        done = Look(
            token=self._my_token,
            found=restored is not None,
            skipped=restored.skipped if restored is not None else (),
            rollback=self.rollback,
            next_base=self._next_base,
        )
        self._messages.post(self._look_key(), done)
        return restored

    def _load_together(self, token: int, sequence: int, skipped: list[Skipped]) -> Found:
        """Have every rank read a checkpoint. Raises `Corrupt` if one of them cannot."""
        look = self._look_key()
        self._messages.post(look, Look(token=self._my_token, place=(token, sequence)))
        self._looks += 1
        found: Found | None = None
        damage: RetomaError | None = None
        try:
            found = self._load(token, sequence, skipped)
        except Corrupt as error:
            damage = error
        for rank in range(1, self.exchange.size):
            answer = self._messages.take(f"{look}/r{rank}", rank, Outcome)
            if answer.failure is not None:
                told = answer.failure.error(rank)
                damage = told if damage is None or not isinstance(told, Corrupt) else damage
        if damage is not None:
            raise damage
        assert found is not None  # noqa: S101 - nothing was raised
        return found

    def _follow(self) -> Found | None:
        """The other ranks: read what rank 0 names until it is content."""
        found: Found | None = None
        while True:
            key = self._look_key()
            look = self._messages.take(key, 0, Look)
            if look.failure is not None:
                raise look.failure.error()
            self.token = look.token
            if look.place is None:
                break
            self._looks += 1
            answer = Outcome()
            try:
                found = self._load(*look.place, [])
            except BaseException as error:  # noqa: BLE001 - rank 0 decides, and tells everybody
                found, answer = None, Outcome(failure=Failure.of(error))
            self._messages.post(f"{key}/r{self.exchange.rank}", answer)
        self.rollback, self._next_base = look.rollback, look.next_base
        if not look.found:
            return None
        assert found is not None  # noqa: S101 - rank 0 has heard so
        found.state.skipped = look.skipped
        return found

    def _load(self, token: int, sequence: int, skipped: list[Skipped]) -> Found:
        view = View(Wanted(self.exchange.rank, self.box_of), self.share)
        return load_checkpoint(self.store, self.run, token, sequence, skipped, view=view)

    def _contribute(self, draft: Draft, sequence: int, base: bool) -> tuple[Written, Outcome, Committed]:
        """The other ranks: write, tell, and take the outcome for their own."""
        tell = lambda written: self._messages.tell_part(self._part(draft, written, sequence, base))  # noqa: E731
        try:
            draft.copying.finish()
            written = self._write_packs(draft, sequence, base, self.exchange.rank, tell)
        except BaseException as error:  # whatever it is, the others wait
            self._tell_failed(sequence, error)
            with suppress(Unavailable):  # all ranks leave a save together, as far as they live
                self._messages.outcome(sequence)
            raise
        self._messages.tell_stored(sequence)
        outcome = self._messages.outcome(sequence)
        if outcome.failure is not None:
            raise outcome.failure.error()
        return written, outcome, self._committed(draft, sequence, outcome)

    def _lead_save(
        self, leader: Leader, draft: Draft, sequence: int, base: bool, explain: Explain
    ) -> tuple[Written, Outcome, Committed]:
        """Rank 0: write, wait for all parts, commit when all are stored, and tell all."""
        early: list[Ready] = []

        def make_ready(written: Written, seconds: float | None = None) -> Ready:
            parts = [self._part(draft, written, sequence, base), *self._messages.parts(sequence, seconds)]
            content, whole = leader.combine(parts)
            manifest = explain(self._manifest(draft, content, sequence, base), content.cost)
            return Ready.of(manifest, content, whole)

        def make_ready_early(written: Written) -> None:
            with suppress(RetomaError):  # what it is will be the same when this rank's own packs are stored
                early.append(make_ready(written, EARLY_SECONDS))

        try:
            draft.copying.finish()
            written = self._write_packs(draft, sequence, base, 0, make_ready_early)
        except BaseException as error:
            self._tell_failed(sequence, error)
            raise
        try:
            ready = early[0] if early else make_ready(written)
            self._messages.await_stored(sequence)
            costs = draft.costs(ready.content, written.upload_seconds, self._attempt_seconds)
            manifest, data = ready.with_costs(costs)
            committed = Committed(manifest, commit(self.store, manifest, data))
        except BaseException as error:  # whatever it is, the others wait
            self._messages.tell_outcome(sequence, Outcome(failure=Failure.of(error)))
            raise
        leader.whole = ready.whole
        self.policy.committed(manifest.kind, ready.content.cost)
        outcome = Outcome(
            ref=committed.ref,
            kind=manifest.kind,
            state_digest=manifest.state_digest,
            next_base=self.policy.decide(),
        )
        self._messages.tell_outcome(sequence, outcome)
        with suppress(Unavailable):  # it is committed all the same
            self._messages.forget_past()
        return written, outcome, committed

    def _part(self, draft: Draft, written: Written, sequence: int, base: bool) -> Parcel:
        snapshot, told_layout = draft.snapshot, self._told_layout
        self._told_layout = ""  # if this save fails, rank 0 may have taken the structure, or may not
        values = snapshot.values
        if self._leader is None:
            values = [values[place] for place in snapshot.own_values]
        told = Contribution(
            rank=self.exchange.rank,
            sequence=sequence,
            position=draft.position,
            base=base,
            layout_digest=snapshot.layout_digest,
            layout=snapshot.layout if snapshot.layout_digest != told_layout else None,
            values=values,
            rows=tuple((c.key, c.item_bytes, c.size_bytes, c.digest) for c in written.chunks),
            first_pack=self.exchange.rank,
            packs=tuple(written.packs),
            work_bytes=work_of(written.chunks),
            encode_seconds=written.encode_seconds,
            modes=written.modes,
        )
        return Parcel.of(told, written.chunks)

    def _tell_failed(self, sequence: int, error: BaseException) -> None:
        if self._leader is None:
            self._messages.tell_failed(sequence, error)
        else:
            told = Failure.of(error).error(self.exchange.rank)
            self._messages.tell_outcome(sequence, Outcome(failure=Failure.of(told)))

    def _committed(self, draft: Draft, sequence: int, outcome: Outcome) -> Committed:
        """What a rank is asked about; the whole manifest is in the store."""
        assert outcome.ref is not None  # noqa: S101 - it has not failed
        manifest = Manifest(
            run=self.run,
            token=self._my_token,
            sequence=sequence,
            kind=outcome.kind,
            position=draft.position,
            world_size=self.exchange.size,
            meta=draft.meta,
            layout_digest="",
            values=[],
            chunk_count=0,
            state_digest=outcome.state_digest,
            health=draft.health,
        )
        return Committed(manifest, outcome.ref)

    def _look_key(self) -> str:
        return f"open/{self._looks}"
