"""What the ranks of a node, their launcher, and the nodes of a group say to each other. Knows no torch.

A rank and the launcher of its node speak over a socket of the node; another node and the launcher of the group over
TCP: what its ranks say comes from there as `Relayed`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from training.config import Frozen
from training.ports import Message, decode_message, encode_message

STOP = b"stop\n"  # launcher to rank: leave after the step at which all know of it
TELL = b"tell\n"  # launcher to rank: where is your training?
KILL = b"kill\n"  # launcher to node: end your ranks
DISMISS = b"dismiss\n"  # launcher to node: the range is over
PING = b"ping\n"  # launcher to node: the group goes on
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


class Whereabouts(Frozen):
    """Where the training of a rank is.

    Attributes:
        begun: collectives so far, by the flight recorder of torch.
        recent: some of them, the newest first.
        waits: whether it waits for other ranks, by its stack: what stages send to each other is not recorded.
        stack: the calls of its main thread, the newest first.
    """

    kind: Literal["whereabouts"] = "whereabouts"
    begun: int
    recent: tuple[str, ...] = ()
    waits: bool = False
    stack: tuple[str, ...] = ()


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


class NodeHello(Frozen):
    """The first word of another node that wants to take part. The ticket is what the supervisor gave it."""

    kind: Literal["node"] = "node"
    ticket: str
    name: str
    host: str
    pid: int


class Muster(Frozen):
    """Launcher to node: start your ranks.

    Attributes:
        line: the `RangeSpec` of all ranks.
        node, nodes: the place of this node in the group.
        generation: of the group, which is its token.
        host, port: of the group's store.
    """

    kind: Literal["muster"] = "muster"
    line: str
    node: int
    nodes: int
    generation: int
    host: str
    port: int


class Relayed(Frozen):
    """Node to launcher: what one of its ranks has said, word for word."""

    kind: Literal["relayed"] = "relayed"
    rank: int
    line: str


class Blame(Frozen):
    """Node to launcher: one of its ranks is to blame."""

    kind: Literal["blame"] = "blame"
    rank: int
    pid: int
    reason: str


class Ended(Frozen):
    """Node to launcher: its ranks have ended; `reason`: of the first that ended badly, and `rank` is which."""

    kind: Literal["ended"] = "ended"
    reason: str | None = None
    rank: int | None = None


class Leaving(Frozen):
    """Node to launcher: this machine is about to go."""

    kind: Literal["leaving"] = "leaving"
    why: str


Word = Annotated[
    Hello | Alive | Whereabouts | Bye | Said | NodeHello | Muster | Relayed | Blame | Ended | Leaving,
    Field(discriminator="kind"),
]
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


class Lines:
    """What has come over a connection, cut into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Whole lines of what was received so far."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return lines
