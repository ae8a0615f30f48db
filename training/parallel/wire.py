"""What the ranks of a node and their launcher say to each other, over a socket of the node. Knows no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from training.config import Frozen
from training.ports import Message, decode_message, encode_message

STOP = b"stop\n"  # launcher to rank: leave after the step at which all know of it
TELL = b"tell\n"  # launcher to rank: which collective have you come to?
ALIVE_SECONDS = 0.25
LOST = "lost the other ranks"  # how the message of a rank begins that only tells of a consequence


class Hello(Frozen):
    """The first word of a rank."""

    kind: Literal["hello"] = "hello"
    rank: int
    pid: int


class Alive(Frozen):
    """From a thread of its own: the process runs, whatever its training does."""

    kind: Literal["alive"] = "alive"


class Collectives(Frozen):
    """How many collectives the rank has begun, by the flight recorder of torch, and what the last one was.

    And whether its training waits for other ranks, by its stack: what stages send to each other is not recorded.
    """

    kind: Literal["collectives"] = "collectives"
    begun: int
    last: str = ""
    waits: bool = False


class Bye(Frozen):
    """The last word of a rank: it ends."""

    kind: Literal["bye"] = "bye"


class Said(Frozen):
    """A message of the training itself."""

    kind: Literal["said"] = "said"
    line: str

    @classmethod
    def of(cls, message: Message) -> Said:
        """Wrap a message."""
        return cls(line=encode_message(message).decode().rstrip("\n"))

    def message(self) -> Message:
        """The message."""
        return decode_message(self.line.encode())


Word = Annotated[Hello | Alive | Collectives | Bye | Said, Field(discriminator="kind")]
_adapter: TypeAdapter[Word] = TypeAdapter(Word)


def encode_word(word: Word) -> bytes:
    """One line."""
    return word.model_dump_json().encode() + b"\n"


def decode_word(line: bytes) -> Word | None:
    """Parse one line; None for anything else."""
    try:
        return _adapter.validate_json(line)
    except ValidationError:
        return None
