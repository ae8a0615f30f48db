"""What only an S3 store does: parts, conditions, time limits, credentials that stay secret."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import start_script
from tests.support.s3_proxy import Answer, Asked, Proxy, Verdict
from tests.support.s3_servers import BUCKET, SECRET, RawBucket, S3Server, set_aws
from training.checkpoint.store import NoSpace, ObjectInfo, Store, Unfinished, open_store, put_document
from training.checkpoint.store.retry import RetryingStore
from training.checkpoint.store.s3 import S3Store
from training.checkpoint.store.s3_client import MIB, S3Client, S3Options
from training.checkpoint.token import mark_run, prove_put_if_absent
from training.errors import Corrupt, Invalid, RetomaError, Unavailable

pytest_plugins = ["tests.support.s3_fixtures"]
pytestmark = pytest.mark.xdist_group("s3")

only_seaweed = pytest.mark.parametrize("s3", ["seaweed"], indirect=True)
PACK = "packs/000001/00000000-r0000-00.pack"
SMALL_PARTS = S3Options(part_bytes=5 * MIB, multipart_bytes=8 * MIB, concurrency=2)
BIG = os.urandom(13 * MIB)
PIECES = [BIG[: 3 * MIB], BIG[3 * MIB : 3 * MIB + 7], BIG[3 * MIB + 7 :]]


def is_part(asked: Asked, number: int) -> bool:
    return asked.method == "PUT" and f"partNumber={number}" in asked.query


def fail_part(number: int, verdict: Verdict) -> Callable[[Asked], Verdict]:
    return lambda asked: verdict if is_part(asked, number) else None


# --- big objects


def test_an_object_in_parts_holds_exactly_the_bytes_that_were_put(bucket: RawBucket, proxy: Proxy) -> None:
    store = S3Store(bucket.url, SMALL_PARTS)
    store.put(PACK, PIECES)
    assert [is_part(asked, 3) for asked in proxy.asked].count(True) == 1
    assert bucket.read(PACK) == BIG
    assert store.get(PACK) == BIG
    assert store.read(PACK, MIB - 1, 11 * MIB) == BIG[MIB - 1 : 12 * MIB - 1]
    assert store.read(PACK, 12 * MIB, 5 * MIB) == BIG[12 * MIB :]
    assert store.list("") == [ObjectInfo(PACK, len(BIG))]
    assert bucket.uploads() == []


def test_parts_carry_a_checksum_for_the_server_to_verify(bucket: RawBucket, proxy: Proxy) -> None:
    store = S3Store(bucket.url, SMALL_PARTS)
    store.put(PACK, PIECES)
    store.put_if_absent("a", b"x")
    sent = [asked for asked in proxy.asked if asked.method == "PUT"]
    assert len(sent) == 4
    for asked in sent:
        names = {name.lower() for name in asked.headers}
        assert "x-amz-checksum-crc32" in names
        assert "expect" not in names  # what a mute server would be waited for without end


@only_seaweed  # AWS verifies them too; moto does not
def test_bytes_that_change_on_the_way_are_refused_by_the_server(bucket: RawBucket, proxy: Proxy) -> None:
    def flip(asked: Asked) -> Verdict:
        if asked.method == "PUT":
            asked.body = bytes([asked.body[0] ^ 1]) + asked.body[1:]
        return None

    proxy.rule = flip
    store = S3Store(bucket.url, SMALL_PARTS)
    with pytest.raises(Unavailable, match="BadDigest"):
        store.put_if_absent("a", b"x")
    with pytest.raises(Unavailable, match="BadDigest"):
        store.put(PACK, PIECES)
    assert bucket.everything() == {}
    assert bucket.uploads() == []


def test_a_big_object_that_is_there_is_never_overwritten(bucket: RawBucket, s3: S3Server) -> None:
    store = S3Store(bucket.url, SMALL_PARTS)
    bucket.write(PACK, BIG)
    store.put(PACK, PIECES)
    with pytest.raises(Corrupt, match="already holds other bytes"):
        store.put(PACK, [BIG[:-1], b"x" if BIG[-1:] != b"x" else b"y"])
    assert bucket.read(PACK) == BIG
    assert bucket.uploads() == []


def test_a_server_that_knows_no_ranges_is_read_all_the_same(bucket: RawBucket, proxy: Proxy) -> None:
    def ignore(asked: Asked) -> None:
        asked.headers = {name: value for name, value in asked.headers.items() if name.lower() != "range"}

    bucket.write(PACK, BIG)
    proxy.rule = ignore
    store = S3Store(bucket.url, SMALL_PARTS)
    assert store.get(PACK) == BIG
    assert store.read(PACK, 3 * MIB, 7 * MIB) == BIG[3 * MIB : 10 * MIB]
    assert store.exists(PACK)


def test_an_object_that_is_replaced_while_it_is_read_is_not_mixed(bucket: RawBucket, proxy: Proxy) -> None:
    def replace(asked: Asked) -> None:
        if asked.method == "GET" and "bytes=0-" not in asked.headers.get("Range", ""):
            bucket.write(PACK, bytes(len(BIG)))

    bucket.write(PACK, BIG)
    proxy.rule = replace
    with pytest.raises(Unavailable, match="was replaced while it was read"):
        S3Store(bucket.url, SMALL_PARTS).get(PACK)


@pytest.mark.parametrize("verdict", [Answer(503, "SlowDown"), Answer(403, "AccessDenied"), "lose"])
def test_a_part_that_fails_leaves_no_object_and_no_upload(
    bucket: RawBucket, proxy: Proxy, verdict: Verdict
) -> None:
    proxy.rule = fail_part(2, verdict)
    with pytest.raises(RetomaError, match=r"uploading part 2 of packs"):
        S3Store(bucket.url, SMALL_PARTS).put(PACK, PIECES)
    assert bucket.everything() == {}
    assert bucket.uploads() == []


def test_any_exception_in_the_middle_leaves_no_object_and_no_upload(
    bucket: RawBucket, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = S3Client.call

    async def call(self: S3Client, doing: str, *arguments: Any, **more: Any) -> Any:
        if doing.startswith("uploading part 2"):
            raise ZeroDivisionError
        return await real(self, doing, *arguments, **more)

    monkeypatch.setattr(S3Client, "call", call)
    with pytest.raises(ZeroDivisionError):
        S3Store(bucket.url, SMALL_PARTS).put(PACK, PIECES)
    assert bucket.everything() == {}
    assert bucket.uploads() == []


PUT_BIG = """
import signal
import sys
from training.checkpoint.store.s3 import S3Store
from training.checkpoint.store.s3_client import MIB, S3Options
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without it
store = S3Store(sys.argv[1], S3Options(part_bytes=5 * MIB, multipart_bytes=8 * MIB, concurrency=2))
try:
    store.put(sys.argv[2], [bytes(13 * MIB)])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


