"""Compaction, verification, pins and collection on real S3 servers, dangling multipart uploads included."""

from __future__ import annotations

import pytest

from tests.support.chains import Chains, names
from tests.support.s3_servers import BUCKET, RawBucket
from training.checkpoint.care.collect import collect
from training.checkpoint.care.compact import compact
from training.checkpoint.care.pins import pin
from training.checkpoint.care.verify import verify
from training.checkpoint.store import open_store

pytest_plugins = ["tests.support.s3_fixtures"]
pytestmark = pytest.mark.xdist_group("s3")


def test_a_chain_is_compacted_verified_pinned_and_collected_in_a_bucket(bucket: RawBucket) -> None:
    chains = Chains(open_store(bucket.url))
    chains.attempt("bdbddd")
    assert compact(chains.store, 1, 5).written
    pin(chains.store, 1, 1)
    chains.attempt("dd")
    key = f"{bucket.prefix}/packs/000001/00000006-r0000-00.pack"
    bucket.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    assert len(bucket.uploads()) == 1
    report = verify(chains.store, data=True)
    assert {problem.severity for problem in report.problems} == {"garbage"}, "the dangling upload"
    assert report.intact

    kept = collect(chains.store, keep=1, grace_seconds=3600.0)
    assert (kept.collected, kept.freed_bytes) == ((), 0)
    collect(chains.store, keep=1, grace_seconds=-60.0)  # moto says that every upload was begun in 2010
    assert bucket.uploads() == []
    assert chains.restorable() == [*names(1, (0, 1, 5)), *names(2, (6, 7))]
    collect(chains.store, keep=1, grace_seconds=-60.0)
    assert verify(chains.store, data=True).problems == ()
    chains.attempt("d")
    assert chains.restores((3, 8))
