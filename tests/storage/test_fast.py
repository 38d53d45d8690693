"""Uploads by obstore: on a real server, what is left to boto3, and what its errors mean."""

from __future__ import annotations

import multiprocessing
import uuid
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed (extra s3)")
pytest.importorskip("obstore", reason="obstore is not installed (extra fast)")

import obstore
from obstore import exceptions

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageExpired,
    StorageFull,
    StorageNotFound,
    StorageRefused,
    StorageShort,
    StorageUnavailable,
)
from spotsafe.storage import fast, s3_transfer
from spotsafe.storage.fast import FastS3Store, class_of_obstore_error
from spotsafe.storage.parts import MEBIBYTE, PART
from spotsafe.storage.store import Store
from spotsafe.testing.stores import ODD_NAMES, StoreConformance, pattern_bytes, read_all
from tests.servers import KEY, SECRET, Server

ANSWER = (
    "Generic S3 error: Error performing PUT http://127.0.0.1/b/k in 2ms, after 1 retries - "
    "Server returned non-2xx status code: {status} Some Words: <Error><Code>{code}</Code></Error>\n\n"
    "Debug source:\nGeneric {{ status code: 999 }}"
)


def real(server: Server, path: str | None = None) -> FastS3Store:
    """A new place on a real server."""
    return FastS3Store(
        server.url(path or f"{uuid.uuid4().hex}/run"),
        endpoint_url=server.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )


@pytest.fixture
def keys() -> dict[str, str]:
    """Options that keep botocore from looking for any."""
    return {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}


@pytest.fixture
def by_boto3(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of uploads that boto3 made."""
    keys: list[str] = []
    upload = s3_transfer.upload_parts

    def counted(bucket: Any, key: str, data: memoryview) -> None:
        keys.append(key)
        upload(bucket, key, data)

    monkeypatch.setattr(s3_transfer, "upload_parts", counted)
    return keys


class TestBySeaweedFS(StoreConformance):
    """The suite on a real server, whatever is larger than nothing by obstore."""

    pytestmark = pytest.mark.slow
    races = 4  # writers of one key wait for each other, for seconds

    @pytest.fixture
    def store(self, seaweedfs: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(FastS3Store, "_is_large", lambda _self, size: size > 0)
        return real(seaweedfs)

    # SeaweedFS takes a backslash in a key for a slash.
    @pytest.mark.parametrize("name", [name for name in ODD_NAMES if "\\" not in name])
    def test_odd_names(self, store: Store, name: str) -> None:
        super().test_odd_names(store, name)


@pytest.mark.slow
@pytest.mark.parametrize("size", [PART + 1, 3 * PART, 3 * PART + 12345])
def test_large_objects(seaweedfs: Server, by_boto3: list[str], size: int) -> None:
    """obstore writes every byte, leaves no upload, and never writes over an object."""
    store = real(seaweedfs)
    data = pattern_bytes(MEBIBYTE) * (size // MEBIBYTE) + pattern_bytes(size % MEBIBYTE, seed=1)
    store.put_large("folder/big", memoryview(data))
    assert read_all(store, "folder/big") == data
    store.put_large("folder/big", memoryview(data))  # the same bytes again are no error
    with pytest.raises(StorageExists):
        store.put_large("folder/big", memoryview(bytes(size)))
    assert store.begun("") == []
    assert by_boto3 == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ODD_NAMES if "\\" not in name])
def test_names_that_obstore_would_rewrite(seaweedfs: Server, by_boto3: list[str], name: str) -> None:
    """A key is the one that was asked for, whoever writes it."""
    store = real(seaweedfs, f"{uuid.uuid4().hex}/{name}")
    data = pattern_bytes(PART + 1)
    store.put_large(f"{name}/big", memoryview(data))
    assert [entry.path for entry in store.list("")] == [f"{name}/big"]
    assert read_all(store, f"{name}/big") == data


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), exceptions.GenericError("HTTP error: error sending request"), MemoryError()],
    ids=lambda error: type(error).__name__,
)
def test_nothing_is_left_behind(
    seaweedfs: Server, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """obstore that fails and leaves its upload, as it may: we abort it, and no other."""
    store = real(seaweedfs)
    neighbour = f"{store._prefix}folder/big2"
    store._bucket.call("create_multipart_upload", Key=neighbour)

    def leaving(_store: Any, key: str, *_: Any, **__: Any) -> None:
        upload = store._bucket.call("create_multipart_upload", Key=key)["UploadId"]
        store._bucket.call("upload_part", Key=key, UploadId=upload, PartNumber=1, Body=b"x")
        raise error

    monkeypatch.setattr(obstore, "put", leaving)
    with pytest.raises((KeyboardInterrupt, StorageUnavailable, MemoryError)):
        store.put_large("folder/big", memoryview(bytes(PART + 1)))
    assert store.begun("") == ["folder/big2"]
    assert store.list("") == []


@pytest.mark.slow
@pytest.mark.parametrize("status", [301, 400, 403, 404, 501])
def test_boto3_writes_what_obstore_cannot(
    seaweedfs: Server, by_boto3: list[str], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """A refusal may be obstore's alone: another region, other credentials. The outcome is then boto3's."""
    store = real(seaweedfs)

    def refused(*_: Any, **__: Any) -> None:
        raise exceptions.GenericError(ANSWER.format(status=status, code="Odd"))

    monkeypatch.setattr(obstore, "put", refused)
    data = pattern_bytes(PART + 1)
    store.put_large("big", memoryview(data))
    assert by_boto3 == [f"{store._prefix}big"]
    assert read_all(store, "big") == data


@pytest.mark.slow
def test_an_object_that_appears_after_all(seaweedfs: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer was lost, but the object is there and is ours: success."""
    store = real(seaweedfs)
    put = obstore.put

    def lost(*args: Any, **kwargs: Any) -> None:
        put(*args, **kwargs)
        raise exceptions.GenericError("HTTP error: error sending request")

    monkeypatch.setattr(obstore, "put", lost)
    data = pattern_bytes(PART + 1)
    store.put_large("big", memoryview(data))
    assert read_all(store, "big") == data


def _in_child(store: Store, data: bytes, done: Any) -> None:
    store.put_large("child", memoryview(data))
    done.put(store.names(""))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_uses_boto3(seaweedfs: Server) -> None:
    """obstore's threads are not there in a child, and its call would wait for ever."""
    store = real(seaweedfs)
    data = pattern_bytes(PART + 1)
    store.put_large("parent", memoryview(data))
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    child = context.Process(target=_in_child, args=(store, data, done))
    child.start()
    assert done.get(timeout=60) == ["child", "parent"]
    child.join()
    assert child.exitcode == 0
    assert read_all(store, "child") == data


# -- errors


@pytest.mark.parametrize("name", [name for name in dir(exceptions) if name.endswith("Error")])
def test_every_class_of_obstore(name: str) -> None:
    """Each has its class in our tree; what is unknown is a plain error."""
    error = getattr(exceptions, name)("made")
    expected = {
        "AlreadyExistsError": StorageExists,
        "PreconditionError": StorageExists,
        "NotFoundError": StorageNotFound,
        "PermissionDeniedError": StorageRefused,
        "UnauthenticatedError": StorageRefused,
        "JoinError": StorageUnavailable,
        "GenericError": StorageUnavailable,
    }
    assert class_of_obstore_error(error) is expected.get(name, StorageError)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (500, "InternalError", StorageUnavailable),
        (503, "SlowDown", StorageUnavailable),
        (507, "Odd", StorageFull),
        (400, "Odd", StorageError),
        (400, "ExpiredToken", StorageExpired),
        (404, "NoSuchUpload", StorageError),
        (404, "NoSuchBucket", StorageError),
        (416, "InvalidRange", StorageShort),
        (409, "ConditionalRequestConflict", StorageUnavailable),
    ],
)
def test_the_answer_in_the_text(status: int, code: str, kind: type[StorageError]) -> None:
    """obstore has one class for most answers, and puts the answer into its text; only the first counts."""
    error = exceptions.GenericError(ANSWER.format(status=status, code=code))
    assert class_of_obstore_error(error) is kind


