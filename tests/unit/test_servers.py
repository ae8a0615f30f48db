from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from infra import servers
from infra.servers import ask, ask_once
from infra.settings import LOOPBACK
from training.errors import Unavailable


@contextmanager
def answering(*statuses: int) -> Iterator[tuple[int, list[str]]]:
    """A server that answers so, one request after the other, the last one for ever; and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PATCH(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status = statuses[min(len(asked), len(statuses) - 1)]
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b'{"done": true}')

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer((LOOPBACK, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


def test_a_busy_server_is_asked_again() -> None:
    with answering(503, 503, 200) as (port, asked):
        assert ask(port, "PATCH", "/api/x", {}) == {"done": True}
        assert len(asked) == 3


def test_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask.retry, "stop", servers.tenacity.stop_after_attempt(3))  # type: ignore[attr-defined]
    with answering(503) as (port, asked):
        with pytest.raises(Unavailable, match=r"PATCH /api/x on port \d+: status 503"):
            ask(port, "PATCH", "/api/x", {})
        assert len(asked) == 3


@pytest.mark.parametrize("status", [404, 409, 500])
def test_another_answer_is_final(status: int) -> None:
    with answering(status, 200) as (port, asked):
        with pytest.raises(Unavailable, match=f"status {status}"):
            ask(port, "PATCH", "/api/x", {})
        assert len(asked) == 1


def test_a_look_whether_it_is_ready_waits_for_nothing() -> None:
    with answering(503, 200) as (port, asked):
        with pytest.raises(Unavailable, match="status 503"):
            ask_once(port, "PATCH", "/api/x", {})
        assert len(asked) == 1
