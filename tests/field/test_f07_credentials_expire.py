"""F7: credentials that expire are fetched anew from the provider chain, once; a refusal is not asked again."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch

from tests.support.bits import bits
from tests.support.s3_proxy import Answer, Asked, Proxy, Verdict
from tests.support.s3_servers import RawBucket
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store.retry import RetryingStore
from training.checkpoint.store.s3 import S3Store
from training.checkpoint.store.s3_client import MIB, S3Client, S3Options
from training.errors import Invalid, Unavailable

pytest_plugins = ["tests.support.s3_fixtures"]
pytestmark = pytest.mark.xdist_group("s3")
SMALL_PARTS = S3Options(part_bytes=5 * MIB, multipart_bytes=8 * MIB, concurrency=2)


class Issuer:
    """Writes a profile's credentials as a side process would, and lets in the newest key only."""

    def __init__(self, file: Path, proxy: Proxy) -> None:
        self.file, self.valid, self.code = file, "", "ExpiredToken"
        self.refused: list[Asked] = []
        self.before: Callable[[Asked], None] = lambda asked: None
        proxy.rule = self._check
        self.renew("first")

    def renew(self, key: str, publish: bool = True) -> None:
        self.valid = key
        if publish:
            self.file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = hushhush\n")

    def _check(self, asked: Asked) -> Verdict:
        self.before(asked)
        used = re.search(r"Credential=([^/]+)/", asked.headers["Authorization"])
        if used is not None and used[1] == self.valid:
            return None
        self.refused.append(asked)
        return Answer(403 if self.code == "RequestExpired" else 400, self.code)


@pytest.fixture
def issuer(moto_proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Issuer:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    return Issuer(tmp_path / "credentials", moto_proxy)


@pytest.fixture
def place(moto_process: object, tmp_path: Path) -> RawBucket:
    return RawBucket(moto_process.client, f"f07/{tmp_path.name.replace('_', '-')}")  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", ["ExpiredToken", "RequestExpired", "InvalidToken", "TokenRefreshRequired"])
def test_credentials_that_expired_before_a_call_are_fetched_anew(
    place: RawBucket, issuer: Issuer, code: str
) -> None:
    store = S3Store(place.url)
    store.put("a", [b"1"])
    issuer.code = code
    calls: list[Callable[[], object]] = [
        lambda: store.put("b", [b"2"]),
        lambda: store.put_if_absent("c", b"3"),
        lambda: store.get("a"),
        lambda: store.exists("a"),
        lambda: store.list(""),
        store.unfinished,
        lambda: store.delete("c"),
    ]
    for number, call in enumerate(calls):
        issuer.renew(f"renewed{number}")
        call()
        assert len(issuer.refused) == number + 1
    assert place.everything() == {"a": b"1", "b": b"2"}


def test_credentials_that_expire_in_the_middle_of_an_upload_cost_no_part_and_no_second_upload(
    place: RawBucket, issuer: Issuer, moto_proxy: Proxy
) -> None:
    def expire_at_part_2(asked: Asked) -> None:
        if "partNumber=2" in asked.query and issuer.valid == "first":
            issuer.renew("second")

    issuer.before = expire_at_part_2
    data = bytes(range(256)) * (14 * MIB // 256)
    S3Store(place.url, SMALL_PARTS).put("big", [data])
    assert place.read("big") == data
    assert place.uploads() == []
    assert len([asked for asked in moto_proxy.asked if asked.query.startswith("uploads")]) == 1


def test_credentials_that_expire_while_the_answer_is_on_its_way_leave_one_object(
    place: RawBucket, issuer: Issuer
) -> None:
    store = S3Store(place.url)
    store.put("a", [b"1"])
    issuer.renew("second")
    store.put("a", [b"1"])  # our own retry: the object is read back with the new credentials
    assert place.everything() == {"a": b"1"}


def test_where_the_chain_has_nothing_newer_it_is_asked_once_and_told(place: RawBucket, issuer: Issuer) -> None:
    store = S3Store(place.url)
    store.put("a", [b"1"])
    issuer.renew("second", publish=False)
    with pytest.raises(Unavailable, match="ExpiredToken") as caught:
        store.get("a")
    assert len(issuer.refused) == 2
    assert caught.value.hint == "renew the credentials"
    issuer.renew("third")
    assert store.get("a") == b"1"


def test_many_threads_whose_credentials_expire_at_once_build_one_new_client(
    place: RawBucket, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    real = S3Client._new

    def new(self: S3Client) -> object:
        built.append(self)
        return real(self)

    monkeypatch.setattr(S3Client, "_new", new)
    store, barrier = S3Store(place.url), Barrier(8)

    def work(number: int) -> None:
        barrier.wait()
        store.put(f"b/{number}", [b"x"])

    store.put("a", [b"1"])
    issuer.renew("second")
    with ThreadPoolExecutor(8) as executor:
        list(executor.map(work, range(8)))
    assert len(built) == 2
    assert len(place.everything()) == 9


@pytest.mark.parametrize("code", ["AccessDenied", "SignatureDoesNotMatch", "AllAccessDisabled"])
def test_a_refusal_is_asked_once_and_is_a_mistake_of_the_configuration(
    place: RawBucket, moto_proxy: Proxy, code: str
) -> None:
    moto_proxy.rule = lambda asked: Answer(403, code)
    store = RetryingStore(S3Store(place.url))
    with pytest.raises(Invalid, match=code) as caught:
        store.put("a", [b"1"])
    assert len(moto_proxy.asked) == 1
    assert "docs/s3.md" in (caught.value.hint or "")


def test_a_run_goes_on_when_its_credentials_expire_at_every_save(place: RawBucket, issuer: Issuer) -> None:
    with IncrementalCheckpointer(RetryingStore(S3Store(place.url))) as checkpointer:
        for step in range(4):
            issuer.renew(f"at{step}")
            checkpointer.save({"w": torch.full((5_000,), float(step))})
            checkpointer.wait()
        assert 3 <= len(issuer.refused) <= 6
        restored = checkpointer.restore()
    assert restored is not None
    assert restored.manifest.sequence == 3
    assert bits(dict(restored)) == bits({"w": torch.full((5_000,), 3.0)})
