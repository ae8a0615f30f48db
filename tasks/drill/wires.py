"""A node's wires: to each server its own, and one to the other nodes, so that each can be cut alone.

Where the machine allows it (root, `ip`, `nsenter`), a node lives in a network namespace with a pair of virtual
interfaces to each server, and one to the hub where the nodes meet. A cut takes the interface at its other end down.
Elsewhere they talk to relays, which fall mute, and to each other over the loopback, which nobody can cut.
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
Wire = Literal["prefect", "mlflow", "store", "peers"]
PEERS: Literal["peers"] = "peers"  # the wire to the other nodes, and its interface in the node
WIRES: tuple[Wire, ...] = ("prefect", "mlflow", "store", PEERS)
NETWORK = "10.213"  # private; a drill takes a random block of it
PEERS_NETWORK = "10.214.0"  # private; between namespaces only, so that several drills may have the same
LOOPBACK = "127.0.0.1"


class Wires:
    """Relays on the loopback: works everywhere.

    Attributes:
        kind: how a cut is made, for the report.
        prefix: of a command that is to live on this node.
        address: by which other nodes reach this one; the loopback reaches those that have no network of their own.
    """

    kind = "relays that fall mute"

    def __init__(self, ports: Mapping[Server, int]) -> None:
        self.prefix: tuple[str, ...] = ()
        self.address = LOOPBACK
        self._relays: dict[Server, Relay] = {name: Relay(port, self._host(name)) for name, port in ports.items()}

    def url(self, server: Server) -> str:
        """Address of a server, as seen from the node."""
        return self._relays[server].url

    @property
    def reach_each_other(self) -> bool:
        """Whether nodes with such wires do."""
        return True

    def has(self, wire: Wire) -> bool:
        """Whether there is one that can be cut; a store in a folder has none."""
        return wire in self._relays

    def cut(self, wire: Wire) -> None:
        """Nothing gets through any more, and nobody is told."""
        assert wire != PEERS  # noqa: S101 - `has` tells that there is none
        self._relays[wire].cut()

    def heal(self, wire: Wire) -> None:
        """It gets through again."""
        assert wire != PEERS  # noqa: S101 - `has` tells that there is none
        self._relays[wire].heal()

    def delay(self, server: Server, seconds: float) -> None:
        """Everything takes so much longer."""
        self._relays[server].delay_seconds = seconds

    def close(self) -> None:
        """Remove what was set up."""
        for relay in self._relays.values():
            relay.close()

    def _host(self, server: Server) -> str:  # noqa: ARG002 - a namespace has one for each
        return "127.0.0.1"


class Hub:
    """Where the wires between nodes meet: a bridge in a namespace of its own, out of reach of the firewall."""

    def __init__(self, notes: Path) -> None:
        self.name = _new_namespace(notes)
        self._nodes = 0
        try:
            _ip("-n", self.name, "link", "add", "hub", "type", "bridge")
            _ip("-n", self.name, "link", "set", "hub", "up")
        except BaseException:
            remove_namespace(self.name)
            raise

    def connect(self, namespace: str) -> tuple[str, str]:
        """A wire to a node. Returns its port here, and the node's address."""
        self._nodes += 1
        port, address = f"node{self._nodes}", f"{PEERS_NETWORK}.{self._nodes}"
        peer = ("peer", "name", PEERS, "netns", namespace)
        _ip("link", "add", port, "netns", self.name, "type", "veth", *peer)
        _ip("-n", self.name, "link", "set", port, "master", "hub", "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", PEERS)
        _ip("-n", namespace, "link", "set", PEERS, "addrgenmode", "none")  # IPv4 only, whatever gloo would prefer
        _ip("-n", namespace, "link", "set", PEERS, "up")
        return port, address

    def switch(self, port: str, state: Literal["up", "down"]) -> None:
        """The node keeps its interface and its address either way, as with a cable that is pulled elsewhere."""
        _ip("-n", self.name, "link", "set", port, state)

    def close(self) -> None:
        """Remove it with its ends of the wires."""
        remove_namespace(self.name)


class Namespace(Wires):
    """A network namespace with a pair of virtual interfaces for each server, and one for the hub if any."""

    kind = "network namespaces"

    def __init__(self, ports: Mapping[Server, int], notes: Path, hub: Hub | None = None) -> None:
        self.name = _new_namespace(notes)
        self._block = secrets.randbelow(250), secrets.randbelow(60) * 4
        self._hosts: dict[Server, str] = {}
        self._hub, self._port = hub, ""
        try:
            _ip("-n", self.name, "link", "set", "lo", "up")
            for number, server in enumerate(ports):
                self._connect(server, number)
            super().__init__(ports)
            if hub is not None:
                self._port, self.address = hub.connect(self.name)
        except BaseException:
            remove_namespace(self.name)
            raise
        self.prefix = (str(shutil.which("nsenter")), f"--net=/run/netns/{self.name}", "--")

    @property
    def reach_each_other(self) -> bool:
        """See `Wires.reach_each_other`."""
        return self._hub is not None

    def has(self, wire: Wire) -> bool:
        """See `Wires.has`."""
        return self._hub is not None if wire == PEERS else super().has(wire)

    def cut(self, wire: Wire) -> None:
        """See `Wires.cut`."""
        self._switch(wire, "down")

    def heal(self, wire: Wire) -> None:
        """See `Wires.heal`."""
        self._switch(wire, "up")

    def close(self) -> None:
        """See `Wires.close`."""
        super().close()
        remove_namespace(self.name)

    def _switch(self, wire: Wire, state: Literal["up", "down"]) -> None:
        if wire != PEERS:
            _ip("link", "set", self._interface(wire), state)
        elif self._hub is not None:
            self._hub.switch(self._port, state)

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


def hub(notes: Path) -> Hub | None:
    """Where nodes meet; None where that is not possible, and where they share the loopback anyway."""
    if _can_have_namespaces():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return Hub(notes)
    return None


def wires(ports: Mapping[Server, int], notes: Path, meeting: Hub | None = None) -> Wires:
    """A node's wires, by namespaces where that works. In `notes` each of them leaves a file with its name."""
    if _can_have_namespaces():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return Namespace(ports, notes, meeting)
    return Wires(ports)


def _can_have_namespaces() -> bool:
    return os.geteuid() == 0 and bool(shutil.which("ip") and shutil.which("nsenter"))


def _new_namespace(notes: Path) -> str:
    name = f"retoma-{secrets.token_hex(3)}"
    notes.mkdir(parents=True, exist_ok=True)
    (notes / name).touch()  # first, so that it is found if we are killed
    _ip("netns", "add", name)
    return name


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
