"""Real S3 servers for tests, each a process of its own on free ports, and what lies in them."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import pytest
from botocore.config import Config  # type: ignore[import-untyped]

BUCKET = "checkpoints"
SECRET = "hushhush-5d41402abc4b2a76"
LOOPBACK = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class S3Server:
    """A server process. `kill` is a SIGKILL; `start` starts it again, with what is on its disk."""

    def __init__(
        self, name: str, arguments: list[str], port: int, folder: Path, certificate: Path | None = None
    ) -> None:
        self.name, self.url = name, f"{'https' if certificate else 'http'}://{LOOPBACK}:{port}"
        self._arguments, self._port, self._folder, self._certificate = arguments, port, folder, certificate
        self._process: subprocess.Popen[bytes] | None = None
        self.leaves: list[Path] = []  # files outside of the folder

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._arguments, stdout=log, stderr=subprocess.STDOUT, cwd=self._folder, start_new_session=True
            )
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None, f"{self.name} has ended, see {self._folder}"
            assert time.monotonic() < deadline, f"{self.name} does not answer, see {self._folder}"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None
        for left in self.leaves:
            left.unlink(missing_ok=True)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=5)
        if self._certificate:
            trusted = ssl.create_default_context(cafile=str(self._certificate))
            connection = http.client.HTTPSConnection(LOOPBACK, self._port, timeout=5, context=trusted)
        try:
            connection.request("GET", f"/{BUCKET}")
            return connection.getresponse().status < 500
        except OSError:
            return False
        finally:
            connection.close()

    @cached_property
    def client(self) -> Any:
        """boto3's client: around the adapter."""
        config = Config(s3={"addressing_style": "path"}, retries={"max_attempts": 8, "mode": "standard"})
        keys = {"aws_access_key_id": "raw", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=self.url, config=config, **keys)


def moto_server(folder: Path, key: Path | None = None, certificate: Path | None = None) -> S3Server:
    """moto: quick, all in memory, checks no checksum. With a certificate, by https."""
    (port,) = free_ports(1)
    arguments = [sys.executable, "-c", "from moto.server import main; main()", "-H", LOOPBACK, "-p", str(port)]
    if key and certificate:
        arguments += ["-s", "-k", str(key), "-c", str(certificate)]
    return S3Server("moto", arguments, port, folder, certificate)


def seaweed_server(folder: Path) -> S3Server:
    """SeaweedFS: a real server, with a disk."""
    master, master_grpc, volume, volume_grpc, filer, filer_grpc, s3, s3_grpc = free_ports(8)
    (folder / "data").mkdir(exist_ok=True)
    options = {
        "dir": folder / "data",
        "ip": LOOPBACK,
        "ip.bind": LOOPBACK,
        "master.telemetry": "false",
        "master.electionTimeout": "1s",  # 10 by default: so long it would stay away after a kill
        "master.heartbeatInterval": "100ms",
        "master.port": master,
        "master.port.grpc": master_grpc,
        "master.volumeSizeLimitMB": 1024,
        "volume.port": volume,
        "volume.port.grpc": volume_grpc,
        "volume.max": 20,
        "filer": "true",
        "filer.port": filer,
        "filer.port.grpc": filer_grpc,
        "filer.localSocket": folder / "filer.sock",
        "s3": "true",
        "s3.port": s3,
        "s3.port.grpc": s3_grpc,
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.localSocket": folder / "s3.sock",
    }
    weed = Path(sys.executable).parent / "weed"
    # without a folder for its log it leaves files in /tmp
    arguments = [str(weed), f"-logdir={folder}", "server", *(f"-{name}={value}" for name, value in options.items())]
    server = S3Server("seaweed", arguments, s3, folder)
    parts = {"master": master_grpc, "volume": volume_grpc, "filer": filer_grpc, "s3": s3_grpc}
    server.leaves = [Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock") for part, port in parts.items()]  # noqa: S108
    return server


class RawBucket:
    """What lies below a prefix, around the adapter."""

    def __init__(self, client: Any, prefix: str) -> None:
        self.client, self.prefix = client, prefix

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/{self.prefix}"

    def read(self, key: str) -> bytes:
        data: bytes = self.client.get_object(Bucket=BUCKET, Key=f"{self.prefix}/{key}")["Body"].read()
        return data

    def write(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=f"{self.prefix}/{key}", Body=data)

    def everything(self) -> dict[str, bytes]:
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{self.prefix}/")
        keys = [
            entry["Key"].removeprefix(f"{self.prefix}/") for page in pages for entry in page.get("Contents", ())
        ]
        return {key: self.read(key) for key in keys}

    def uploads(self) -> list[tuple[str, str]]:
        """Key and id of every multipart upload that is neither completed nor aborted."""
        found = self.client.list_multipart_uploads(Bucket=BUCKET, Prefix=f"{self.prefix}/").get("Uploads", ())
        return [(entry["Key"].removeprefix(f"{self.prefix}/"), entry["UploadId"]) for entry in found]


def set_aws(patch: pytest.MonkeyPatch, endpoint_url: str) -> None:
    """An environment in which AWS's provider chain leads to this server, and nowhere else."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        patch.delenv(name)
    patch.setenv("AWS_ENDPOINT_URL_S3", endpoint_url)
    patch.setenv("AWS_ACCESS_KEY_ID", "tests")
    patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    patch.setenv("AWS_CONFIG_FILE", os.devnull)
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
