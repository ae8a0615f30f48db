"""A store in a bucket. An object appears whole under its key, or not at all; a put-if-absent has one winner.

Small objects are a single PUT with `If-None-Match: *`. Big ones, which only packs are, are uploaded in parts:
their keys are unique, so that the look before the upload is enough, and whatever goes wrong aborts the upload.
"""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, NamedTuple

from training.checkpoint.store.base import (
    Aged,
    Buffer,
    NotFound,
    ObjectInfo,
    Unfinished,
    check_key,
    check_prefix,
)
from training.checkpoint.store.s3_client import S3Client, S3Options, age_seconds, server_time
from training.checkpoint.store.s3_errors import ConditionFailed, Conflict, OutOfRange, UploadGone
from training.checkpoint.store.s3_loop import all_of, run
from training.errors import Corrupt, Invalid, RetomaError, Unavailable

_URL = re.compile(r"s3://([a-z0-9][a-z0-9.\-]{1,61}[a-z0-9])(?:/([^?#@\\\x00-\x20]*))?")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]+)-([0-9]+)/([0-9]+)")


class _Piece(NamedTuple):
    """What one GET brought."""

    data: bytes
    total_bytes: int
    etag: str


class S3Store:
    """Objects of a bucket below a prefix. For threads: calls may come from many at once.

    Args:
        url: `s3://bucket/prefix`. Credentials in it are refused.
        options: endpoint, region, timeouts and sizes.
    """

    def __init__(self, url: str, options: S3Options | None = None) -> None:
        match = _URL.fullmatch(url.rstrip("/"))
        if match is None or "//" in (match[2] or ""):
            raise Invalid("the store's URL must be s3://bucket/prefix, without credentials or a query")
        bucket, prefix = match[1], match[2] or ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self.options = options or S3Options()
        self._prefix = f"{prefix}/" if prefix else ""
        self._client = S3Client(self.url, bucket, self.options)

    def __repr__(self) -> str:
        return f"S3Store({self.url!r})"

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """See `Store.put`."""
        views = [memoryview(part).cast("B") for part in parts]
        run(self._put(check_key(key), views))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """See `Store.put_if_absent`."""
        return run(self._create(check_key(key), bytes(data)))

    def get(self, key: str) -> bytes:
        """See `Store.get`."""
        return run(self._range(check_key(key), 0, None))

    def read(self, key: str, offset: int, length: int) -> bytes:
        """See `Store.read`."""
        return run(self._range(check_key(key), offset, offset + length))

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        return run(self._exists(check_key(key)))

    def list(self, prefix: str) -> list[ObjectInfo]:
        """See `Store.list`."""
        return run(self._list(check_prefix(prefix)))

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        run(self._delete(check_key(key)))

    def ages(self, prefix: str) -> builtins.list[Aged]:
        """See `Store.ages`."""
        return run(self._ages(check_prefix(prefix)))

    def unfinished(self) -> builtins.list[Unfinished]:
        """See `Store.unfinished`: multipart uploads."""
        return run(self._unfinished())

    def abort(self, unfinished: Unfinished) -> None:
        """See `Store.abort`."""
        run(self._abort(check_key(unfinished.key), unfinished.name))

    # --- writing

    async def _put(self, key: str, views: Sequence[memoryview]) -> None:
        if sum(view.nbytes for view in views) < self.options.multipart_bytes:
            written = await self._create(key, b"".join(views))
        else:
            written = not await self._exists(key) and await self._upload(key, views)
        if not written and await self._range(key, 0, None) != b"".join(views):
            raise Corrupt(f"{key} already holds other bytes", key=key)

    async def _create(self, key: str, data: bytes) -> bool:
        try:
            await self._client.call(
                "writing", key, "put_object", len(data), Key=self._prefix + key, Body=data, IfNoneMatch="*"
            )
        except ConditionFailed:
            return False
        except Conflict as conflict:
            if await self._exists(key):
                return False
            # Neither written nor lost for certain. Asking again settles it.
            raise Unavailable(f"writing {key} in {self.url}: {conflict}", key=key) from conflict
        return True

    async def _upload(self, key: str, views: Sequence[memoryview]) -> bool:
        """In parts. Returns False if there was an object by the time of the end, where the server looks."""
        name = self._prefix + key
        begun = await self._client.call("beginning an upload of", key, "create_multipart_upload", Key=name)
        try:
            finished = await self._upload_parts(key, begun["UploadId"], views)
            await self._client.call(
                "finishing the upload of",
                key,
                "complete_multipart_upload",
                sum(view.nbytes for view in views),
                Key=name,
                UploadId=begun["UploadId"],
                MultipartUpload={"Parts": finished},
                IfNoneMatch="*",
            )
        except BaseException as error:  # also an interrupt: no part may be left, and no object ever appear
            with contextlib.suppress(RetomaError):  # the server is away: `unfinished` will find it later
                await self._abort(key, begun["UploadId"])
            if isinstance(error, ConditionFailed):
                return False
            if isinstance(error, UploadGone):  # a sweeper took it for one of a dead writer
                raise Unavailable(str(error), key=key) from error
            raise
        return True

    async def _upload_parts(self, key: str, upload: str, views: Sequence[memoryview]) -> builtins.list[Any]:
        numbered = enumerate(_slices(views, self.options.part_bytes), start=1)
        finished: dict[int, dict[str, Any]] = {}

        async def work() -> None:
            for number, pieces in numbered:  # shared: each worker takes the next part when it has time
                body = b"".join(pieces)
                answer = await self._client.call(
                    f"uploading part {number} of",
                    key,
                    "upload_part",
                    len(body),
                    Key=self._prefix + key,
                    UploadId=upload,
                    PartNumber=number,
                    Body=body,
                )
                sums = {name: value for name, value in answer.items() if re.fullmatch("Checksum[A-Z0-9]+", name)}
                finished[number] = {"PartNumber": number, "ETag": answer["ETag"], **sums}

        await all_of(work() for _ in range(self.options.concurrency))
        return [finished[number] for number in sorted(finished)]

    async def _delete(self, key: str) -> None:
        try:
            await self._client.call("deleting", key, "delete_object", Key=self._prefix + key)
        except NotFound:
            return

    async def _abort(self, key: str, upload: str) -> None:
        try:
            await self._client.call(
                "aborting the upload of", key, "abort_multipart_upload", Key=self._prefix + key, UploadId=upload
            )
        except (NotFound, UploadGone):
            return

    # --- reading

    async def _exists(self, key: str) -> bool:
        """Asks for one byte. Not HEAD: its errors have no text, a missing bucket would look like a missing key."""
        try:
            await self._fetch(key, 0, 1)
        except NotFound:
            return False
        except OutOfRange:
            return True  # it is there, and empty
        return True

    async def _range(self, key: str, start: int, stop: int | None) -> bytes:
        """Bytes from `start` to `stop` or the end: a first piece, which tells the size, then the rest at once."""
        step = self.options.part_bytes
        if stop is not None and stop <= start:
            if not await self._exists(key):
                raise NotFound(f"no object {key} in {self.url}", key=key)
            return b""
        try:
            first = await self._fetch(key, start, start + step if stop is None else min(stop, start + step))
        except OutOfRange:
            return b""
        end = first.total_bytes if stop is None else min(stop, first.total_bytes)
        pieces = {start: first.data}
        offsets = iter(range(start + len(first.data), end, step))

        async def work() -> None:
            for offset in offsets:
                pieces[offset] = (await self._fetch(key, offset, min(end, offset + step), first.etag)).data

        await all_of(work() for _ in range(self.options.concurrency))
        return b"".join(pieces[offset] for offset in sorted(pieces)) if len(pieces) > 1 else first.data

    async def _fetch(self, key: str, start: int, stop: int, etag: str = "") -> _Piece:
        condition = {"IfMatch": etag} if etag else {}
        try:
            data, answer = await self._client.fetch(
                key, stop - start, Key=self._prefix + key, Range=f"bytes={start}-{stop - 1}", **condition
            )
        except ConditionFailed as error:
            raise Unavailable(f"{key} in {self.url} was replaced while it was read", key=key) from error
        told = answer.get("ContentRange")
        if not told:  # a server that does not know ranges sends everything
            return _Piece(data[start:stop], len(data), str(answer.get("ETag") or ""))
        match = _CONTENT_RANGE.fullmatch(told)
        if match is None or int(match[1]) != start or len(data) != min(stop, int(match[3])) - start:
            raise Unavailable(f"reading {key} in {self.url}: the answer was cut short", key=key)
        return _Piece(data, int(match[3]), str(answer.get("ETag") or ""))

    # --- listing

    async def _list(self, prefix: str) -> builtins.list[ObjectInfo]:
        pages = self._pages("list_objects_v2", ["ContinuationToken"], prefix)
        return sorted([ObjectInfo(key, e["Size"]) async for page in pages for key, e in self._entries(page)])

    async def _ages(self, prefix: str) -> builtins.list[Aged]:
        found = []
        async for page in self._pages("list_objects_v2", ["ContinuationToken"], prefix):
            now = server_time(page)
            found += [Aged(key, e["Size"], age_seconds(now, e["LastModified"])) for key, e in self._entries(page)]
        return sorted(found)

    def _entries(self, page: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for entry in page.get("Contents", ()):
            key = entry["Key"][len(self._prefix) :]
            if not key.endswith("/"):  # a console's idea of a folder
                yield key, entry

    async def _unfinished(self) -> builtins.list[Unfinished]:
        found = []
        async for answer in self._pages("list_multipart_uploads", ["KeyMarker", "UploadIdMarker"], ""):
            now = server_time(answer)
            for entry in answer.get("Uploads", ()):
                if entry["Key"].startswith(self._prefix):
                    key = entry["Key"][len(self._prefix) :]
                    found.append(Unfinished(entry["UploadId"], key, age_seconds(now, entry["Initiated"])))
        return sorted(found)

    async def _pages(self, method: str, markers: Sequence[str], prefix: str) -> AsyncIterator[dict[str, Any]]:
        """All pages of a listing. One that breaks off is an error, never a shorter listing."""
        following: dict[str, Any] = {}
        while True:
            answer = await self._client.call("listing", None, method, Prefix=self._prefix + prefix, **following)
            yield answer
            if not answer.get("IsTruncated"):
                return
            before = following
            following = {name: answer[f"Next{name}"] for name in markers if answer.get(f"Next{name}")}
            if not following or following == before:
                raise Unavailable(f"listing {self.url}: the server gave a part of it, and no way to the rest")


def _slices(views: Sequence[memoryview], size: int) -> Iterator[builtins.list[memoryview]]:
    """The concatenation of `views`, cut every `size` bytes, without copying any."""
    piece: builtins.list[memoryview] = []
    room = size
    for view in views:
        start = 0
        while start < view.nbytes:
            piece.append(view[start : start + room])
            start, room = start + piece[-1].nbytes, room - piece[-1].nbytes
            if not room:
                yield piece
                piece, room = [], size
    if piece:
        yield piece