@only_seaweed
def test_an_interrupt_in_the_middle_leaves_no_object_and_no_upload(bucket: RawBucket, proxy: Proxy) -> None:
    proxy.rule = fail_part(2, "mute")
    process = start_script(PUT_BIG, bucket.url, PACK)
    wait_for(lambda: any(is_part(asked, 2) for asked in proxy.asked))
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out == "interrupted\n"
    assert bucket.everything() == {}
    assert bucket.uploads() == []


def test_a_kill_in_the_middle_leaves_an_upload_that_is_seen_by_nobody_but_the_sweeper(
    bucket: RawBucket, proxy: Proxy
) -> None:
    neighbour = RawBucket(bucket.client, f"{bucket.prefix}-next")
    neighbour.client.create_multipart_upload(Bucket=BUCKET, Key=f"{neighbour.prefix}/{PACK}")
    proxy.rule = fail_part(2, "mute")
    process = start_script(PUT_BIG, bucket.url, PACK)
    wait_for(lambda: any(is_part(asked, 2) for asked in proxy.asked))
    process.kill()
    process.communicate(timeout=30)
    proxy.rule = lambda asked: None
    store = S3Store(bucket.url, SMALL_PARTS)
    assert store.list("") == []
    assert store.exists(PACK) is False
    (left,) = store.unfinished()
    assert (left.key, [left.name]) == (PACK, [upload for _, upload in bucket.uploads()])
    assert left.age_seconds >= 0
    assert left.age_seconds < 60 or proxy.target_name == "moto"  # moto says that all began in 2010
    store.abort(left)
    store.abort(left)
    assert not store.unfinished()
    assert not bucket.uploads()
    assert len(neighbour.uploads()) == 1  # another run's
    store.put(PACK, PIECES)
    store.abort(left)
    assert bucket.read(PACK) == BIG


