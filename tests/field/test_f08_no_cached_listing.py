"""F8: what another process has written is seen at once. Nothing is decided by a cached listing or size."""

from __future__ import annotations

import pytest
import torch
from s3fs import S3FileSystem  # type: ignore[import-untyped]

from tests.support.faults import run_script
from tests.support.s3_servers import BUCKET, RawBucket, S3Server
from training.checkpoint import IncrementalCheckpointer
from training.checkpoint.store import NotFound, ObjectInfo, open_store
from training.errors import Fenced

pytest_plugins = ["tests.support.s3_fixtures"]
pytestmark = pytest.mark.xdist_group("s3")

WRITE = """
import sys
from training.checkpoint.store import open_store
store = open_store(sys.argv[1])
store.put_if_absent("manifests/000001/00000001.json", b"second")
store.delete("manifests/000001/00000000.json")
"""


def test_a_lists_b_writes_a_asks_again(bucket: RawBucket, s3: S3Server) -> None:
    store = open_store(bucket.url)
    store.put_if_absent("manifests/000001/00000000.json", b"first")
    assert store.list("manifests/000001/") == [ObjectInfo("manifests/000001/00000000.json", 5)]
    assert store.list("") == store.list("manifests/")
    assert store.exists("manifests/000001/00000001.json") is False
    with pytest.raises(NotFound):
        store.get("manifests/000001/00000001.json")
    run_script(WRITE, bucket.url)
    for prefix in ("manifests/000001/", "manifests/", ""):
        assert store.list(prefix) == [ObjectInfo("manifests/000001/00000001.json", 6)]
    assert store.exists("manifests/000001/00000001.json") is True
    assert store.get("manifests/000001/00000001.json") == b"second"
    assert store.exists("manifests/000001/00000000.json") is False
    with pytest.raises(NotFound):
        store.read("manifests/000001/00000000.json", 0, 5)


def test_a_size_that_was_seen_before_does_not_cut_a_read_short(bucket: RawBucket, s3: S3Server) -> None:
    """Objects of ours never change. Should somebody have replaced one, then what is read is what is there."""
    store = open_store(bucket.url)
    store.put("a", [b"short"])
    assert (store.get("a"), store.list("")) == (b"short", [ObjectInfo("a", 5)])
    bucket.write("a", b"much longer than before")
    assert store.get("a") == b"much longer than before"
    assert store.read("a", 5, 100) == b"longer than before"
    assert store.list("") == [ObjectInfo("a", 23)]


def test_this_test_would_see_a_cache(bucket: RawBucket, s3: S3Server) -> None:
    """s3fs as it comes does hide what others write."""
    filesystem = S3FileSystem(skip_instance_cache=True)
    bucket.write("m/0", b"x")
    assert len(filesystem.ls(f"{BUCKET}/{bucket.prefix}/m")) == 1
    bucket.write("m/1", b"x")
    assert len(filesystem.ls(f"{BUCKET}/{bucket.prefix}/m")) == 1
    assert len(open_store(bucket.url).list("m/")) == 2


TAKE_OVER = """
import sys, torch
from training.checkpoint import IncrementalCheckpointer
with IncrementalCheckpointer(sys.argv[1]) as checkpointer:
    checkpointer.restore()
    checkpointer.save({"w": torch.full((5000,), 2.0)})
"""


@pytest.mark.parametrize("s3", ["seaweed"], indirect=True)
def test_an_attempt_that_was_taken_over_by_another_process_is_fenced_at_its_next_save(
    bucket: RawBucket, s3: S3Server
) -> None:
    first = IncrementalCheckpointer(open_store(bucket.url))
    first.save({"w": torch.full((5_000,), 1.0)})
    first.wait()
    run_script(TAKE_OVER, bucket.url)
    first.save({"w": torch.full((5_000,), 9.0)})
    with pytest.raises(Fenced):
        first.close()
    with IncrementalCheckpointer(open_store(bucket.url)) as later:
        restored = later.restore()
    assert restored is not None
    assert torch.equal(restored["w"], torch.full((5_000,), 2.0))
