"""A node's wires: to each server its own, so that each can be cut alone.

Where the machine allows it (root, `ip`, `nsenter`), a node lives in a network namespace with a pair of virtual
interfaces to each server, and a cut takes the interface down. Elsewhere they talk to relays, which fall mute.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tasks.drill.relay import Relay

Server = Literal["prefect", "mlflow", "store"]
NETWORK = "10.213"  # private; a drill takes a random block of it


class Wires:
    """Relays on the loopback: works everywhere.

    Attributes:
        kind: how a cut is made, for the report.
        prefix: of a command that is to live on this node.
    """

    kind = "relays that fall mute"

    def __init__(self, ports: Mapping[Server, int]) -> None:
        self.prefix: tuple[str, ...] = ()
        self._relays: dict[Server, Relay] = {name: Relay(port, self._host(name)) for name, port in ports.items()}

    def url(self, server: Server) -> str:
        """Address of a server, as seen from the node."""
        return self._relays[server].url

    def has(self, server: Server) -> bool:
        """Whether there is a wire to it; a store in a folder has none."""
        return server in self._relays

    def cut(self, server: Server) -> None:
        """Nothing gets through any more, and nobody is told."""
        self._relays[server].cut()

    def heal(self, server: Server) -> None:
        """It gets through again."""
        self._relays[server].heal()

    def delay(self, server: Server, seconds: float) -> None:
        """Everything takes so much longer."""
        self._relays[server].delay_seconds = seconds

    def close(self) -> None:
        """Remove what was set up."""
        for relay in self._relays.values():
            relay.close()

    def _host(self, server: Server) -> str:  # noqa: ARG002 - a namespace has one for each
        return "127.0.0.1"


class Namespace(Wires):
    """A network namespace with one pair of virtual interfaces for each server."""

    kind = "network namespaces"

    def __init__(self, ports: Mapping[Server, int], notes: Path) -> None:
        self.name = f"retoma-{secrets.token_hex(3)}"
        notes.mkdir(parents=True, exist_ok=True)
        (notes / self.name).touch()  # first, so that it is found if we are killed
        self._block = secrets.randbelow(250), secrets.randbelow(60) * 4
        self._hosts: dict[Server, str] = {}
        _ip("netns", "add", self.name)
        try:
            _ip("-n", self.name, "link", "set", "lo", "up")
            for number, server in enumerate(ports):
                self._connect(server, number)
            super().__init__(ports)
        except BaseException:
            remove_namespace(self.name)
            raise
        self.prefix = (str(shutil.which("nsenter")), f"--net=/run/netns/{self.name}", "--")

    def cut(self, server: Server) -> None:
        """See `Wires.cut`."""
        _ip("link", "set", self._interface(server), "down")

    def heal(self, server: Server) -> None:
        """See `Wires.heal`."""
        _ip("link", "set", self._interface(server), "up")

    def close(self) -> None:
        """See `Wires.close`."""
        super().close()
        remove_namespace(self.name)

    def _connect(self, server: Server, number: int) -> None:
        high, low = self._block[0], self._block[1]
        subnet = f"{NETWORK}.{(high + number) % 256}"
        here, there = f"{subnet}.{low + 1}", f"{subnet}.{low + 2}"
        outside = self._interface(server)
        _ip("link", "add", outside, "type", "veth", "peer", "name", server, "netns", self.name)
        _ip("addr", "add", f"{here}/30", "dev", outside)
        _ip("link", "set", outside, "up")
        _ip("-n", self.name, "addr", "add", f"{there}/30", "dev", server)
        _ip("-n", self.name, "link", "set", server, "up")
        self._hosts[server] = here

    def _interface(self, server: Server) -> str:
        return f"r{self.name.removeprefix('retoma-')}-{server}"  # at most 15 characters

    def _host(self, server: Server) -> str:
        return self._hosts[server]


def remove_namespace(name: str) -> None:
    """Remove a namespace and its pairs of interfaces, if it is there."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        _ip("netns", "delete", name)


def wires(ports: Mapping[Server, int], notes: Path) -> Wires:
    """A node's wires, by namespaces where that works. In `notes` each of them leaves a file with its name."""
    if os.geteuid() == 0 and shutil.which("ip") and shutil.which("nsenter"):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return Namespace(ports, notes)
    return Wires(ports)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
