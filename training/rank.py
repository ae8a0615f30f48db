"""One rank of a group: forked by the launcher of its node, it trains the range with the others.

It tells the launcher what a training process tells its supervisor, and that it is alive, from a thread of its own:
who hangs in a collective that another one does not enter is alive, too, and only that other one is not.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import NamedTuple

import torch.distributed as dist

from training.checkpoint.ranks.tcp import TcpExchange
from training.errors import RetomaError, Unavailable
from training.guard import die_with_parent
from training.parallel.ranks import joined
from training.parallel.whereabouts import whereabouts
from training.parallel.wire import (
    ALIVE_SECONDS,
    LOST,
    STOP,
    TELL,
    Alive,
    Bye,
    Hello,
    Said,
    Word,
    encode_word,
)
from training.ports import Failed, Message, RangeSpec
from training.session import train_spec
from training.stopping import GroupStop, insist
from training.trainer import device_of

VICTIM_SECONDS = 0.5
_PEER_WORDS = ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL", "Timed out")


class Place(NamedTuple):
    """Where the launcher is: its socket on this node, and the store of the group."""

    socket: str
    host: str
    port: int
    generation: int


def main(spec_line: str, place: Place) -> None:
    """Train a range as the rank that the environment names."""
    die_with_parent()
    spec = RangeSpec.model_validate_json(spec_line)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    request = GroupStop()
    signal.signal(signal.SIGTERM, lambda *_: request.ask())
    insist(request)
    faulthandler.register(signal.SIGUSR2, all_threads=False)
    line = Line(place.socket, rank)
    gc.freeze()
    try:
        exchange = TcpExchange(place.host, place.port, rank, size, place.generation)
        with joined(spec.config.parallel, exchange, device_of(spec.config).type) as ranks:
            train_spec(spec, line.say, request, ranks)
    except RetomaError as error:
        line.say(Failed(error=error.kind, message=error.message, hint=error.hint))
        print(error, file=sys.stderr, flush=True)  # noqa: T201 - the log
        line.leave(error.exit_code)
    except Exception as error:  # noqa: BLE001 - the last line of this process
        traceback.print_exc()
        failed = _failed(error)
        line.say(failed)
        if failed.message.startswith(LOST):
            time.sleep(VICTIM_SECONDS)  # the agent names who ends first, and that shall be the cause
        line.leave(1)
    line.close()


class Line:
    """The connection to the launcher, which ends this process when it is gone.

    Args:
        address: of the launcher's socket.
        rank: who speaks.
    """

    def __init__(self, address: str, rank: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(address)
        self._lock = threading.Lock()
        self._send(Hello(rank=rank, pid=os.getpid()))
        for work in (self._beat, self._listen):
            threading.Thread(target=work, name=f"retoma-line{work.__name__}", daemon=True).start()

    def say(self, message: Message) -> None:
        """Tell what the training says."""
        self._send(Said.of(message))

    def close(self) -> None:
        """From here on silence is no sign of death: the rank has done its work."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(encode_word(Bye()))

    def leave(self, code: int) -> None:
        """End without the interpreter's shutdown, which may wait for threads of collectives that never end."""
        self.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _beat(self) -> None:
        while True:
            time.sleep(ALIVE_SECONDS)
            self._send(Alive())

    def _listen(self) -> None:
        try:
            with self._socket.makefile("rb") as words:
                for word in words:
                    if word == STOP:
                        os.kill(os.getpid(), signal.SIGTERM)
                    elif word == TELL:
                        self._send(whereabouts())
        finally:  # a launcher that died with our words unread resets the connection
            os._exit(128 + signal.SIGKILL)

    def _send(self, word: Word) -> None:
        with self._lock, contextlib.suppress(OSError):  # a launcher that is gone is found by `_listen`
            self._socket.sendall(encode_word(word))


def _failed(error: Exception) -> Failed:
    """A collective that failed under us is a consequence: another rank knows why."""
    if isinstance(error, dist.DistError | RuntimeError) and _is_of_a_peer(error):
        return Failed(error=Unavailable.__name__, message=f"{LOST}: {error}")
    return Failed(error=type(error).__name__, message=str(error))


def _is_of_a_peer(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or any(word in str(error) for word in _PEER_WORDS)
