"""One more node of a group: `python -m training.node --join HOST:PORT`, with the ticket on stdin.

It stays with the launcher that it was sent to, and with those that follow there: each musters it for a generation
of its group. It starts the ranks of its node, passes on what they say, judges what only this node can see, and ends
them when the launcher says so, or is not heard any more. What its ranks may write, the token decides.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from training.guard import die_with_parent, watch_lifeline
from training.parallel.agent import LocalRanks, launching
from training.parallel.wire import (
    ALIVE_SECONDS,
    DISMISS,
    KILL,
    PING,
    STOP,
    TELL,
    Alive,
    Blame,
    Ended,
    Leaving,
    Lines,
    Muster,
    NodeHello,
    Relayed,
    Word,
    decode_word,
    encode_word,
)
from training.ports import RangeSpec

TICK_SECONDS = 0.05
CONNECT_SECONDS = 2.0
RETRY_SECONDS = 0.2
LOST_SECONDS = 4.0  # without a word of the launcher; it gives a node up sooner than that
LEASE_SECONDS = 60.0  # without a launcher at all


def main() -> None:
    """Take part until the range is over. Exit code 3: the launcher is gone."""
    parser = argparse.ArgumentParser(prog="training.node", description=__doc__)
    parser.add_argument("--join", required=True, metavar="HOST:PORT")
    parser.add_argument("--name", default="", help="how the launcher shall know this node")
    parser.add_argument("--data", help="folder of the data here, verified; default: where the launcher has it")
    parser.add_argument("--lease-seconds", type=float, default=LEASE_SECONDS)
    options = parser.parse_args()
    host, _, port = options.join.rpartition(":")
    sys.path.insert(0, str(Path.cwd()))
    die_with_parent()
    with os.fdopen(0, "rb", buffering=0, closefd=False) as stdin:
        ticket = stdin.readline().decode().strip()
    with launching() as folder:
        hello = NodeHello(ticket=ticket, name=options.name, host=socket.gethostname(), pid=os.getpid())
        node = NodeAgent((host, int(port)), hello, folder, options.data, options.lease_seconds)
        signal.signal(signal.SIGTERM, lambda *_: node.ask_to_leave())
        watch_lifeline(0)
        code = node.run()
    sys.stderr.flush()
    os._exit(code)


class NodeAgent:
    """This node, from its first connection to the end of the range.

    Args:
        place: host and port, where the launcher listens, or will listen.
        hello: to say there.
        folder: for files of this process.
        data: folder of the data on this node; None: where the launcher has it.
        lease_seconds: how long there may be no launcher.
    """

    def __init__(
        self, place: tuple[str, int], hello: NodeHello, folder: Path, data: str | None, lease_seconds: float
    ) -> None:
        self._place, self._hello = place, hello
        self._folder, self._data, self._lease_seconds = folder, data, lease_seconds
        self._asked = False

    def ask_to_leave(self) -> None:
        """From the signal handler: the group goes on without this node, from a checkpoint."""
        self._asked = True

    def run(self) -> int:
        """Serve one launcher after the other."""
        from training.parallel import meeting  # noqa: F401 - takes seconds, in which nobody would be heard

        heard = time.monotonic()
        while time.monotonic() - heard < self._lease_seconds:
            if self._asked:
                return 0
            with suppress(OSError), socket.create_connection(self._place, CONNECT_SECONDS) as connection:
                visit = Visit(connection, self._folder, self._data)
                self._serve(visit)
                if visit.dismissed:
                    return 0
                if visit.was_heard:
                    heard = time.monotonic()
            time.sleep(RETRY_SECONDS)
        print(f"no launcher at {self._place} for {self._lease_seconds:g} s", file=sys.stderr)  # noqa: T201
        return 3

    def _serve(self, visit: Visit) -> None:
        try:
            visit.say(self._hello)
            while visit.goes_on:
                visit.pump()
                if self._asked:
                    visit.leave("this machine is about to go")
        finally:
            visit.close()


class Visit:
    """One connection to one launcher, and the ranks that it musters here.

    Attributes:
        goes_on: until the launcher is gone, or has dismissed this node.
        dismissed: by the launcher, or left after having been asked to.
        was_heard: whether the launcher ever answered: it may be another service, or refuse the ticket.
    """

    def __init__(self, connection: socket.socket, folder: Path, data: str | None) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._folder, self._data = connection, folder, data
        self._lines = Lines()
        self._local: LocalRanks | None = None
        self._heard = self._said = time.monotonic()
        self._told_leaving = self._told_end = False
        self.goes_on, self.dismissed, self.was_heard = True, False, False

    def pump(self) -> None:
        """Listen to both sides for a moment."""
        ready, _, _ = select.select([self._connection], [], [], 0 if self._local else TICK_SECONDS)
        if ready:
            self._read()
        now = time.monotonic()
        if now - self._heard > LOST_SECONDS:
            self.goes_on = False
        if now - self._said > ALIVE_SECONDS:
            self._said = now
            self.say(Alive())
        if self._local is not None:
            self._local.pump(TICK_SECONDS)
            self._look(self._local)

    def say(self, word: Word) -> None:
        """To the launcher. Where it has gone, its last word may still be there to be read."""
        try:
            self._connection.sendall(encode_word(word))
        except OSError:
            while self.goes_on:
                self._read()

    def leave(self, why: str) -> None:
        """Tell the launcher that this node is about to go; its group commits, and goes on without it."""
        if not self._told_leaving:
            self._told_leaving = True
            self.say(Leaving(why=why))
        if self._local is None:
            self.goes_on, self.dismissed = False, True

    def close(self) -> None:
        """The ranks end with the connection."""
        if self._local is not None:
            self._local.close()

    def _read(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self.goes_on = False
            return
        self._heard, self.was_heard = time.monotonic(), True
        for line in self._lines.feed(data):
            self._hear(line + b"\n")

    def _hear(self, line: bytes) -> None:
        if line == PING:
            return
        if line == DISMISS:
            self.goes_on, self.dismissed = False, True
        elif line == KILL and self._local is not None:
            self._local.members.kill()
        elif line in (STOP, TELL) and self._local is not None:
            self._local.members.send(line)
        elif isinstance(word := decode_word(line), Muster):
            self._start(word)

    def _start(self, order: Muster) -> None:
        from training.checkpoint.ranks.tcp import reach_store
        from training.parallel.meeting import Meeting

        spec = RangeSpec.model_validate_json(order.line)
        here: dict[str, Any] = {"profile_folder": None}  # the supervisor's, on another machine
        if self._data is not None:
            here["data_folder"] = self._data
        spec = spec.model_copy(update=here)
        try:
            store = reach_store(order.host, order.port)
        except RuntimeError as error:  # torch's, which tells of the address
            print(f"cannot reach the store of the group: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the log
            self.goes_on = False
            return
        self._local = LocalRanks(spec, self._folder, lambda _: None, self._pass_on)
        place = order.host, order.port, order.node, order.nodes
        self._local.start(Meeting(f"{spec.run}-{spec.token}", store, *place))

    def _pass_on(self, rank: int, line: bytes) -> None:
        with suppress(UnicodeDecodeError):
            self.say(Relayed(rank=rank, line=line.decode()))

    def _look(self, local: LocalRanks) -> None:
        if self._told_end:
            return
        if found := local.members.verdict():
            local.write_stack(found.rank)
            self.say(Blame(rank=found.rank, pid=found.pid, reason=found.reason))
            self._told_end = True  # the launcher asks all ranks where they are, and has them killed
        elif local.ended:
            local.hear_last_words()
            rank, reason = local.failure or (None, None)
            self.say(Ended(rank=rank, reason=reason))
            self._told_end = True


if __name__ == "__main__":
    main()
