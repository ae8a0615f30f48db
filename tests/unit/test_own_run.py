"""One question to the Prefect server about ourselves: every answer, and every way not to answer, within moments."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from infra.own_run import DELETED, OwnRun
from training.errors import Unavailable


@contextmanager
def answering(status: int) -> Iterator[int]:
    """A server that says the same to everything. Yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def ask(port: int) -> str:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{port}/api"}), OwnRun(str(uuid.uuid4())) as own:
        return own.state()


def test_a_flow_run_that_somebody_deleted_is_told_apart_from_a_server_that_is_away() -> None:
    with answering(404) as port:
        assert ask(port) == DELETED


@pytest.mark.parametrize("status", [503, 401, 200])
def test_what_is_no_answer_is_unavailable_at_once_without_a_second_try(status: int) -> None:
    with answering(status) as port:
        ask_and_fail(port)


def test_a_server_that_is_away_is_unavailable_at_once() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # taken, and nobody listens
        ask_and_fail(held.getsockname()[1])


def ask_and_fail(port: int) -> None:
    started = time.monotonic()
    with pytest.raises(Unavailable):
        ask(port)
    assert time.monotonic() - started < 4, "retries of the client would take a minute"
