"""The last word of a launcher reaches its nodes, whatever they are saying just then."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from training.node import Visit
from training.parallel import nodes as nodes_module
from training.parallel.nodes import FAREWELL_SECONDS, Nodes
from training.parallel.wire import DISMISS, Alive, NodeHello, encode_word

HOST = "127.0.0.1"
HELLO = encode_word(NodeHello(ticket="t", name="n", host="h", pid=1))


def free_port() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def test_a_node_that_speaks_when_the_launcher_has_gone_still_hears_its_last_word(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as server:
        visit = Visit(socket.create_connection(server.getsockname(), 2), tmp_path, None)
        launcher, _ = server.accept()
    visit.say(Alive())
    time.sleep(0.1)
    launcher.sendall(DISMISS)
    launcher.close()  # with a word unread: the connection is reset
    time.sleep(0.1)
    while visit.goes_on:
        visit.say(Alive())
    visit._connection.close()
    assert visit.dismissed


def test_the_launcher_stays_until_all_nodes_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "FAREWELL_SECONDS", 30.0)
    monkeypatch.setattr(nodes_module, "LOST_SECONDS", 30.0)
    port = free_port()
    nodes = Nodes(HOST, port, "t")
    visits = [Visit(socket.create_connection((HOST, port), 2), tmp_path, None) for _ in range(2)]
    for visit in visits:
        visit.say(NodeHello(ticket="t", name="n", host="h", pid=1))
    while len(nodes.present) < 2:
        nodes.pump(0.05)
    farewell = threading.Thread(target=nodes.dismiss)
    farewell.start()
    time.sleep(0.2)  # both are busy, and have not read
    assert farewell.is_alive()
    late = Visit(socket.create_connection((HOST, port), 2), tmp_path, None)
    late.say(NodeHello(ticket="t", name="n", host="h", pid=1))
    while len(nodes.present) < 3:
        time.sleep(0.01)
    for visit in (*visits, late):
        while visit.goes_on:
            visit.pump()
        visit._connection.close()
        assert visit.dismissed
    farewell.join()
    nodes.close()


def test_it_does_not_wait_for_a_node_that_is_frozen() -> None:
    port = free_port()
    nodes = Nodes(HOST, port, "t")
    with socket.create_connection((HOST, port), 2) as frozen:
        frozen.sendall(HELLO)
        while not nodes.present:
            nodes.pump(0.05)
        begun = time.monotonic()
        nodes.dismiss()
        assert time.monotonic() - begun < FAREWELL_SECONDS + 0.5
        nodes.close()