def test_unfinished_uploads_are_found_on_all_pages(bucket: RawBucket, proxy: Proxy) -> None:
    keys = [f"packs/000001/{number:08d}.pack" for number in range(5)]
    for key in keys:
        bucket.client.create_multipart_upload(Bucket=BUCKET, Key=f"{bucket.prefix}/{key}")

    def two_at_a_time(asked: Asked) -> None:
        if "uploads" in asked.query:
            asked.path += "&max-uploads=2"

    proxy.rule = two_at_a_time
    found = S3Store(bucket.url).unfinished()
    assert sorted(one.key for one in found) == keys
    for one in found:
        S3Store(bucket.url).abort(one)
    assert bucket.uploads() == []


@only_seaweed  # moto answers 500
def test_an_upload_that_a_sweeper_takes_away_fails_and_can_be_begun_again(bucket: RawBucket, proxy: Proxy) -> None:
    store = S3Store(bucket.url, SMALL_PARTS)

    def sweep(asked: Asked) -> None:
        if is_part(asked, 3):
            for one in S3Store(bucket.url).unfinished():
                bucket.client.abort_multipart_upload(
                    Bucket=BUCKET, Key=f"{bucket.prefix}/{one.key}", UploadId=one.name
                )
            proxy.rule = lambda asked: None

    proxy.rule = sweep
    with pytest.raises(Unavailable, match="NoSuchUpload"):
        store.put(PACK, PIECES)
    assert bucket.everything() == {}
    store.put(PACK, PIECES)
    assert bucket.read(PACK) == BIG


# --- listings


@only_seaweed
def test_a_listing_of_more_than_a_page_is_whole(bucket: RawBucket, s3: S3Server) -> None:
    keys = [f"manifests/000001/{number:08d}.json" for number in range(1003)]
    with ThreadPoolExecutor(8) as executor:
        list(executor.map(lambda key: bucket.write(key, b"x"), keys))
    assert S3Store(bucket.url).list("manifests/") == [ObjectInfo(key, 1) for key in keys]


@pytest.mark.parametrize("verdict", [Answer(500, "InternalError"), "lose"])
def test_a_listing_that_breaks_off_is_an_error_and_not_a_shorter_listing(
    bucket: RawBucket, proxy: Proxy, verdict: Verdict
) -> None:
    for number in range(5):
        bucket.write(f"manifests/000001/{number:08d}.json", b"x")

    def break_off(asked: Asked) -> Verdict:
        if "continuation-token" in asked.query:
            return verdict
        if "list-type" in asked.query:
            asked.path += "&max-keys=2"
        return None

    proxy.rule = break_off
    with pytest.raises(Unavailable, match="listing"):
        S3Store(bucket.url).list("manifests/")


# --- conditions


