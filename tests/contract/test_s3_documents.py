"""The policies that are shipped for a bucket: servers take them, and they hit the keys that are written."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from tests.support.s3_servers import BUCKET, S3Server
from training.checkpoint.care.pins import pin_key
from training.checkpoint.collected import collected_key
from training.checkpoint.manifest import PackName, manifest_key, pack_key, rebased_key
from training.checkpoint.token import MARKER_KEY, claim_key, seal_key

pytest_plugins = ["tests.support.s3_fixtures"]
FOLDER = Path(__file__).parents[2] / "infra/s3"
DOCUMENTS = [MARKER_KEY, claim_key(3), seal_key(1_000_000), manifest_key(3, 41), rebased_key(3, 41)]
DOCUMENTS += [pin_key(3, 41), collected_key(3)]
PACKS = [pack_key(3, 41, 0), pack_key(3, 41, 7, rank=2), PackName(3, 41, nonce="1f2e3d4c").key(0)]


def policy(name: str, bucket: str = BUCKET) -> dict[str, Any]:
    text = (FOLDER / name).read_text().replace("BUCKET", bucket).replace("PREFIX", "runs")
    found: dict[str, Any] = json.loads(text)
    return found


def test_the_bucket_policy_denies_writes_without_a_condition_and_nothing_else() -> None:
    document = policy("bucket-policy.json")
    (statement,) = document["Statement"]
    assert document["Version"] == "2012-10-17"
    assert (statement["Effect"], statement["Principal"], statement["Action"]) == ("Deny", "*", "s3:PutObject")
    assert statement["Condition"] == {"Null": {"s3:if-none-match": "true"}}


@pytest.mark.parametrize("prefix", ["run-1", "team/project/run-1"])
def test_the_bucket_policy_hits_every_document_and_no_pack(prefix: str) -> None:
    """Packs that go up in parts cannot be conditional before their end; those of a rebased form are among them."""
    (statement,) = policy("bucket-policy.json")["Statement"]

    def hit(key: str) -> bool:
        return any(fnmatchcase(f"arn:aws:s3:::{BUCKET}/{prefix}/{key}", glob) for glob in statement["Resource"])

    assert [key for key in DOCUMENTS if not hit(key)] == []
    assert [key for key in PACKS if hit(key)] == []
    assert not hit("other/file.json")


def test_the_rights_are_those_of_the_requests_that_the_store_makes() -> None:
    bucket, objects = policy("iam-policy.json")["Statement"]
    assert bucket["Resource"] == f"arn:aws:s3:::{BUCKET}"
    assert objects["Resource"] == f"arn:aws:s3:::{BUCKET}/runs/*"
    assert {bucket["Effect"], objects["Effect"]} == {"Allow"}
    assert set(bucket["Action"]) == {"s3:ListBucket", "s3:ListBucketMultipartUploads"}
    assert set(objects["Action"]) == {"s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"}


@pytest.mark.xdist_group("s3")
def test_servers_take_the_documents(s3: S3Server) -> None:
    """Neither of them knows the condition of the policy, so that it would refuse every write: AWS only."""
    s3.client.create_bucket(Bucket="policies")
    lifecycle = json.loads((FOLDER / "lifecycle.json").read_text())
    s3.client.put_bucket_lifecycle_configuration(Bucket="policies", LifecycleConfiguration=lifecycle)
    (rule,) = s3.client.get_bucket_lifecycle_configuration(Bucket="policies")["Rules"]
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
    assert rule["Status"] == "Enabled"
    s3.client.put_bucket_policy(Bucket="policies", Policy=json.dumps(policy("bucket-policy.json", "policies")))
