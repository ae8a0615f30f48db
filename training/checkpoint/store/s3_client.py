"""Single requests to an S3 server, each of them bounded in time, with credentials that may expire.

Everything here runs on the background loop. The retry budget is not here: one request is one try.
"""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from training.checkpoint.store.s3_errors import explain, is_expired
from training.checkpoint.store.s3_loop import background_loop
from training.errors import Invalid

if TYPE_CHECKING:
    from s3fs import S3FileSystem  # type: ignore[import-untyped]

T = TypeVar("T")

MIB = 1024 * 1024


@dataclass(frozen=True)
class S3Options:
    """What can be set about an S3 store. Credentials cannot: they come from AWS's provider chain only.

    Attributes:
        endpoint_url: server; default: what AWS_ENDPOINT_URL_S3 or the AWS configuration file says, else AWS.
        region: default: AWS_REGION, AWS_DEFAULT_REGION or the configuration file.
        connect_timeout_seconds: until a connection stands.
        read_timeout_seconds: of silence where an answer is awaited.
        request_timeout_seconds: whole duration of a request without a body.
        slowest_bytes_per_second: a request with a body, either way, may take this much longer.
        part_bytes: size of a part of a big object; at least 5 MiB on AWS.
        multipart_bytes: objects from this size on are uploaded in parts.
        concurrency: parts of one object that are on their way at once.
    """

    endpoint_url: str | None = None
    region: str | None = None
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 20.0
    request_timeout_seconds: float = 30.0
    slowest_bytes_per_second: int = MIB // 2
    part_bytes: int = 16 * MIB
    multipart_bytes: int = 24 * MIB
    concurrency: int = 4


class S3Client:
    """One bucket's client. Rebuilt in a forked child, and when its credentials have expired."""

    def __init__(self, url: str, bucket: str, options: S3Options) -> None:
        self.url, self.bucket, self.options = url, bucket, options
        self._pid = 0
        self._filesystem: S3FileSystem | None = None
        self._ready: S3FileSystem | None = None
        self._abandoned: list[S3FileSystem] = []

    async def call(self, doing: str, key: str | None, method: str, body_bytes: int = 0, **arguments: Any) -> Any:
        """One request without a body in its answer.

        Args:
            doing: what is being done, for the message of an error.
            key: which object, for the message of an error.
            method: botocore's name of the operation.
            body_bytes: size of what is sent.
            arguments: of the operation.

        Raises:
            Unavailable, Invalid, NotFound, or one of the three exceptions of `s3_errors`.
        """

        async def work(filesystem: S3FileSystem) -> Any:
            return await filesystem._call_s3(method, Bucket=self.bucket, **arguments)

        return await self._bounded(doing, key, body_bytes, work)

    async def fetch(self, key: str, expected_bytes: int, **arguments: Any) -> tuple[bytes, dict[str, Any]]:
        """One GET with its body: at most `expected_bytes`, as far as time is concerned."""

        async def work(filesystem: S3FileSystem) -> tuple[bytes, dict[str, Any]]:
            answer = await filesystem._call_s3("get_object", Bucket=self.bucket, **arguments)
            async with answer["Body"] as body:
                return await body.read(), answer

        return await self._bounded("reading", key, expected_bytes, work)

    async def _bounded(
        self, doing: str, key: str | None, body_bytes: int, work: Callable[[S3FileSystem], Awaitable[T]]
    ) -> T:
        """Do it within its time. Expired credentials are fetched anew once, and then it is done again."""
        seconds = self.options.request_timeout_seconds + body_bytes / self.options.slowest_bytes_per_second
        for last in (False, True):
            filesystem = None
            try:
                async with asyncio.timeout(seconds):
                    filesystem = await self._current()
                    return await work(filesystem)
            except TimeoutError as error:
                message = f"no end after {seconds:.1f} seconds" if str(error) == "" else str(error)
                raise explain(TimeoutError(message), doing, self.url, self.bucket, key) from error
            except Exception as error:
                if last or not is_expired(error):
                    raise explain(error, doing, self.url, self.bucket, key) from error
            if self._filesystem is filesystem:  # else another request has been quicker
                self._filesystem = None
        raise AssertionError("unreachable")

    async def _current(self) -> S3FileSystem:
        if self._pid != os.getpid():
            if self._filesystem is not None:  # sockets that the parent goes on using: never close them here
                self._abandoned.append(self._filesystem)
            self._pid, self._filesystem = os.getpid(), None
        if self._filesystem is None:
            self._filesystem = self._new()
        filesystem = self._filesystem
        client = await filesystem.set_session()
        if "@" in urlsplit(client.meta.endpoint_url).netloc:
            self._filesystem = None
            raise Invalid("the endpoint's URL holds a password", hint="give credentials by AWS's provider chain")
        if self._ready is not filesystem:
            self._ready = filesystem
            self._prepare(filesystem, client)
        return filesystem

    @staticmethod
    def _prepare(filesystem: S3FileSystem, client: Any) -> None:
        from botocore.handlers import add_expect_header  # type: ignore[import-untyped]

        # A server that accepts a PUT and stays silent would hold it for ever: botocore's read timeout does not
        # count while "100 Continue" is awaited.
        client.meta.events.unregister("before-call.s3", add_expect_header)
        # s3fs would close its connections in whatever event loop the garbage collector happens to run.
        weakref.finalize(filesystem, _close, os.getpid(), background_loop(), filesystem._s3creator)

    def _new(self) -> S3FileSystem:
        from aiobotocore.session import AioSession  # type: ignore[import-untyped]
        from s3fs import S3FileSystem

        session = AioSession()
        session.register_component("data_loader", _models())
        options = self.options
        config: dict[str, Any] = {
            "connect_timeout": options.connect_timeout_seconds,
            "read_timeout": options.read_timeout_seconds,
            "retries": {"total_max_attempts": 1},
            "max_pool_connections": 64,
            "request_checksum_calculation": "when_supported",
            "response_checksum_validation": "when_required",  # every byte is checked against the manifest anyway
        }
        if options.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL"):
            config["s3"] = {"addressing_style": "path"}  # few servers have a name for each bucket
        region = options.region or os.environ.get("AWS_REGION") or None
        filesystem = S3FileSystem(
            asynchronous=True,
            skip_instance_cache=True,
            use_listings_cache=False,
            endpoint_url=options.endpoint_url,
            session=session,
            client_kwargs={"region_name": region} if region else {},
            config_kwargs=config,
        )
        filesystem.retries = 1
        return filesystem


def _close(pid: int, loop: asyncio.AbstractEventLoop, creator: Any) -> None:
    """Close the connections, once nobody uses the client; when the process ends, too."""
    if pid == os.getpid() and loop.is_running():
        asyncio.run_coroutine_threadsafe(creator.__aexit__(None, None, None), loop)


@functools.cache
def _models() -> Any:
    """botocore's descriptions of the service. Reading them is nine tenths of the time that a client takes."""
    from aiobotocore.session import AioSession

    return AioSession().get_component("data_loader")


def server_time(answer: dict[str, Any]) -> datetime:
    """The Date of the answer. Any HTTP server sends one, to the second like the times in listings."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if not date:
        raise Invalid("the server's answers carry no Date: ages of objects cannot be known")
    return parsedate_to_datetime(date)


def age_seconds(now: datetime, then: datetime) -> float:
    """From one of the server's times to another, never below zero."""
    return max(0.0, (now - then).total_seconds())