@pytest.mark.parametrize("verdict", ["lose", "drop", Answer(409, "ConditionalRequestConflict")])
def test_after_an_unknown_outcome_our_own_bytes_count_as_ours_and_no_others(
    bucket: RawBucket, proxy: Proxy, verdict: Verdict
) -> None:
    left = 0

    def next_puts(asked: Asked) -> Verdict:
        nonlocal left
        if asked.method != "PUT" or left == 0:
            return None
        left -= 1
        return verdict

    proxy.rule = next_puts
    left = 2  # one for aiohttp, which repeats a PUT on a connection that it has used before
    with contextlib.suppress(Unavailable):
        assert not S3Store(bucket.url).put_if_absent("a", b"ours")
    store = RetryingStore(S3Store(bucket.url), sleep=lambda seconds: None)
    for count in (1, 2):
        left = count
        assert put_document(store, f"b{count}", b"ours")
        left = count
        store.put(f"c{count}", [b"o", b"urs"])
        left = count
        assert put_document(store, f"b{count}", b"theirs") is False
        assert bucket.read(f"b{count}") == bucket.read(f"c{count}") == b"ours"


def test_a_conflict_at_a_key_that_is_taken_is_a_lost_race(bucket: RawBucket, proxy: Proxy) -> None:
    bucket.write("a", b"theirs")
    proxy.rule = lambda asked: Answer(409, "ConditionalRequestConflict") if asked.method == "PUT" else None
    assert S3Store(bucket.url).put_if_absent("a", b"ours") is False
    assert put_document(S3Store(bucket.url), "a", b"ours") is False


def test_a_server_that_ignores_conditions_is_refused_before_anything_is_claimed(
    bucket: RawBucket, proxy: Proxy
) -> None:
    def ignore(asked: Asked) -> None:
        asked.headers = {name: value for name, value in asked.headers.items() if name.lower() != "if-none-match"}

    store = open_store(bucket.url)
    mark_run(store, "r")
    prove_put_if_absent(store, "r")
    proxy.rule = ignore
    with pytest.raises(Invalid, match="does not honour put-if-absent"):
        prove_put_if_absent(store, "r")
    proxy.rule = lambda asked: Answer(501, "NotImplemented") if asked.method == "PUT" else None
    with pytest.raises(Invalid, match="NotImplemented"):
        prove_put_if_absent(store, "r")


CONTEND = """
import sys
from training.checkpoint.store import open_store
store, who = open_store(sys.argv[1]), sys.argv[2]
store.exists("warm-up")
print("ready", flush=True)
sys.stdin.readline()
print(*[n for n in range(2) if store.put_if_absent(f"tokens/{n:06d}.claim.json", who.encode() * 1000)])
"""


@only_seaweed
def test_of_four_processes_exactly_one_wins_each_object(bucket: RawBucket, s3: S3Server) -> None:
    contenders = [start_script(CONTEND, bucket.url, who) for who in range(4)]
    for process in contenders:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in contenders:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    won = [list(map(int, process.communicate(timeout=60)[0].split())) for process in contenders]
    assert sorted(number for numbers in won for number in numbers) == [0, 1]
    for number in range(2):
        (winner,) = [who for who, numbers in enumerate(won) if number in numbers]
        assert bucket.read(f"tokens/{number:06d}.claim.json") == str(winner).encode() * 1000


# --- time


@pytest.fixture
def mute(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server that accepts connections and never answers, nor reads."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        set_aws(monkeypatch, f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield


EVERYTHING: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put(PACK, [b"x"]),
    "put 6 MB": lambda store: store.put(PACK, [bytes(6_000_000)]),
    "put in parts": lambda store: store.put(PACK, PIECES),
    "put_if_absent": lambda store: store.put_if_absent("a", b"x"),
    "get": lambda store: store.get("a"),
    "read": lambda store: store.read("a", 0, 1),
    "read nothing": lambda store: store.read("a", 0, 0),
    "exists": lambda store: store.exists("a"),
    "list": lambda store: store.list(""),
    "delete": lambda store: store.delete("a"),
    "ages": lambda store: store.ages(""),
    "unfinished": lambda store: store.unfinished(),
    "abort": lambda store: store.abort(Unfinished("id", "a", 0)),
}


