"""What one rank has written of a checkpoint, told to rank 0, and what rank 0 makes of it for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from training.checkpoint.document import print_json
from training.checkpoint.manifest import Chunk, Layout, Pack, Position, Ref
from training.checkpoint.manifest import Part as Section
from training.checkpoint.token import Rollback, Skipped
from training.errors import RetomaError, error_of_kind

_CHUNKS = TypeAdapter(list[Chunk])


class Failure(Section):
    """An error, as it crosses to another rank."""

    kind: str
    message: str
    hint: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Of an error that was raised here."""
        if isinstance(error, RetomaError):
            return cls(kind=error.kind, message=error.message, hint=error.hint)
        return cls(kind=type(error).__name__, message=str(error) or type(error).__name__)

    def error(self, rank: int | None = None) -> RetomaError:
        """The error to raise elsewhere; `rank`: whose it was."""
        whose = f"rank {rank}: " if rank is not None else ""
        return error_of_kind(self.kind, whose + self.message, hint=self.hint)


class Contribution(Section):
    """A rank's part of one save.

    Attributes:
        sequence: of the save; the same on all ranks, or they are not at the same save.
        position: the same.
        base: whether everything was written.
        layout_digest: of the state as the rank holds it.
        layout: the structure itself, when rank 0 does not have it yet.
        values: the scalars: rank 0 all of them, the others those that each rank has its own of.
        rows: of each chunk that changed: key, bytes of an item, size in bytes, digest.
        first_pack: of the rank, as the frames of its chunks count; right if each rank before it has written one.
        packs: what it wrote.
        work_bytes: see `Cost`.
        encode_seconds, modes: of its part.
    """

    rank: int
    sequence: int
    position: Position = Position()
    base: bool = False
    layout_digest: str = ""
    layout: Layout | None = None
    values: list[Any] = Field(default_factory=list)
    rows: tuple[tuple[str, int, int, str], ...] = ()
    first_pack: int = 0
    packs: tuple[Pack, ...] = ()
    work_bytes: int = 0
    encode_seconds: float = 0.0
    modes: dict[str, int] = Field(default_factory=dict)


class Failed(Section):
    """What went wrong on a rank."""

    rank: int
    failure: Failure


class Parcel(NamedTuple):
    """A contribution with its chunks, as they will stand in the manifest.

    Rank 0 passes them on as they are: to make objects of them, and text again, is what a commit would spend most of
    its time on.
    """

    told: Contribution
    chunks: bytes = b""  # JSON, each as `print_json` writes it, with commas between

    @classmethod
    def of(cls, told: Contribution, chunks: Iterable[Chunk]) -> Parcel:
        """Of chunks that were written here."""
        return cls(told, b",".join(print_json(chunk) for chunk in chunks))

    def parsed(self) -> list[Chunk]:
        """Its chunks."""
        return _CHUNKS.validate_json(b"[%s]" % self.chunks)

    def encode(self) -> bytes:
        """As a message."""
        return self.told.model_dump_json().encode() + b"\n" + self.chunks

    @classmethod
    def decode(cls, data: bytes) -> Parcel:
        """Out of a message."""
        told, _, chunks = data.partition(b"\n")
        return cls(Contribution.model_validate_json(told), chunks)


class Outcome(Section):
    """How a save ended, for all ranks alike.

    Attributes:
        ref: of the checkpoint that was committed.
        kind, state_digest: of it.
        next_base: whether the next save writes everything, and why.
        failure: what went wrong; nothing else counts then.
    """

    ref: Ref | None = None
    kind: Literal["base", "delta"] = "base"
    state_digest: str = ""
    next_base: tuple[bool, str] = (True, "")
    failure: Failure | None = None


class Look(Section):
    """What rank 0 asks of all while a group is opened: to read a checkpoint, or to go on with what was read last.

    Attributes:
        token: of the attempt.
        place: token and sequence of the checkpoint to read; None: the search is over.
        found: whether the checkpoint that was read last is the one; else the run begins.
        skipped, rollback: as in the seal.
        next_base: see `Outcome`.
    """

    token: int = 0
    place: tuple[int, int] | None = None
    found: bool = False
    skipped: tuple[Skipped, ...] = ()
    rollback: Rollback | None = None
    next_base: tuple[bool, str] = (True, "")
    failure: Failure | None = None
