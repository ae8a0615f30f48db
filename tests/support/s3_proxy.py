"""A proxy between an S3 client and a server. A rule decides what becomes of each request."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.support.s3_servers import BUCKET, LOOPBACK, S3Server


@dataclass
class Asked:
    """A request that came to the proxy. A rule may change its headers and its path."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def key(self) -> str:
        """Key within the bucket."""
        return urlsplit(self.path).path.removeprefix(f"/{BUCKET}").lstrip("/")

    @property
    def query(self) -> str:
        return urlsplit(self.path).query


@dataclass(frozen=True)
class Answer:
    """What the proxy answers by itself."""

    status: int
    code: str
    headers: dict[str, str] = field(default_factory=dict)


# None: pass it on. "lose": pass it on, and lose the answer. "drop": lose the request. "mute": never answer.
Verdict = Answer | Literal["lose", "drop", "mute"] | None
Rule = Callable[[Asked], Verdict]


class Proxy:
    """Listens on a port of its own. Remembers what it was asked."""

    def __init__(self, server: S3Server) -> None:
        target = urlsplit(server.url)
        self.target_name = server.name
        assert target.hostname is not None
        self.target = (target.hostname, target.port)
        self.rule: Rule = lambda asked: None
        self.asked: list[Asked] = []
        self.closing = threading.Event()
        self._server = _Server((LOOPBACK, 0), _Handler)
        self._server.proxy = self
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of what is held back, and stop."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    proxy: Proxy


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (OSError, http.client.HTTPException):
            self.close_connection = True

    def _do(self) -> None:
        proxy = self.server.proxy
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = Asked(self.command, self.path, dict(self.headers.items()), body)
        proxy.asked.append(asked)
        verdict = proxy.rule(asked)
        if isinstance(verdict, Answer):
            self.send_response(verdict.status)
            for name, value in verdict.headers.items():
                self.send_header(name, value)
            text = f"<Error><Code>{verdict.code}</Code><Message>by the proxy</Message></Error>"
            self._finish(text.encode())
        elif verdict in ("mute", "drop"):
            if verdict == "mute":
                proxy.closing.wait(60)
            self.close_connection = True
        else:
            self._pass_on(asked, lose=verdict == "lose")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do  # noqa: N815 - names of http.server

    def _pass_on(self, asked: Asked, lose: bool) -> None:
        connection = http.client.HTTPConnection(*self.server.proxy.target, timeout=60)
        try:
            connection.request(asked.method, asked.path, asked.body, asked.headers)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if lose:
            self.close_connection = True
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self._finish(data, answer.getheader("Content-Length"))

    def _finish(self, data: bytes, length: str | None = None) -> None:
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Say nothing."""
