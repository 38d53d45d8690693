"""S3 over https: what protects a body on its way, who trusts whom, and the way out for buckets that want more."""

from __future__ import annotations

import ssl
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed (extra s3)")
pytest.importorskip("obstore", reason="obstore is not installed (extra fast)")
pytest.importorskip("cryptography", reason="cryptography is not installed; `make test` installs it")

from spotsafe.errors import StorageRefused
from spotsafe.storage.fast import FastS3Store
from spotsafe.storage.parts import PART
from spotsafe.storage.s3 import S3Store
from spotsafe.storage.store import Store
from spotsafe.testing.stores import ODD_NAMES, StoreConformance, pattern_bytes, read_all
from tests.servers import KEY, SECRET, Server, certificate
from tests.storage.evil_server import Asked, EvilServer, serving

pytestmark = pytest.mark.slow
BOTH = pytest.mark.parametrize("kind", [FastS3Store, S3Store])
UNSIGNED, SHA256_OF = "UNSIGNED-PAYLOAD", "x-amz-content-sha256"


@pytest.fixture
def trusted(seaweedfs_tls: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server over https, found and trusted as a user's own would be: by the environment alone."""
    for name, value in seaweedfs_tls.env.items():
        monkeypatch.setenv(name, value)
    return seaweedfs_tls


class TestBySeaweedFS(StoreConformance):
    """The suite over https, whatever is larger than nothing by obstore."""

    races = 4  # writers of one key wait for each other, for seconds

    @pytest.fixture
    def store(self, trusted: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(FastS3Store, "_is_large", lambda _self, size: size > 0)
        return FastS3Store(trusted.url(f"{uuid.uuid4().hex}/run"))

    # SeaweedFS takes a backslash in a key for a slash.
    @pytest.mark.parametrize("name", [name for name in ODD_NAMES if "\\" not in name])
    def test_odd_names(self, store: Store, name: str) -> None:
        super().test_odd_names(store, name)


@BOTH
def test_a_large_object(trusted: Server, kind: type[S3Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every byte arrives, and by obstore the server keeps the checksum that it compared."""
    if kind is FastS3Store:
        monkeypatch.setattr(S3Store, "_upload_parts", lambda *_: pytest.fail("boto3 wrote it"))
    store, data = kind(trusted.url(uuid.uuid4().hex)), pattern_bytes(2 * PART + 7)
    store.put_large("big", memoryview(data))
    assert read_all(store, "big") == data
    if kind is FastS3Store:
        said = store._bucket.call("head_object", Key=store._key("big"), ChecksumMode="ENABLED")
        assert said["ChecksumCRC64NVME"]


@BOTH
def test_a_certificate_that_nobody_trusts(
    trusted: Server, kind: type[S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is sent to a server that may be another; the error is of the certificate and of nothing else."""
    monkeypatch.delenv("AWS_CA_BUNDLE")
    store = kind(trusted.url("run"))
    with pytest.raises(StorageRefused, match="certificate verify failed") as caught:
        store.put_large("big", memoryview(bytes(PART + 1)))
    assert "signed bodies" not in str(caught.value)


# -- what is said of a body


@pytest.fixture
def evil(tmp_path: Path) -> Iterator[EvilServer]:
    """A server over https whose `answer` a test sets."""
    found, key = certificate(tmp_path)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(found, key)
    with serving(lambda asked: asked.say(500), tls=tls) as server:
        yield server


def on(evil: EvilServer, kind: type[S3Store], trusted: Path) -> S3Store:
    return kind(
        "s3://bucket/run",
        endpoint_url=evil.url,
        verify=str(trusted),
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )


def taking(heads: list[dict[str, str]]) -> Callable[[Asked], None]:
    """Takes uploads, shows no object before, and keeps the headers of parts."""

    def answer(asked: Asked) -> None:
        headers = {name.lower(): value for name, value in asked.headers.items()}
        if asked.command == "HEAD":
            asked.say(404)
        elif asked.command == "POST" and "uploads" in asked.query:
            body = b"<UploadId>u</UploadId><Bucket>bucket</Bucket><Key>run/big</Key>"
            asked.say(200, b"<InitiateMultipartUploadResult>%b</InitiateMultipartUploadResult>" % body)
        elif asked.command == "POST":
            body = b"<Location>l</Location><Bucket>b</Bucket><Key>k</Key><ETag>e</ETag>"
            asked.say(200, b"<CompleteMultipartUploadResult>%b</CompleteMultipartUploadResult>" % body)
        else:
            heads.append(headers)
            asked.say(200, ETag='"e"')

    return answer


@BOTH
@pytest.mark.parametrize("wanted", [False, True])
def test_a_body_is_signed_exactly_where_the_user_asks_for_it(
    evil: EvilServer, tmp_path: Path, kind: type[S3Store], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS it has a CRC; with `payload_signing_enabled` the signature holds its SHA-256."""
    config = tmp_path / "config"
    config.write_text("[default]\ns3 =\n  payload_signing_enabled = true\n" if wanted else "[default]\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    heads: list[dict[str, str]] = []
    evil.answer = taking(heads)
    on(evil, kind, tmp_path / "certificate.pem").put_large("big", memoryview(bytes(PART + 1)))
    assert len(heads) == 2
    for head in heads:
        assert (head[SHA256_OF] == UNSIGNED) is not wanted
        if not wanted:
            assert head.get("x-amz-checksum-crc64nvme") or head.get("x-amz-checksum-crc32")


@BOTH
def test_no_checksum_for_servers_that_know_none(
    evil: EvilServer, tmp_path: Path, kind: type[S3Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`when_required` is said for servers that refuse them: TLS alone protects the body then."""
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    heads: list[dict[str, str]] = []
    evil.answer = taking(heads)
    on(evil, kind, tmp_path / "certificate.pem").put_large("big", memoryview(bytes(PART + 1)))
    assert [name for head in heads for name in head if name.startswith("x-amz-checksum")] == []


@BOTH
def test_a_policy_that_asks_for_signed_bodies(evil: EvilServer, tmp_path: Path, kind: type[S3Store]) -> None:
    """The server says only that it refuses; the error says what may be asked for, and where to give it."""

    def refusing(asked: Asked) -> None:
        status = 404 if asked.command == "HEAD" else 403
        asked.say(status, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")

    evil.answer = refusing
    with pytest.raises(StorageRefused, match="payload_signing_enabled = true") as caught:
        on(evil, kind, tmp_path / "certificate.pem").put_large("big", memoryview(bytes(PART + 1)))
    assert caught.value.path == "big"
