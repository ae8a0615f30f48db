"""The ranks of a group, as their launcher hears and sees them: who is frozen, who holds up the others."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from training.allowance import Allowance
from training.config import SupervisorConfig
from training.parallel.report import report
from training.parallel.wire import STOP, TELL, Alive, Bye, Hello, Lines, Said, Whereabouts, decode_word
from training.ports import Failed, Message, Profiled

FROZEN_SECONDS = 1.0  # stopped by a signal for so long
DEAF_SECONDS = 2.0  # without a sign of life while it trains: its interpreter is held
DEAF_IN_PAUSE_SECONDS = 15.0  # importing, compiling and restoring may hold the interpreter for longer
TELL_SECONDS = 0.5
MARGIN_SECONDS = 1.0  # the launcher judges before its supervisor does, who would not know whom to name


@dataclass
class Member:
    """One rank. That of another node has neither a connection nor a process here."""

    rank: int
    pid: int
    heard: float
    connection: socket.socket | None = None
    process: psutil.Process | None = None
    stopped: float | None = None
    dead: float | None = None
    left: bool = False
    where: Whereabouts | None = None
    failed: Failed | None = None


@dataclass
class Speaker:
    """Who is at the other end of a connection, once the rank has said its name."""

    connection: socket.socket | None = None
    member: Member | None = None
    lines: Lines = field(default_factory=Lines)


@dataclass(frozen=True)
class Verdict:
    """Who is to blame, and for what."""

    rank: int
    pid: int
    reason: str


@dataclass
class Members:
    """Listens to the ranks of this node, and is told what those of other nodes say.

    Args:
        address: of the socket.
        limits: the silences that a training is allowed.
        on_message: receives what the lowest rank says of the training, and of each rank its profile.
        relay: receives every line of a rank, and which rank.
    """

    address: Path
    limits: SupervisorConfig
    on_message: Callable[[Message], None]
    relay: Callable[[int, bytes], None] = lambda _rank, _line: None
    clock: Callable[[], float] = time.monotonic
    members: dict[int, Member] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._allowance = Allowance(self.limits)
        self._progress = self.clock()
        self._asked: float | None = None
        self._selector = selectors.DefaultSelector()
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.address))
        self._server.listen(64)
        self._selector.register(self._server, selectors.EVENT_READ, None)

    def close(self) -> None:
        """Stop listening: what is left of the ranks ends."""
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr] # all of them are sockets
        self._selector.close()

    def pump(self, seconds: float) -> None:
        """Take in what the ranks say, for at most so long."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                connection, _ = self._server.accept()
                self._selector.register(connection, selectors.EVENT_READ, Speaker(connection))
            else:
                self._read(key.fileobj, key.data)  # type: ignore[arg-type]

    def send(self, word: bytes) -> None:
        """To all ranks of this node."""
        for member in self.members.values():
            if member.connection is not None:
                with suppress(OSError):
                    member.connection.send(word, socket.MSG_DONTWAIT)

    def stop(self) -> None:
        """Ask all ranks to leave, after the step at which all know of it."""
        self.send(STOP)

    def kill(self) -> None:
        """End all ranks of this node at once."""
        for member in self.members.values():
            if member.process is not None:
                with suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)

    def verdict(self) -> Verdict | None:
        """Which rank of this node is frozen or deaf; None: none."""
        now, trains = self.clock(), self._allowance.pause is None
        for member in self.members.values():
            if member.left or member.failed is not None or member.process is None:
                continue
            status = _status(member.process)
            if status in (None, psutil.STATUS_ZOMBIE):
                continue  # dead: the agent says how
            member.stopped = (member.stopped or now) if status == psutil.STATUS_STOPPED else None
            if member.stopped is not None and now - member.stopped >= FROZEN_SECONDS:
                return self._of(member, "was frozen (stopped by a signal)")
            silent = now - member.heard
            if member.stopped is None and silent > (DEAF_SECONDS if trains else DEAF_IN_PAUSE_SECONDS):
                return self._of(member, f"gave no sign of life for {silent:.1f} s: its interpreter is held")
        return None

    def have_ended(self) -> bool:
        """Whether nothing more is to be heard: each rank has said its last word, or is dead."""
        self.dead_seconds()
        return all(m.left or m.dead is not None or m.process is None for m in self.members.values())

    def dead_seconds(self) -> float:
        """How long ago the first rank of this node ended without a last word; 0: none did."""
        now = self.clock()
        for member in self.members.values():
            if member.left or member.dead is not None or member.process is None:
                continue
            if _status(member.process) in (None, psutil.STATUS_ZOMBIE):
                member.dead = now
        return max((now - member.dead for member in self.members.values() if member.dead is not None), default=0.0)

    def failures(self) -> dict[int, Failed]:
        """What ranks said of how they failed, in the order of the ranks."""
        return {rank: m.failed for rank, m in sorted(self.members.items()) if m.failed is not None}

    def hung(self, ask: Callable[[bytes], None]) -> Verdict | None:
        """No rank makes a step, and all are alive: the one that began the fewest collectives holds up the rest.

        Stages of a pipeline begin different numbers of them; but those that hold up nobody wait for another one.

        Args:
            ask: sends a word to the ranks of all nodes.
        """
        now = self.clock()
        silent = now - self._progress
        if silent < self._allowance.seconds - MARGIN_SECONDS or any(m.left for m in self.members.values()):
            self._asked = None
            return None
        if self._asked is None:
            self._asked = now
            self.ask(ask)
        told = [member for member in self.members.values() if member.where is not None]
        if len(told) < len(self.members) and now - self._asked < TELL_SECONDS:
            return None
        if not told:
            return None
        last, first = min(told, key=lambda member: (_waits(member), _begun(member))), max(told, key=_begun)
        reason = f"made no step for {silent:.1f} s"
        if _begun(last) < _begun(first) and first.where is not None:
            reason += f" and has not come to the collective that others wait in ({first.where.recent[0]})"
        return self._of(last, reason)

    def ask(self, send: Callable[[bytes], None]) -> None:
        """Have all ranks tell where their training is.

        Args:
            send: sends a word to the ranks of all nodes.
        """
        for member in self.members.values():
            member.where = None
        send(TELL)

    def owe_answer(self) -> bool:
        """Whether a rank that can tell has not."""
        self.dead_seconds()
        silent = (m for m in self.members.values() if m.where is None and m.stopped is None)
        return any(not m.left and m.dead is None and m.failed is None for m in silent)

    def report(self) -> str:
        """What they have told; see `report`."""
        return report((member.rank, member.where) for member in self.members.values())

    def _of(self, member: Member, reason: str) -> Verdict:
        return Verdict(member.rank, member.pid, reason)

    def take(self, line: bytes, speaker: Speaker, relayed: bool = False) -> None:
        """A line of a rank; `relayed`: of one of another node."""
        word = decode_word(line)
        if isinstance(word, Hello):
            member = Member(word.rank, word.pid, self.clock())
            if not relayed:
                member.connection, member.process = speaker.connection, psutil.Process(word.pid)
            self.members[word.rank] = speaker.member = member
            print(f"rank {word.rank} is process {word.pid}", file=sys.stderr, flush=True)  # noqa: T201 - the log
        elif speaker.member is not None:
            self._hear(speaker.member, word)
        if speaker.member is not None:
            self.relay(speaker.member.rank, line)

    def _read(self, connection: socket.socket, speaker: Speaker) -> None:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(connection)
            connection.close()
            return
        for line in speaker.lines.feed(data):
            self.take(line, speaker)

    def _hear(self, member: Member, word: object) -> None:
        member.heard = self.clock()
        if isinstance(word, Whereabouts):
            member.where = word
        elif isinstance(word, Bye):
            member.left = True
        elif isinstance(word, Said):
            message = word.message()
            if isinstance(message, Failed):
                member.failed = message
            elif isinstance(message, Profiled):
                self.on_message(message)
            elif member.rank == min(self.members):
                if self._allowance.hear(message):
                    self._progress = self.clock()
                self.on_message(message)
        else:
            assert word is None or isinstance(word, Alive)  # noqa: S101


def _waits(member: Member) -> bool:
    return member.where is not None and member.where.waits


def _begun(member: Member) -> int:
    return member.where.begun if member.where else 0


def _status(process: psutil.Process) -> str | None:
    try:
        return str(process.status())
    except psutil.Error:
        return None
