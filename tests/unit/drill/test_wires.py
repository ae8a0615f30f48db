"""Wires between nodes: what a node is that others reach, and that it can be cut off alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.drill.wires import PEERS, Hub, Namespace, Wires, hub

LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    server.accept()[0].close()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 0.4)"


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Namespace, Namespace]]:
    """Two nodes that meet."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("nsenter")):
        pytest.skip("network namespaces need root, ip and nsenter")
    meeting = hub(tmp_path)
    if meeting is None:
        pytest.skip("this kernel makes no bridge")
    nodes = []
    try:
        nodes = [Namespace({}, tmp_path, meeting) for _ in range(2)]
        yield nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.close()
        meeting.close()
        assert len(list(tmp_path.iterdir())) == 3
        assert not any(Path("/run/netns", note.name).exists() for note in tmp_path.iterdir())


def reaches(node: Namespace, address: str, port: str) -> bool:
    command = [*node.prefix, sys.executable, "-I", "-S", "-c", CONNECT, address, port]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def soon_reaches(node: Namespace, address: str, port: str) -> bool:
    """A wire that is up again carries nothing before the kernel has seen it, and it looks once a second only."""
    return any(reaches(node, address, port) for _ in range(20))


def test_nodes_reach_each_other_and_one_that_is_cut_keeps_its_own_address(
    two: tuple[Namespace, Namespace],
) -> None:
    here, there = two
    assert here.address != there.address
    assert here.reach_each_other
    assert here.has(PEERS)
    command = [*here.prefix, sys.executable, "-I", "-S", "-c", LISTEN, here.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            assert reaches(there, here.address, port)
            there.cut(PEERS)
            assert not reaches(there, here.address, port)
            here.cut(PEERS)
            assert reaches(here, here.address, port), "its launcher and its ranks still talk"
            there.heal(PEERS)
            assert not reaches(there, here.address, port), "the other end is cut, too"
            here.heal(PEERS)
            assert soon_reaches(there, here.address, port)
        finally:
            server.kill()


def test_where_there_are_no_namespaces_nodes_share_the_loopback_and_nothing_parts_them() -> None:
    wires = Wires({})
    assert wires.reach_each_other
    assert not wires.has(PEERS)
    assert wires.address == "127.0.0.1"
    wires.close()


def test_a_hub_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: str) -> None:
        made.append(arguments)
        if "bridge" in arguments:
            raise subprocess.CalledProcessError(2, "ip")

    made: list[tuple[str, ...]] = []
    monkeypatch.setattr("tasks.drill.wires._ip", refuse)
    with pytest.raises(subprocess.CalledProcessError):
        Hub(tmp_path)
    assert made[-1][:2] == ("netns", "delete")
