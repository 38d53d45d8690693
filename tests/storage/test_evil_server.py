"""What a broken or evil server can make a client do has an end, and an error that says what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed (extra s3)")
pytest.importorskip("s3fs", reason="s3fs is not installed (extra s3)")

from spotsafe.errors import StorageError, StorageUnavailable
from spotsafe.storage import connection, listing
from spotsafe.storage.remote import FsspecStore
from spotsafe.storage.s3 import S3Store
from spotsafe.storage.store import Store
from tests.storage.evil_server import Asked, EvilServer, serving
from tests.storage.test_servers import botocore_session

pytestmark = pytest.mark.slow
LIST, UPLOADS = "ListBucketResult", "ListMultipartUploadsResult"


@pytest.fixture
def evil() -> Iterator[EvilServer]:
    """A server whose `answer` a test sets."""
    with serving(lambda asked: asked.say(500)) as found:
        yield found


def by_boto3(evil: EvilServer) -> Store:
    return S3Store(
        "s3://bucket/run",
        endpoint_url=evil.url,
        aws_access_key_id="k",
        aws_secret_access_key="s",
        region_name="us-east-1",
    )


def by_s3fs(evil: EvilServer) -> FsspecStore:
    return FsspecStore(
        "s3://bucket/run",
        endpoint_url=evil.url,
        key="k",
        secret="s",
        client_kwargs={"region_name": "us-east-1"},
        session=botocore_session(),
    )


def leading(key: str) -> Callable[[Asked], None]:
    """Pages that all lead to the same place, or to none."""

    def answer(asked: Asked) -> None:
        if "uploads" in asked.query:
            more = f"<NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>{key}</NextUploadIdMarker>"
            kind = UPLOADS
        else:
            more, kind = f"<NextContinuationToken>{key}</NextContinuationToken>", LIST
        asked.say(200, f"<{kind}><IsTruncated>true</IsTruncated>{more if key else ''}</{kind}>".encode())

    return answer


def ever_new(member: str) -> Callable[[Asked], None]:
    """Pages that lead on and on, each with a name."""

    def answer(asked: Asked) -> None:
        key = f"run/{asked.evil.requests:09d}"
        body = {
            LIST: f"<Contents><Key>{key}</Key><Size>1</Size></Contents>"
            f"<NextContinuationToken>{key}</NextContinuationToken>",
            UPLOADS: f"<Upload><Key>{key}</Key><UploadId>1</UploadId></Upload>"
            f"<NextKeyMarker>{key}</NextKeyMarker><NextUploadIdMarker>1</NextUploadIdMarker>",
        }[member]
        asked.say(200, f"<{member}><IsTruncated>true</IsTruncated>{body}</{member}>".encode())

    return answer


LISTINGS: dict[str, Callable[[Any], object]] = {
    "list": lambda store: store.list(""),
    "names": lambda store: store.names("checkpoints"),
    "begun": lambda store: store.begun(""),
    "abort_uploads": lambda store: store.abort_uploads("checkpoints"),
}


@pytest.mark.parametrize(
    ("make", "call"),
    [*((by_boto3, call) for call in LISTINGS), *((by_s3fs, call) for call in ("begun", "abort_uploads"))],
)
@pytest.mark.parametrize(("key", "reason"), [("", "not where"), ("x", "leads back")])
def test_pages_that_do_not_lead_on(
    evil: EvilServer, make: Callable[[EvilServer], Store], call: str, key: str, reason: str
) -> None:
    """One request more than there are pages, and no object is taken for the whole list.

    Of s3fs we follow the pages of uploads only; the others it follows itself.
    """
    evil.answer = leading(key)
    with pytest.raises(StorageError, match=reason):
        LISTINGS[call](make(evil))
    assert evil.requests <= 2


@pytest.mark.parametrize("call", ["list", "names"])
def test_pages_that_lead_on_for_ever(evil: EvilServer, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of more names than a run can have is none of a run; memory has a bound too."""
    monkeypatch.setattr(listing, "MAX_NAMES", 20)
    evil.answer = ever_new(LIST)
    with pytest.raises(StorageError, match="more than 20 names"):
        LISTINGS[call](by_boto3(evil))
    assert evil.requests == 21


@pytest.mark.parametrize("call", ["begun", "abort_uploads"])
def test_uploads_that_lead_on_for_ever(evil: EvilServer, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By boto3 and by s3fs."""
    monkeypatch.setattr(listing, "MAX_NAMES", 20)
    monkeypatch.setattr(listing, "_MAX_PAGES", 20)
    for make in (by_boto3, by_s3fs):
        evil.requests, evil.answer = 0, ever_new(UPLOADS)
        with pytest.raises(StorageError, match="more than 20"):
            LISTINGS[call](make(evil))
        assert evil.requests == 21


@pytest.mark.parametrize("call", ["list", "names"])
def test_lists_of_fsspec_end_with_their_time(
    evil: EvilServer, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clients follow such pages for ever; a request of ours has a limit of seconds, and is cancelled."""
    monkeypatch.setattr(connection, "_SMALL_S", 1.0)
    evil.answer = leading("x")
    store = by_s3fs(evil)
    with pytest.raises(StorageUnavailable, match="no answer came in time"):
        LISTINGS[call](store)
    store.close()
    asked = evil.requests
    assert asked > 2
    with pytest.raises(StorageError):
        by_boto3(evil).list("")
    assert evil.requests <= asked + 3, "the cancelled listing goes on"


def redirecting(asked: Asked) -> None:
    asked.say(307, Location=asked.evil.url + asked.path)


@pytest.mark.parametrize("make", [by_boto3, by_s3fs])
def test_redirections_in_a_circle(evil: EvilServer, make: Callable[[EvilServer], Any]) -> None:
    """Some requests, then an error; ours says which server it was."""
    evil.answer = redirecting
    store = make(evil)
    for call in (
        lambda: store.read("a", max_bytes=10),
        lambda: store.list(""),
        lambda: store.put("a", b"1"),
        lambda: store.put_large("b", memoryview(bytes(40 << 20))),
    ):
        evil.requests = 0
        with pytest.raises(StorageError, match=f"{evil.url} sends" if make is by_boto3 else None):
            call()
        assert evil.requests < 300


def without_end(asked: Asked) -> None:
    asked.go_on_for_ever(ETag='"x"')


def longer_than_told(asked: Asked) -> None:
    """A length that is fine and chunks that are not: the chunks count for whoever reads them."""
    asked.go_on_for_ever(ETag='"x"', Content_length="10")


def a_terabyte(asked: Asked) -> None:
    asked.go_on_for_ever(ETag='"x"', Content_Length=str(1 << 40))


@pytest.mark.parametrize("answer", [without_end, longer_than_told, a_terabyte])
def test_a_body_without_end(evil: EvilServer, answer: Callable[[Asked], None]) -> None:
    """No more of it is taken than was asked for, but for what the kernel holds."""
    evil.answer = answer
    store = by_boto3(evil)
    with pytest.raises(StorageError, match=r"run/a is larger than the 1000 bytes"):
        store.read("a", max_bytes=1000)
    buffer = bytearray(100)
    with pytest.raises(StorageError):
        store.read_into("a", 5, memoryview(buffer)[10:90])
    assert buffer[:10] == buffer[90:] == bytes(10)
    assert evil.sent < 64 << 20
