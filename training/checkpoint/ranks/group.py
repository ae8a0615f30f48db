"""An attempt of a group of ranks: each writes its share, rank 0 commits, and all take its outcome for their own.

Two phases: every rank puts its packs and posts its part of the manifest, or its error; rank 0 waits for all parts,
commits, and posts the outcome. No collective of the training is used, so that a dead rank fails a save and blocks
nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel

from training.checkpoint.attempt import Attempt
from training.checkpoint.commit import commit
from training.checkpoint.draft import Draft
from training.checkpoint.manifest import Committed, Costs, Manifest, Position
from training.checkpoint.pack import Written
from training.checkpoint.policy import Cost, work_of
from training.checkpoint.ranks.contribution import Contribution, Failure, Look, Outcome, Parcel
from training.checkpoint.ranks.exchange import Exchange, Stopped, dead_key
from training.checkpoint.ranks.leader import Leader
from training.checkpoint.restore import Found, RestoredState, View, load_checkpoint
from training.checkpoint.state.boxes import Wanted
from training.checkpoint.state.share import Share
from training.checkpoint.token import Skipped
from training.errors import Corrupt, Invalid, RetomaError, Unavailable

T = TypeVar("T")


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
    _told: list[int] = field(default_factory=list)  # saves whose messages may still be there
    _next_base: tuple[bool, str] = (True, "")
    _told_layout: str = ""  # digest of the structure that rank 0 has of this rank

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.exchange.taken:
            raise Invalid("an exchange serves one checkpointer", hint="make an exchange for each, on all ranks")
        self.exchange.taken = True
        self._leader = Leader(self.exchange.size) if self.exchange.rank == 0 else None

    def open(self) -> RestoredState | None:
        """See `Attempt.open`. All ranks restore the same checkpoint, or raise the same error."""
        return self._start_from(self._follow()) if self._leader is None else self._lead(self._leader)

    def write(self, draft: Draft, failed_saves: int, skipped_saves: int) -> Committed:
        """See `Attempt.write`. All ranks return the same checkpoint, or raise the same error."""
        sequence = self.take_sequence()
        base = draft.base or self._next_base[0]
        reason = "asked for" if draft.base else self._next_base[1]
        written: Written | None = None
        error: BaseException | None = None
        try:
            draft.copying.finish()
            written = self._write_packs(draft, sequence, base, self.exchange.rank)
            part = Parcel.of(self._contribution(draft, written, sequence, base), written.chunks)
        except BaseException as problem:  # noqa: BLE001 - the others wait; it is raised below
            error = problem
            part = self._sorry(sequence, problem)
        self._told_layout = ""  # if this save fails, rank 0 may have taken its structure, or may not
        if self._leader is None:
            outcome, committed = self._await_outcome(part, draft)
        else:
            explain = lambda m, cost: self.policy.explain(m, cost, reason, failed_saves, skipped_saves)  # noqa: E731
            outcome, committed = self._settle(self._leader, part, draft, explain)
        if committed is None or written is None:
            assert outcome.failure is not None  # noqa: S101 - one of both
            raise error or outcome.failure.error()
        self._next_base, self._told_layout = outcome.next_base, part.told.layout_digest
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
            look = self._take(key, 0, Look.model_validate_json)
            if look.failure is not None:
                raise look.failure.error()
            return look.found
        try:
            found = super().has_checkpoint()
        except BaseException as error:
            self._post(key, Look(failure=Failure.of(error)))
            raise
        self._post(key, Look(token=self._my_token, found=found))
        return found

    def give_up(self, error: BaseException) -> None:
        """Tell the others, who have begun the same save. It fails on all ranks."""
        sequence = self.take_sequence()
        with suppress(Unavailable):  # what the caller is about to raise is the cause
            if self._leader is None:
                self._tell_part(self._sorry(sequence, error))
            else:
                self._told.append(sequence)
                told = Failure.of(error).error(self.exchange.rank)
                self._post(f"save/{sequence}", Outcome(failure=Failure.of(told)))

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
            self._post(self._look_key(), Look(failure=Failure.of(error)))
            raise
        self._next_base = self.policy.decide()
        done = Look(
            token=self._my_token,
            found=restored is not None,
            skipped=restored.skipped if restored is not None else (),
            rollback=self.rollback,
            next_base=self._next_base,
        )
        self._post(self._look_key(), done)
        return restored

    def _load_together(self, token: int, sequence: int, skipped: list[Skipped]) -> Found:
        """Have every rank read a checkpoint. Raises `Corrupt` if one of them cannot."""
        look = self._look_key()
        self._post(look, Look(token=self._my_token, place=(token, sequence)))
        self._looks += 1
        found: Found | None = None
        damage: RetomaError | None = None
        try:
            found = self._load(token, sequence, skipped)
        except Corrupt as error:
            damage = error
        for rank in range(1, self.exchange.size):
            answer = self._take(f"{look}/r{rank}", rank, Outcome.model_validate_json)
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
            look = self._take(key, 0, Look.model_validate_json)
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
            self._post(f"{key}/r{self.exchange.rank}", answer)
        self.rollback, self._next_base = look.rollback, look.next_base
        if not look.found:
            return None
        assert found is not None  # noqa: S101 - rank 0 has heard so
        found.state.skipped = look.skipped
        return found

    def _load(self, token: int, sequence: int, skipped: list[Skipped]) -> Found:
        view = View(Wanted(self.exchange.rank, self.box_of), self.share)
        return load_checkpoint(self.store, self.run, token, sequence, skipped, view=view)

    def _contribution(self, draft: Draft, written: Written, sequence: int, base: bool) -> Contribution:
        snapshot = draft.snapshot
        values = snapshot.values
        if self._leader is None:
            values = [values[place] for place in snapshot.own_values]
        return Contribution(
            rank=self.exchange.rank,
            sequence=sequence,
            position=draft.position,
            base=base,
            layout_digest=snapshot.layout_digest,
            layout=snapshot.layout if snapshot.layout_digest != self._told_layout else None,
            values=values,
            rows=tuple((c.key, c.item_bytes, c.size_bytes, c.digest) for c in written.chunks),
            first_pack=self.exchange.rank,
            packs=tuple(written.packs),
            work_bytes=work_of(written.chunks),
            costs=Costs(encode_seconds=written.encode_seconds, upload_seconds=written.upload_seconds),
            modes=written.modes,
        )

    def _settle(
        self, leader: Leader, part: Parcel, draft: Draft, explain: Callable[[Manifest, Cost], Manifest]
    ) -> tuple[Outcome, Committed | None]:
        """Rank 0: wait for all parts, commit, and tell all."""
        committed, sequence = None, part.told.sequence
        self._told.append(sequence)
        try:
            parts = [part]
            for other in self._collect(sequence) if part.told.failure is None else ():
                parts.append(other)
            for failed, _ in parts:
                if failed.failure is not None:
                    raise failed.failure.error(failed.rank)
            content, whole = leader.combine(parts)
            manifest = explain(self._manifest(draft, content, sequence, part.told.base), content.cost)
            committed = Committed(manifest, commit(self.store, manifest, content.printed))
            leader.whole = whole
            self.policy.committed(manifest.kind, content.cost)
            outcome = Outcome(
                ref=committed.ref,
                kind=manifest.kind,
                state_digest=manifest.state_digest,
                next_base=self.policy.decide(),
            )
        except BaseException as error:  # whatever it is, the others wait
            outcome = Outcome(failure=Failure.of(error))
            if not isinstance(error, RetomaError):
                self._post(f"save/{sequence}", outcome)
                raise
        self._post(f"save/{sequence}", outcome)
        if committed is not None:
            with suppress(Unavailable):  # it is committed all the same
                self._forget_past()
        return outcome, committed

    def _forget_past(self) -> None:
        """All ranks have told their shares of the last save: they are past those before it."""
        for done in self._told[:-1]:
            for key in ("", "/failed", *(f"/r{rank}" for rank in range(1, self.exchange.size))):
                self.exchange.forget(f"save/{done}{key}")
        self._told = self._told[-1:]

    def _collect(self, sequence: int) -> Iterator[Parcel]:
        """The parts of the other ranks, as they come; the first failure ends it."""
        save = f"save/{sequence}"
        alarms = [f"{save}/failed", *(dead_key(rank) for rank in range(1, self.exchange.size))]
        for rank in range(1, self.exchange.size):
            try:
                yield self._take(f"{save}/r{rank}", rank, Parcel.decode, alarms)
            except Stopped as alarm:
                if alarm.key != alarms[0]:
                    raise Unavailable(f"rank {alarm.key.rpartition('/')[2]} is dead") from alarm
                yield self._take(alarms[0], 0, Parcel.decode)
                return

    def _await_outcome(self, part: Parcel, draft: Draft) -> tuple[Outcome, Committed | None]:
        """The other ranks: tell, and take the outcome for their own."""
        self._tell_part(part)
        outcome = self._take(f"save/{part.told.sequence}", 0, Outcome.model_validate_json)
        if outcome.failure is not None or outcome.ref is None:
            return outcome, None
        manifest = Manifest(  # what a rank is asked about: the whole is in the store
            run=self.run,
            token=self._my_token,
            sequence=part.told.sequence,
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
        return outcome, Committed(manifest, outcome.ref)

    def _sorry(self, sequence: int, error: BaseException) -> Parcel:
        return Parcel(Contribution(rank=self.exchange.rank, sequence=sequence, failure=Failure.of(error)))

    def _tell_part(self, part: Parcel) -> None:
        save = f"save/{part.told.sequence}"
        self.exchange.post(f"{save}/r{part.told.rank}", part.encode())
        if part.told.failure is not None:
            self.exchange.post(f"{save}/failed", part.encode())  # rank 0 need not wait for the others

    def _look_key(self) -> str:
        return f"open/{self._looks}"

    def _post(self, key: str, message: BaseModel) -> None:
        self.exchange.post(key, message.model_dump_json().encode())

    def _take(self, key: str, sender: int, parse: Callable[[bytes], T], stop: Sequence[str] = ()) -> T:
        stops = stop or [dead_key(sender)]
        try:
            return parse(self.exchange.take(key, self.patience_seconds, stops))
        except Stopped as stopped:
            if stop:
                raise
            raise Unavailable(f"rank {sender} is dead") from stopped