def test_built_in_errors() -> None:
    """obstore raises Python's own where there is one."""
    assert class_of_obstore_error(FileNotFoundError("x")) is StorageNotFound
    assert class_of_obstore_error(ValueError("x")) is StorageError


@pytest.mark.parametrize(
    ("options", "style", "expected"),
    [
        ({}, None, {"virtual_hosted_style_request": True}),
        ({}, "path", {"virtual_hosted_style_request": False}),
        ({"endpoint_url": "https://s3.example.com"}, None, {"virtual_hosted_style_request": False}),
        ({"endpoint_url": "https://s3.example.com"}, "virtual", {"virtual_hosted_style_request": True}),
    ],
)
def test_the_settings_are_botocores(
    options: dict[str, str], style: str | None, expected: dict[str, Any], tmp_path: Any, monkeypatch: Any
) -> None:
    """Region, endpoint and style of addresses are those that boto3 would use."""
    config = tmp_path / "config"
    config.write_text(
        "[default]\nregion = eu-west-1\n" + (f"s3 =\n  addressing_style = {style}\n" if style else "")
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    store = FastS3Store("s3://bucket/run", aws_access_key_id="k", aws_secret_access_key="s", **options)
    meta = store._bucket.live().client.meta
    found = fast._config(meta, str(meta.endpoint_url))
    wanted = {"region": "eu-west-1", **expected}
    assert found == ({**wanted, "endpoint": options["endpoint_url"]} if options else wanted)


def test_obstore_is_not_used_where_it_would_do_otherwise(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, str]
) -> None:
    """Keys that it rewrites, and a process that was forked: boto3 does these."""
    keys["endpoint_url"] = "http://127.0.0.1:1"
    store = FastS3Store("s3://bucket/run", **keys)
    live = store._bucket.live()
    assert store._obstore("run/a", 1, live) is not None
    for key in ("run/a b", "run//a", "/a", "run/a?", "run/\u00e4"):
        assert store._obstore(key, 1, live) is None
    monkeypatch.setattr(fast, "_runtime_of", 1)
    assert store._obstore("run/a", 1, live) is None


@pytest.mark.parametrize("found", ["file", "folder", "nothing"])
def test_certificates_of_ones_own(
    found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str]
) -> None:
    """What boto3 trusts, obstore is told to trust; where that cannot be, or needs no trust, is known before."""
    bundle = tmp_path / "own.pem"
    if found == "file":
        bundle.write_bytes(b"certificates")
    elif found == "folder":
        bundle.mkdir()
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    live = FastS3Store("s3://bucket/run", **keys)._bucket.live()
    expected = {"root_certificate": b"certificates"} if found == "file" else None
    assert fast._trust(live, "https://s3.example.com") == expected
    assert fast._trust(live, "http://127.0.0.1:1") == {}


def test_certificates_of_everybody(monkeypatch: pytest.MonkeyPatch, keys: dict[str, str]) -> None:
    """Nothing is said where nothing was."""
    monkeypatch.delenv("REQUESTS_CA_BUNDLE", raising=False)
    live = FastS3Store("s3://bucket/run", **keys)._bucket.live()
    assert fast._trust(live, "https://s3.example.com") == {}
    unchecked = FastS3Store("s3://bucket/run", verify=False, **keys)._bucket.live()
    assert fast._trust(unchecked, "https://s3.example.com") is None
