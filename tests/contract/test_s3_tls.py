"""S3 by https: bodies are framed in another way there, and the server must be who it says it is."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.s3_servers import BUCKET, LOOPBACK, moto_server, set_aws
from training.checkpoint.store import ObjectInfo
from training.checkpoint.store.s3 import S3Store
from training.checkpoint.store.s3_client import MIB, S3Options
from training.errors import Invalid

pytestmark = pytest.mark.xdist_group("s3")


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A key, and a certificate for the loopback address that it has signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "retoma tests")])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(LOOPBACK))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    plain = serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, plain))
    (folder / "cert.pem").write_bytes(certificate.public_bytes(encoding))
    return folder / "key.pem", folder / "cert.pem"


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The certificate of a server, and an environment that leads to it."""
    key, certificate = write_certificate(tmp_path)
    server = moto_server(tmp_path, key, certificate)
    set_aws(monkeypatch, server.url)
    try:
        server.start()
        yield certificate
    finally:
        server.kill()


def test_a_store_behind_tls_holds_what_was_put_and_a_stranger_is_refused(
    secure: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = os.urandom(11 * MIB)
    with pytest.raises(Invalid, match="certificate verify failed") as caught:
        S3Store(f"s3://{BUCKET}/tls").get("a")
    assert "AWS_CA_BUNDLE" in (caught.value.hint or "")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(secure))
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
    store = S3Store(f"s3://{BUCKET}/tls", S3Options(part_bytes=5 * MIB, multipart_bytes=8 * MIB))
    assert store.put_if_absent("a", b"first")
    assert not store.put_if_absent("a", b"second")
    store.put("b", [big[: 6 * MIB], big[6 * MIB :]])
    assert store.get("a") == b"first"
    assert store.get("b") == big
    assert store.list("") == [ObjectInfo("a", 5), ObjectInfo("b", len(big))]
    assert store.unfinished() == []
