"""The other nodes of a group, as its launcher hears them: gathered, mustered, missed.

A node speaks over one TCP connection. It is alive as long as it says so, and each of its ranks is heard through
it. A node that is lost costs the group its ranks; one that comes to a group that has fewer than it may have is let
in by another generation.
"""

from __future__ import annotations

import hmac
import selectors
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from training.parallel.members import Members, Speaker
from training.parallel.wire import (
    DISMISS,
    KILL,
    PING,
    Blame,
    Ended,
    Leaving,
    Lines,
    Muster,
    NodeHello,
    Relayed,
    decode_word,
    encode_word,
)

LOST_SECONDS = 2.0  # without a word
STEADY_SECONDS = 2.0  # a node that comes and goes makes no new group
PING_SECONDS = 0.5
TICK_SECONDS = 0.05
SEND_SECONDS = 1.0
FAREWELL_SECONDS = 1.0
READ_BYTES = 1 << 16


@dataclass
class Node:
    """One other node, once it has said who it is."""

    connection: socket.socket
    heard: float
    name: str = ""  # as its caller knows it
    host: str = ""
    pid: int = 0
    greeted: bool = False
    lines: Lines = field(default_factory=Lines)
    number: int | None = None  # in the group; None: it has come too late for this one
    ended: Ended | None = None
    blamed: Blame | None = None
    leaving: str | None = None
    lost: bool = False
    ranks: dict[int, Speaker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.since = self.heard

    def __str__(self) -> str:
        return f"node {self.host}, process {self.pid}"


class Nodes:
    """Listens to the nodes that join.

    Args:
        host, port: where. The port is the supervisor's choice, and the same for all attempts on this node.
        ticket: that a node must show.
    """

    def __init__(self, host: str, port: int, ticket: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._ticket, self._clock = ticket, clock
        self._server = socket.create_server((host, port))
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._nodes: list[Node] = []
        self._members: Members | None = None
        self._pinged = 0.0

    @property
    def present(self) -> list[Node]:
        """Those that have shown their ticket, and are not lost."""
        return [node for node in self._nodes if node.greeted and not node.lost]

    @property
    def mustered(self) -> list[Node]:
        """Those that are a part of this group, lost or not."""
        return [node for node in self._nodes if node.number is not None]

    def gather(
        self, most: int, fewest: int, seconds: float, last_call_seconds: float, go_on: Callable[[], bool]
    ) -> list[Node]:
        """Wait for others: for all, but not much longer once there are enough.

        Args:
            most: so many may take part.
            fewest: so many must.
            seconds: how long those are waited for.
            last_call_seconds: how long all are waited for.
            go_on: whether to wait at all.
        """
        begun = self._clock()
        while go_on():
            self.pump(TICK_SECONDS)
            found, waited = len(self.present), self._clock() - begun
            if found >= most or waited > seconds or (found >= fewest and waited > last_call_seconds):
                break
        return self.present[:most]

    def muster(self, chosen: list[Node], order: Muster, members: Members) -> None:
        """Have these nodes start their ranks; what their ranks say goes to `members`."""
        self._members = members
        for number, node in enumerate(chosen, 1):
            node.number = number
            self._send(node, encode_word(order.model_copy(update={"node": number})))

    def pump(self, seconds: float) -> None:
        """Take in what the nodes say, for at most so long."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        now = self._clock()
        for node in self._nodes:
            if not node.lost and now - node.heard > LOST_SECONDS:
                self._lose(node)
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            for node in self.present:
                self._send(node, PING)

    def send(self, word: bytes) -> None:
        """To the ranks of all nodes of the group."""
        for node in self.mustered:
            self._send(node, word)

    def kill(self) -> None:
        """End the ranks of all nodes."""
        self.send(KILL)

    def trouble(self) -> str | None:
        """What is wrong with a node of the group, or with a rank there."""
        for node in self.mustered:
            if node.lost:
                return f"{node} was lost"
            if node.blamed is not None:
                blame = node.blamed
                return f"rank {blame.rank} ({node}, pid {blame.pid}) {blame.reason}, and was killed"
        return None

    def all_ended(self) -> bool:
        """Whether nothing more is to be heard of the ranks of other nodes."""
        return all(node.ended is not None or node.lost for node in self.mustered)

    def bad_ends(self) -> dict[int, str]:
        """Ranks that ended badly, and how."""
        ends = [(node, node.ended) for node in self.mustered if node.ended is not None]
        return {
            end.rank if end.rank is not None else -1: f"{end.reason} ({node})" for node, end in ends if end.reason
        }

    def newcomer(self) -> Node | None:
        """A node that is here for a while, and no part of the group."""
        now = self._clock()
        return next(
            (node for node in self.present if node.number is None and now - node.since > STEADY_SECONDS), None
        )

    def leaver(self) -> Node | None:
        """A node of the group whose machine is about to go."""
        return next((node for node in self.mustered if node.leaving is not None), None)

    def dismiss(self) -> None:
        """The range is over: nobody is needed any more. Returns when all know, or after `FAREWELL_SECONDS`.

        Who closes a connection with words unread resets it, and the other end may never read the last one.
        """
        deadline, told = self._clock() + FAREWELL_SECONDS, set[int]()
        while self.present and self._clock() < deadline:
            for node in self.present:
                if id(node) not in told:  # one may come even now
                    told.add(id(node))
                    self._send(node, DISMISS)
            self.pump(TICK_SECONDS)

    def close(self) -> None:
        """Stop listening. The nodes come back to the next attempt."""
        for node in self._nodes:
            node.connection.close()
        self._selector.close()
        self._server.close()

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._server.accept()
            connection.settimeout(SEND_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            node = Node(connection, self._clock())
            self._nodes.append(node)
            self._selector.register(connection, selectors.EVENT_READ, node)

    def _read(self, node: Node) -> None:
        try:
            data = node.connection.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._lose(node)
            return
        for line in node.lines.feed(data):
            if node.lost:
                return
            self._hear(node, line)

    def _hear(self, node: Node, line: bytes) -> None:
        word = decode_word(line)
        if not node.greeted:
            if not (isinstance(word, NodeHello) and hmac.compare_digest(word.ticket, self._ticket)):
                self._lose(node)  # not one of ours
                return
            node.greeted, node.name, node.host, node.pid = True, word.name, word.host, word.pid
            print(f"{node} is here", file=sys.stderr, flush=True)  # noqa: T201 - the log
        node.heard = self._clock()
        if isinstance(word, Relayed) and self._members is not None and node.number is not None:
            self._members.take(word.line.encode(), node.ranks.setdefault(word.rank, Speaker()), relayed=True)
        elif isinstance(word, Blame):
            node.blamed = node.blamed or word
        elif isinstance(word, Ended):
            node.ended = word
        elif isinstance(word, Leaving):
            node.leaving = word.why

    def _lose(self, node: Node) -> None:
        node.lost = True
        with suppress(KeyError):
            self._selector.unregister(node.connection)
        node.connection.close()

    def _send(self, node: Node, word: bytes) -> None:
        if not node.lost:
            try:
                node.connection.sendall(word)
            except OSError:
                self._lose(node)
