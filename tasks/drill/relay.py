"""The wire between a node and a server: bytes are passed on, held back, or let go again."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from infra.settings import LOOPBACK

READ_BYTES = 1 << 16
JOIN_SECONDS = 5.0


class Relay:
    """Listens on `host` and passes everything on to a port of this machine, in threads of its own.

    While it is cut, connections stay open and new ones are accepted, but nothing arrives: no error tells either
    side, as when a cable is pulled. What was under way arrives when it is healed.

    Attributes:
        port: where it listens.
        delay_seconds: by which each piece of data is late.
    """

    def __init__(self, target_port: int, host: str = LOOPBACK) -> None:
        self._target_port, self.host = target_port, host
        self.delay_seconds = 0.0
        self._open = threading.Event()
        self._open.set()
        self._closing = False
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, name="retoma-relay", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{self.host}:{self.port}"

    def cut(self) -> None:
        """Nothing passes any more."""
        self._open.clear()

    def heal(self) -> None:
        """Everything passes again, what was held back first."""
        self._open.set()

    def close(self) -> None:
        """Close all connections, and end the threads."""
        self._closing = True
        self._open.set()
        with self._lock:
            ours = [self._listener, *self._sockets]
        for one in ours:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._thread.join(JOIN_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), name="retoma-relay", daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        """One connection, both directions."""
        with near:
            self._open.wait()
            try:
                far = socket.create_connection((LOOPBACK, self._target_port))
            except OSError:  # the server is away: so says the wire
                return
            with far, self._known(near, far):
                back = threading.Thread(target=self._pass_on, args=(far, near), name="retoma-relay", daemon=True)
                back.start()
                self._pass_on(near, far)
                back.join()

    @contextlib.contextmanager
    def _known(self, *sockets: socket.socket) -> Iterator[None]:
        with self._lock:
            self._sockets.update(sockets)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.difference_update(sockets)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        """Until one side closes; then the other is told."""
        with contextlib.suppress(OSError):
            while data := source.recv(READ_BYTES):
                if self.delay_seconds:
                    time.sleep(self.delay_seconds)
                self._open.wait()
                target.sendall(data)
            self._open.wait()
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
