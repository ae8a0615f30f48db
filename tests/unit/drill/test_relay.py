"""The wire: passes on, holds back without a word, and lets go again."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from infra.settings import LOOPBACK
from tasks.drill.relay import Relay


@pytest.fixture
def echo() -> Iterator[int]:
    """Port of a server that says back what it hears."""
    with socket.create_server((LOOPBACK, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    while data := connection.recv(1024):
                        connection.sendall(data)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield int(server.getsockname()[1])
        server.shutdown(socket.SHUT_RDWR)
    thread.join(5)


def test_what_is_cut_is_mute_and_what_is_healed_arrives(echo: int) -> None:
    relay = Relay(echo)
    try:
        with socket.create_connection((LOOPBACK, relay.port), timeout=5) as client:
            client.sendall(b"one")
            assert client.recv(10) == b"one"
            relay.cut()
            client.settimeout(0.3)
            client.sendall(b"two")
            with pytest.raises(TimeoutError):
                client.recv(10)
            client.settimeout(5)
            relay.heal()
            assert client.recv(10) == b"two"
    finally:
        relay.close()


def test_a_cut_wire_still_takes_calls_and_answers_none(echo: int) -> None:
    relay = Relay(echo)
    try:
        relay.cut()
        with socket.create_connection((LOOPBACK, relay.port), timeout=5) as client:
            client.settimeout(0.3)
            client.sendall(b"one")
            with pytest.raises(TimeoutError):
                client.recv(10)
    finally:
        relay.close()


def test_a_server_that_is_away_refuses_through_the_wire() -> None:
    with socket.create_server((LOOPBACK, 0)) as gone:
        port = int(gone.getsockname()[1])
    relay = Relay(port)
    try:
        with socket.create_connection((LOOPBACK, relay.port), timeout=5) as client:
            assert client.recv(10) == b""
    finally:
        relay.close()