@pytest.mark.usefixtures("mute")
def test_a_mute_server_holds_no_call_longer_than_its_limit() -> None:
    impatient = S3Options(
        connect_timeout_seconds=1,
        read_timeout_seconds=0.5,
        request_timeout_seconds=1,
        slowest_bytes_per_second=12 * MIB,
        part_bytes=5 * MIB,
        multipart_bytes=8 * MIB,
    )
    store = S3Store(f"s3://{BUCKET}/mute", impatient)

    def timed(call: Callable[[Store], object]) -> float:
        started = time.monotonic()
        with pytest.raises(Unavailable):
            call(store)
        return time.monotonic() - started

    with ThreadPoolExecutor(len(EVERYTHING)) as executor:
        seconds = dict(zip(EVERYTHING, executor.map(timed, EVERYTHING.values()), strict=True))
    assert max(seconds.values()) < 5, seconds


def test_a_refused_connection_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        set_aws(monkeypatch, f"http://127.0.0.1:{closed.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(Unavailable, match="Could not connect"):
            S3Store(f"s3://{BUCKET}/x").list("")
        assert time.monotonic() - started < 5


# --- processes and threads


def _read_in_child(store: Store, answer: Any) -> None:
    answer.send(store.get("a"))


def test_a_forked_child_gets_a_client_of_its_own(bucket: RawBucket, s3: S3Server) -> None:
    store = S3Store(bucket.url)
    store.put_if_absent("a", b"x")  # the loop runs, connections are open
    context = multiprocessing.get_context("fork")
    for _ in range(2):
        reading, writing = context.Pipe(duplex=False)
        child = context.Process(target=_read_in_child, args=(store, writing))
        child.start()
        assert reading.poll(30)
        assert reading.recv() == b"x"
        child.join(30)
        assert child.exitcode == 0
        assert store.get("a") == b"x"


def test_many_threads_share_one_client(bucket: RawBucket, s3: S3Server) -> None:
    store = S3Store(bucket.url)
    with ThreadPoolExecutor(16) as executor:
        list(executor.map(lambda n: store.put(f"p/{n}", [str(n).encode()]), range(64)))
        assert list(executor.map(lambda n: store.get(f"p/{n}"), range(64))) == [str(n).encode() for n in range(64)]
    assert [thread.name for thread in threading.enumerate()].count("retoma-s3") == 1


def test_a_store_that_is_dropped_closes_its_connections_in_whatever_thread_that_happens(moto: S3Server) -> None:
    """The garbage collector runs anywhere, in another library's event loop too: s3fs's own way fails there."""
    store = S3Store(f"s3://{BUCKET}/dropped")
    store.exists("a")
    filesystem = store._client._filesystem
    assert filesystem is not None
    session = filesystem._s3._endpoint.http_session
    gone = weakref.ref(filesystem)
    assert session._sessions
    box = [store]
    del store, filesystem

    async def drop() -> None:
        box.clear()
        gc.collect()

    asyncio.run(drop())
    assert gone() is None
    wait_for(lambda: not session._sessions)


FALL_OFF = """
import sys, threading
from training.checkpoint.store import open_store
store = open_store(sys.argv[1])
def later():
    threading.main_thread().join()
    store.put("a", [b"x"])
threading.Thread(target=later).start()
"""


@only_seaweed
def test_a_script_that_ends_with_a_save_in_flight_still_saves(bucket: RawBucket, s3: S3Server) -> None:
    """By a host name: looking it up needs a thread, which the interpreter does not give any more by then."""
    os.environ["AWS_ENDPOINT_URL_S3"] = s3.url.replace("127.0.0.1", "localhost")
    process = start_script(FALL_OFF, bucket.url)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert bucket.everything() == {"a": b"x"}


def test_a_folder_costs_no_import_of_s3(tmp_path: Path) -> None:
    script = (
        "import sys; from training.checkpoint import open_store; open_store(sys.argv[1]).list('')\n"
        "print([name for name in ('s3fs', 'aiobotocore', 'aiohttp', 'asyncio') if name in sys.modules])"
    )
    process = start_script(script, tmp_path)
    out, _ = process.communicate(timeout=60)
    assert "s3fs" not in out
    assert "aiobotocore" not in out


# --- what went wrong, in words


REFUSALS = [
    (Answer(503, "SlowDown"), Unavailable, "SlowDown"),
    (Answer(500, "InternalError"), Unavailable, "InternalError"),
    (Answer(502, ""), Unavailable, "502"),
    (Answer(429, "TooManyRequests"), Unavailable, "429"),
    (Answer(403, "AccessDenied"), Invalid, "AccessDenied"),
    (Answer(403, "SignatureDoesNotMatch"), Invalid, "SignatureDoesNotMatch"),
    (Answer(403, "RequestTimeTooSkewed"), Invalid, "clock"),
    (Answer(403, "QuotaExceeded"), NoSpace, "full or over its quota"),
    (Answer(507, "InsufficientStorage"), NoSpace, "full or over its quota"),
    (Answer(507, "XMinioStorageFull"), NoSpace, "full or over its quota"),
    (Answer(404, "NoSuchBucket"), Invalid, f"create-bucket --bucket {BUCKET}"),
    (Answer(400, "AuthorizationHeaderMalformed"), Invalid, "RETOMA_S3_REGION"),
    (Answer(400, "InvalidArgument"), Invalid, "InvalidArgument"),
]


@pytest.mark.parametrize(("answer", "kind", "words"), REFUSALS)
def test_a_refusal_is_told_by_kind_and_never_with_a_secret(
    moto_proxy: Proxy,
    caplog: pytest.LogCaptureFixture,
    answer: Answer,
    kind: type[RetomaError],
    words: str,
) -> None:
    caplog.set_level(logging.INFO)
    moto_proxy.rule = lambda asked: answer
    store = S3Store(f"s3://{BUCKET}/refused", SMALL_PARTS)
    for call in EVERYTHING.values():
        with pytest.raises(kind) as caught:
            call(store)
        error: BaseException | None = caught.value
        assert type(error) is kind
        assert words in str(error)
        while error is not None:
            assert SECRET not in f"{error!s} {error!r} {vars(error)}"
            error = error.__cause__
    assert SECRET not in f"{caplog.text} {store!r} {store.url} {open_store(store.url)!r}"


def test_a_quota_in_the_middle_leaves_nothing_under_a_good_name(bucket: RawBucket, proxy: Proxy) -> None:
    proxy.rule = fail_part(3, Answer(403, "QuotaExceeded"))
    with pytest.raises(Unavailable, match="over its quota") as caught:
        S3Store(bucket.url, SMALL_PARTS).put(PACK, PIECES)
    assert "nothing was committed" in (caught.value.hint or "")
    assert bucket.everything() == {}
    assert bucket.uploads() == []


def test_a_bucket_that_is_not_there_is_a_mistake_of_the_configuration(s3: S3Server) -> None:
    store = S3Store("s3://no-such-bucket/x")
    reads = ("get", "read", "exists", "list", "ages", "unfinished")
    for call in (EVERYTHING[name] for name in reads):
        with pytest.raises(Invalid, match="no bucket 'no-such-bucket'") as caught:
            call(store)
        assert caught.value.hint == "aws s3api create-bucket --bucket no-such-bucket"
    with pytest.raises(Invalid):  # SeaweedFS says AccessDenied here
        store.put_if_absent("a", b"x")


@pytest.mark.parametrize(
    "url", [f"s3://key:{SECRET}@bucket/x", f"s3://bucket/x?secret={SECRET}", "s3://B/x", "s3://"]
)
def test_a_url_with_credentials_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(Invalid) as caught:
        open_store(url)
    assert SECRET not in str(caught.value)


def test_an_endpoint_with_a_password_is_refused_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    set_aws(monkeypatch, f"http://key:{SECRET}@127.0.0.1:9")
    with pytest.raises(Invalid, match="holds a password") as caught:
        S3Store("s3://bucket/x").list("")
    assert SECRET not in str(caught.value)


def test_without_credentials_the_error_says_where_they_come_from(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(Invalid, match="Unable to locate credentials"):
        S3Store("s3://bucket/x").list("")
