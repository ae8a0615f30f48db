"""An attempt at a run: its token, its head, and the state that the next delta is taken against."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from training.checkpoint.coding.bounded import BoundedCodec
from training.checkpoint.coding.choices import Choices
from training.checkpoint.coding.encode import Reference
from training.checkpoint.commit import commit
from training.checkpoint.draft import Content, Draft
from training.checkpoint.gate import HealthGate
from training.checkpoint.history import candidates
from training.checkpoint.manifest import Committed, Manifest, PackName, Position
from training.checkpoint.pack import PackWriter, Written, write_packs
from training.checkpoint.policy import ChainPolicy
from training.checkpoint.quarantine import RollbackPolicy, open_incident, rollback_of
from training.checkpoint.restore import Found, Load, RestoredState, find_newest, restore_checkpoint
from training.checkpoint.state.boxes import BoxOf, no_box
from training.checkpoint.store import Store
from training.checkpoint.token import (
    Rollback,
    Seal,
    Skipped,
    claim,
    claim_key,
    mark_run,
    prove_put_if_absent,
    seal,
)
from training.errors import Invalid


@dataclass(kw_only=True)
class Attempt:
    """Opened once, then written to by one thread.

    Attributes:
        store: the run's store.
        run: its name.
        token: of the attempt; None: claim one when it is opened.
        who: JSON for the claim.
        job, data: JSON that every manifest repeats.
        policy: base or delta.
        must_be_finite: keys of what is held against it before anything is written.
        rollback_policy: what to do after an attempt that diverged.
        bounded: deltas with a bounded error.
        encoders, uploaders: threads that compress, and that put packs.
        now: wall clock, informational.
        box_of: in a group, the part of a sharded tensor that is restored.
        head: the newest checkpoint that was restored or committed.
        rollback: that was made when it was opened.
    """

    store: Store
    run: str
    token: int | None
    who: Mapping[str, Any]
    job: Mapping[str, Any]
    data: Mapping[str, Any]
    policy: ChainPolicy
    must_be_finite: Iterable[str]
    rollback_policy: RollbackPolicy | None
    bounded: BoundedCodec | None
    encoders: Executor
    uploaders: Executor
    now: Callable[[], str]
    box_of: BoxOf = no_box
    head: Committed | None = None
    rollback: Rollback | None = None
    is_open: bool = False
    _opened_at: str | None = None  # told once: a seal that is put again must have the same bytes
    _opened_seconds: float = 0.0
    _sequence: int = 0
    _reference: Reference | None = None
    _choices: Choices = field(default_factory=Choices)

    def __post_init__(self) -> None:
        self._gate = HealthGate(self.must_be_finite, self.store, self.run, self.now)

    def open(self) -> RestoredState | None:
        """Claim, then look, restore, and seal what was really restored. None: the run has no checkpoint.

        Raises:
            Corrupt: the run has checkpoints, and none is intact.
            Diverged: none is from before the incident that is rolled back.
            Fenced: a newer attempt has taken over.
        """
        return self._start_from(self._find_and_seal(self._claim()))

    def write(self, draft: Draft, failed_saves: int, skipped_saves: int) -> Committed:
        """Packs, then the commit. Only then does the snapshot become the reference."""
        sequence = self.take_sequence()
        draft.copying.finish()
        base, reason = (True, "asked for") if draft.base else self.policy.decide()
        written = self._write_packs(draft, sequence, base)
        content = Content.of(draft.snapshot, written)
        manifest = self._manifest(draft, content, sequence, base)
        manifest = self.policy.explain(manifest, content.cost, reason, failed_saves, skipped_saves)
        committed = Committed(manifest, commit(self.store, manifest))
        self.policy.committed(manifest.kind, content.cost)
        self._reference, self.head = written.reference, committed
        return committed

    def read_again(self) -> RestoredState | None:
        """The newest state that was restored or committed."""
        if self.head is None:
            return None
        return restore_checkpoint(self.store, self.head.ref.token, self.head.ref.sequence, self.run)

    def has_checkpoint(self) -> bool:
        """Before it is opened: whether there will be anything to restore. Claims the token."""
        self._claim()
        return any(True for _ in candidates(self.store, self._my_token))

    def give_up(self, error: BaseException) -> None:
        """A save that was begun has no snapshot. Nothing was done, and nobody waits for it."""

    def quarantine(self, name: str, reason: str, position: Position, since_step: int) -> None:
        """Keep on record what is wrong with this attempt."""
        self._gate.keep(name, reason, position, since_step, self._my_token, self.take_sequence())

    def take_sequence(self) -> int:
        """Never reused, also after a failure."""
        sequence, self._sequence = self._sequence, self._sequence + 1
        return sequence

    @property
    def _my_token(self) -> int:
        if self.token is None:
            raise Invalid("an attempt that is not open has no token", hint="call restore() first")
        return self.token

    def _claim(self) -> list[Skipped]:
        """Have a token. Returns what is wrong with the store already."""
        notes = mark_run(self.store, self.run)
        prove_put_if_absent(self.store, self.run)
        if self._opened_at is None:
            self._opened_at = self.now()
        if self.token is None:
            self.token = claim(self.store, self.run, dict(self.who), self._opened_at)
        elif not self.store.exists(claim_key(self.token)):
            raise Invalid(f"token {self.token} was not claimed: nothing would fence it", run=self.run)
        return notes

    def _find_and_seal(self, notes: Iterable[Skipped], read: Load | None = None) -> Found | None:
        """Restore the newest intact checkpoint, or the newest healthy one, and seal it."""
        policy, token = self.rollback_policy, self._my_token
        incident = open_incident(self.store, token, policy.most) if policy is not None else None
        found, skipped = find_newest(self.store, self.run, before=token, notes=notes, incident=incident, read=read)
        head = found.state.checkpoint.ref if found is not None else None  # a state may be empty
        if policy is not None:
            self.rollback = rollback_of(self.store, token, head, incident, policy.skip_steps)
        made = Seal(
            run=self.run,
            token=token,
            head=head,
            skipped=tuple(skipped),
            rollback=self.rollback,
            created=self._opened_at or "",
        )
        seal(self.store, made)
        return found

    def _start_from(self, found: Found | None) -> RestoredState | None:
        if found is not None:
            self.head = found.state.checkpoint
            self._reference = found.reference
            self.policy.start_from(found.chain.contents)
            self.policy.decode_rate = found.bytes_per_second
        self._sequence = self.head.ref.sequence + 1 if self.head else 0
        self.is_open, self._opened_seconds = True, perf_counter()
        return found.state if found is not None else None

    def _write_packs(
        self,
        draft: Draft,
        sequence: int,
        base: bool,
        rank: int = 0,
        meanwhile: Callable[[Written], None] = lambda _: None,
    ) -> Written:
        self._gate.check(draft.snapshot, draft.position, self._my_token, sequence)  # before anything is written
        writer = PackWriter(self.store, PackName(self._my_token, sequence, rank), self.uploaders, first=rank)
        reference = self._reference if not base else None
        return write_packs(
            draft.snapshot,
            reference,
            writer,
            self.encoders,
            choices=self._choices,
            bounded=self.bounded,
            meanwhile=meanwhile,
        )

    def _manifest(self, draft: Draft, content: Content, sequence: int, base: bool) -> Manifest:
        return draft.manifest(
            content,
            run=self.run,
            token=self._my_token,
            sequence=sequence,
            parent=self.head,
            base=base,
            job=self.job,
            data=self.data,
            created=self.now(),
            attempt_seconds=self._attempt_seconds,
        )

    @property
    def _attempt_seconds(self) -> float:
        return perf_counter() - self._opened_seconds
