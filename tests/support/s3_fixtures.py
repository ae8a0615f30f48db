"""S3 servers as fixtures: `pytest_plugins = ["tests.support.s3_fixtures"]` in a test module.

Mark the tests `xdist_group("s3")`, so that one worker starts each server once.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.support.s3_proxy import Proxy
from tests.support.s3_servers import BUCKET, RawBucket, S3Server, moto_server, seaweed_server, set_aws


def _running(server: S3Server) -> Iterator[S3Server]:
    try:
        server.start()
        server.client.create_bucket(Bucket=BUCKET)
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def moto_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from _running(moto_server(tmp_path_factory.mktemp("moto")))


@pytest.fixture(scope="session")
def seaweed_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    yield from _running(seaweed_server(tmp_path_factory.mktemp("seaweed")))


@pytest.fixture(params=["moto", "seaweed"])
def s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Each of the servers, with an environment that leads to it."""
    server: S3Server = request.getfixturevalue(f"{request.param}_process")
    set_aws(monkeypatch, server.url)
    return server


@pytest.fixture
def moto(moto_process: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """moto, where the server makes no difference."""
    set_aws(monkeypatch, moto_process.url)
    return moto_process


@pytest.fixture
def bucket(s3: S3Server) -> RawBucket:
    """A place of one's own on it."""
    return RawBucket(s3.client, f"runs/{uuid.uuid4().hex}")


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before the server, and an environment that leads to it."""
    yield from _proxy(s3, monkeypatch)


@pytest.fixture
def moto_proxy(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy before moto, where the server makes no difference."""
    yield from _proxy(moto, monkeypatch)


def _proxy(server: S3Server, patch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    one = Proxy(server)
    set_aws(patch, one.url)
    yield one
    one.close()
