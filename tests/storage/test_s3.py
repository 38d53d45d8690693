"""A bucket by boto3: on a bucket in memory that goes wrong on purpose, and on a real server."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

pytest.importorskip("boto3", reason="boto3 is not installed (extra s3)")

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageNotFound,
    StorageRefused,
    StorageShort,
    StorageUnavailable,
)
from spotsafe.storage import s3, s3_transfer
from spotsafe.storage.parts import MEBIBYTE, MIN_PART, PART, Part, cut
from spotsafe.storage.s3 import S3Store
from spotsafe.storage.s3_client import Bucket, Live, View
from spotsafe.storage.store import Store
from spotsafe.testing.stores import ODD_NAMES, StoreConformance, pattern_bytes, read_all
from tests.servers import KEY, SECRET, Server, s3_client
from tests.storage.fake_s3 import FakeS3, client_error

SMALL = 1000
DATA = pattern_bytes(3 * SMALL + 7)


@pytest.fixture
def fake() -> FakeS3:
    return FakeS3()


@pytest.fixture
def store(fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    """A store over the bucket in memory, with parts of 1000 bytes."""
    with ThreadPoolExecutor(4) as pool:
        live = Live(session=None, client=fake, pool=pool, checksums=True, signs_bodies=True)
        monkeypatch.setattr(Bucket, "_new", lambda _self, **_: live)
        monkeypatch.setattr(s3, "PART", SMALL)
        monkeypatch.setattr(s3_transfer, "cut", partial(cut, piece=SMALL))
        yield S3Store("s3://bucket/run")


def raising(error: BaseException, *, at: str, times: int = 1) -> Callable[[str, int], None]:
    """A fault at the first requests of a method."""
    left = [times]

    def fault(name: str, _number: int) -> None:
        if name == at and left[0]:
            left[0] -= 1
            raise error

    return fault


class TestConformance(StoreConformance):
    """The suite, with pages of two and parts of 1000 bytes."""

    pytestmark = pytest.mark.slow

    @pytest.fixture
    def store(self, store: S3Store) -> Store:
        return store


class TestBySeaweedFS(StoreConformance):
    """The suite on a real server, whatever is larger than nothing in parts."""

    pytestmark = pytest.mark.slow
    races = 4  # writers of one key wait for each other, for seconds

    @pytest.fixture
    def store(self, seaweedfs: Server, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(S3Store, "_is_large", lambda _self, size: size > 0)
        return real(seaweedfs)

    # SeaweedFS takes a backslash in a key for a slash.
    @pytest.mark.parametrize("name", [name for name in ODD_NAMES if "\\" not in name])
    def test_odd_names(self, store: Store, name: str) -> None:
        super().test_odd_names(store, name)


def real(server: Server) -> S3Store:
    """A new place on a real server."""
    return S3Store(
        server.url(f"{uuid.uuid4().hex}/run"),
        endpoint_url=server.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
    )


# -- urls


@pytest.mark.parametrize("url", ["s3://", "s3:///run", "gs://bucket/run", "bucket/run"])
def test_urls_without_a_bucket(url: str) -> None:
    """The message shows what to write."""
    with pytest.raises(ValueError, match="s3://bucket/run"):
        S3Store(url)


def test_keys(store: S3Store, fake: FakeS3) -> None:
    """Objects lie below the prefix, of whatever spelling the url is."""
    assert S3Store("S3A://bucket/a/b/").url == "S3A://bucket/a/b"
    store.put("x/y", b"1")
    S3Store("s3://bucket").put("z", b"2")
    assert fake.objects == {"run/x/y": b"1", "z": b"2"}
    assert [entry.path for entry in S3Store("s3://bucket").list("")] == ["run/x/y", "z"]


# -- large objects


def test_parts(store: S3Store, fake: FakeS3) -> None:
    """A large object goes in parts, each with its checksum, and exists from the last request on."""
    store.put_large("big", memoryview(DATA))
    assert fake.objects == {"run/big": DATA}
    assert sorted(part["PartNumber"] for part in fake.named("upload_part")) == [1, 2, 3, 4]
    assert all(len(part["ChecksumCRC32"]) == 8 for part in fake.named("upload_part"))
    (complete,) = fake.named("complete_multipart_upload")
    assert complete["IfNoneMatch"] == "*"
    assert [part["PartNumber"] for part in complete["MultipartUpload"]["Parts"]] == [1, 2, 3, 4]
    assert all(part["ChecksumCRC32"] for part in complete["MultipartUpload"]["Parts"])
    assert fake.uploads == {}


def test_no_checksums_where_they_are_not_wanted(
    store: S3Store, fake: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that refuses checksums gets none."""
    live = Live(session=None, client=fake, pool=store._bucket.live().pool, checksums=False, signs_bodies=True)
    monkeypatch.setattr(Bucket, "_new", lambda _self, **_: live)
    store = S3Store("s3://bucket/run")
    store.put_large("big", memoryview(DATA))
    store.put("small", b"x")
    for _, params in fake.calls:
        assert not [name for name in params if name.startswith("Checksum")]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConnectionResetError("cut"), MemoryError()])
def test_nothing_is_left_behind(
    store: S3Store, fake: FakeS3, number: int, when: str, error: BaseException
) -> None:
    """Whatever request of an upload fails, or has its answer lost, and however: no upload remains.

    An upload whose very name was lost with the answer cannot be taken back. A sweep finds it.
    """

    def fault(_name: str, at: int) -> None:
        if at == number:
            raise error

    setattr(fake, when, fault)
    done = False
    try:
        store.put_large("big", memoryview(DATA))
        done = True
    except (KeyboardInterrupt, StorageError, MemoryError):
        pass
    setattr(fake, when, lambda _name, _number: None)
    if number == 1 and when == "after":
        assert store.begun("") == ["big"]
        store.abort_uploads("")
    assert fake.uploads == {}
    there = number == 6 and when == "after"
    assert fake.objects == ({"run/big": DATA} if there else {})
    assert done == (there and isinstance(error, ConnectionResetError))


def test_a_lost_answer_to_the_last_request(store: S3Store, fake: FakeS3) -> None:
    """The object is there and is ours: success. Another one of the same size is not."""
    fake.after = raising(ConnectionResetError("cut"), at="complete_multipart_upload")
    store.put_large("big", memoryview(DATA))
    other = bytes(len(DATA))
    with pytest.raises(StorageExists):
        store.put_large("big", memoryview(other))
    assert fake.objects == {"run/big": DATA}
    assert fake.uploads == {}


def test_no_part_is_under_way_when_the_abort_is_sent(
    store: S3Store, fake: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that fails waits for its neighbours: one behind an abort would stay in the bucket."""
    under_way, at_abort, lock = [0], [], threading.Lock()
    both = threading.Barrier(2)
    real_part, real_abort = s3_transfer._upload_part, s3_transfer.abort_upload

    def slow(bucket: Bucket, key: str, upload: str, part: Part, *args: Any, **kwargs: Any) -> Any:
        with lock:
            under_way[0] += 1
        try:
            if part.number < 3:
                both.wait(timeout=30)
            if part.number == 1:
                raise ConnectionResetError("cut")
            return real_part(bucket, key, upload, part, *args, **kwargs)
        finally:
            with lock:
                under_way[0] -= 1

    def abort(*args: Any) -> None:
        at_abort.append(under_way[0])
        real_abort(*args)

    monkeypatch.setattr(s3_transfer, "_upload_part", slow)
    monkeypatch.setattr(s3_transfer, "abort_upload", abort)
    with pytest.raises(StorageUnavailable):
        store.put_large("big", memoryview(DATA))
    assert at_abort == [0]


def test_aborts_until_no_part_is_shown(store: S3Store, fake: FakeS3) -> None:
    """A part that lands behind an abort is aborted too."""
    fake.late_parts = 3
    fake.before = raising(ConnectionResetError("cut"), at="complete_multipart_upload")
    with pytest.raises(StorageUnavailable):
        store.put_large("big", memoryview(DATA))
    assert fake.uploads == {}
    assert len(fake.named("abort_multipart_upload")) == 4


def test_an_abort_that_fails_is_told(store: S3Store, fake: FakeS3, caplog: pytest.LogCaptureFixture) -> None:
    """The first error is the one that is raised; what is left is in the log and found by a sweep."""
    fake.before = raising(ConnectionResetError("cut"), at="upload_part")
    fake.after = raising(client_error("SlowDown", 503), at="abort_multipart_upload")
    fake.late_parts = 1
    with pytest.raises(StorageUnavailable, match="cut"):
        store.put_large("big", memoryview(DATA))
    assert "run/big could not be aborted" in caplog.text
    assert store.begun("") == ["big"]
    store.abort_uploads("")
    assert fake.uploads == {}


def test_only_our_own_uploads_are_aborted(store: S3Store, fake: FakeS3) -> None:
    """Uploads below the folder go, over all pages; those of neighbours and of other runs stay."""
    keys = [f"run/a/{number}" for number in range(5)] + ["run/a/0", "run/ab/1", "runner/a/1", "a/1"]
    for key in keys:
        fake.create_multipart_upload(Bucket="bucket", Key=key)
    assert store.begun("a") == [f"a/{number}" for number in range(5)]
    store.abort_uploads("a")
    assert sorted(key for key, _ in fake.uploads.values()) == ["a/1", "run/ab/1", "runner/a/1"]


def test_sweeps_beside_each_other(store: S3Store, fake: FakeS3) -> None:
    """An upload that somebody else aborts meanwhile is no error."""
    fake.create_multipart_upload(Bucket="bucket", Key="run/a")
    fake.before = raising(client_error("NoSuchUpload", 404), at="abort_multipart_upload")
    store.abort_uploads("")


@pytest.mark.parametrize("marker", [None, "run/x"])
@pytest.mark.parametrize("call", ["list", "names", "begun", "abort_uploads"])
def test_a_listing_without_end(store: S3Store, fake: FakeS3, call: str, marker: str | None) -> None:
    """A page that leads nowhere, or back to itself, is no reason to ask for ever."""
    page = {"IsTruncated": True, "NextContinuationToken": marker, "NextKeyMarker": marker}

    def answer(**_: Any) -> Any:
        asked.append(1)
        return page

    asked: list[int] = []
    fake.list_objects_v2 = fake.list_multipart_uploads = answer
    with pytest.raises(StorageError, match=r"s3://bucket/run/checkpoints/"):
        getattr(store, call)("checkpoints")
    assert len(asked) <= 2


# -- create and put in doubt


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("cut"),
        client_error("PreconditionFailed", 412),
        client_error("ConditionalRequestConflict", 409),
        client_error("InternalError", 500),
        client_error("Odd", 400),
        RuntimeError("what is this"),
    ],
    ids=str,
)
def test_create_looks_when_in_doubt(store: S3Store, fake: FakeS3, error: Exception) -> None:
    """Whatever the answer was: our bytes are a success, others are a loss, nothing is tried again or told."""
    fake.after = raising(error, at="put_object")
    assert store.create("mine", b"mine") is True
    fake.objects["run/theirs"] = b"theirs"
    fake.before = raising(error, at="put_object")
    assert store.create("theirs", b"mine") is False
    fake.before = raising(error, at="put_object")
    if getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode") == 412:
        assert store.create("free", b"mine") is True
    else:
        with pytest.raises(StorageError):
            store.create("free", b"mine")
        assert "run/free" not in fake.objects


def test_create_does_not_look_when_it_was_refused(store: S3Store, fake: FakeS3) -> None:
    """No permission to write is an error, whatever there is."""
    fake.objects["run/a"] = b"mine"
    fake.before = raising(client_error("AccessDenied", 403), at="put_object")
    with pytest.raises(StorageRefused):
        store.create("a", b"mine")


def test_create_gives_up(store: S3Store, fake: FakeS3) -> None:
    """A store that says "exists" and shows nothing, again and again."""
    fake.before = raising(client_error("PreconditionFailed", 412), at="put_object", times=100)
    with pytest.raises(StorageUnavailable, match="keeps vanishing"):
        store.create("a", b"mine")


def test_put_looks_when_in_doubt(store: S3Store, fake: FakeS3) -> None:
    """A lost answer is no failure; and when even looking fails, the first error is told."""
    fake.after = raising(ConnectionResetError("cut"), at="put_object")
    store.put("a", b"mine")
    fake.before = raising(ConnectionResetError("cut"), at="put_object")
    fake.after = raising(client_error("AccessDenied", 403), at="head_object")
    with pytest.raises(StorageUnavailable, match="cut"):
        store.put("b", b"mine")


# -- reading


def test_a_range_in_parts(store: S3Store, fake: FakeS3) -> None:
    """A large range comes by several requests into the one buffer, and into no byte beside it."""
    fake.objects["run/big"] = DATA
    buffer = bytearray(len(DATA))
    store.read_into("big", 7, memoryview(buffer)[10 : len(DATA) - 10])
    assert buffer[10:-10] == DATA[7:-13]
    assert buffer[:10] == buffer[-10:] == bytes(10)
    assert len(fake.named("get_object")) == 3


def test_a_range_in_parts_past_the_end(store: S3Store, fake: FakeS3) -> None:
    """However many parts lie behind the end, the object is too short."""
    fake.objects["run/big"] = DATA
    for length in (len(DATA) + 1, len(DATA) + 5 * SMALL):
        with pytest.raises(StorageShort):
            store.read_into("big", 0, memoryview(bytearray(length)))


def test_a_connection_that_ends_early(store: S3Store, fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that were announced and do not come are no short object."""
    fake.objects["run/a"] = b"12345"
    short = FakeS3()
    short.objects["run/a"] = b"123"

    def get_object(**params: Any) -> Any:
        return {**short.get_object(**params), "ContentLength": 5}

    monkeypatch.setattr(fake, "get_object", get_object, raising=False)
    with pytest.raises(StorageUnavailable, match="3 of 5 bytes"):
        store.read_into("a", 0, memoryview(bytearray(5)))


def test_a_server_that_ignores_ranges(store: S3Store, fake: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole object is never written over the buffer's end, nor taken for the range."""
    fake.objects["run/a"] = b"12345"
    whole = FakeS3()
    whole.objects = fake.objects
    monkeypatch.setattr(fake, "get_object", lambda Range, **params: whole.get_object(**params), raising=False)
    with pytest.raises(StorageError, match="ignores ranges"):
        store.read_into("a", 1, memoryview(bytearray(2)))


def test_a_missing_bucket_is_not_a_missing_object(store: S3Store, fake: FakeS3) -> None:
    """It is an error, and never "there is none"."""
    calls: list[Callable[[], object]] = [
        lambda: store.read("a", max_bytes=1),
        lambda: store.read_into("a", 0, memoryview(bytearray(1))),
        lambda: store.list(""),
        lambda: store.names(""),
        lambda: store.begun(""),
        lambda: store.delete("a"),
    ]

    def fault(_name: str, _number: int) -> None:
        raise client_error("NoSuchBucket", 404)

    fake.before = fault
    for call in calls:
        with pytest.raises(StorageError, match="NoSuchBucket") as caught:
            call()
        assert not isinstance(caught.value, StorageNotFound)


def test_marks_of_folders_are_no_objects(store: S3Store, fake: FakeS3) -> None:
    """Consoles make empty objects that end in a slash."""
    fake.objects = {"run/": b"", "run/a/": b"", "run/a/x": b"1"}
    assert [entry.path for entry in store.list("")] == ["a/x"]
    assert store.names("") == ["a"]
    assert store.names("a") == ["x"]


# -- clients


def test_expired_credentials_are_looked_up_again_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new client is made, the body is sent from its beginning; a second refusal is an error."""
    clients = [FakeS3(), FakeS3(), FakeS3()]
    made: list[FakeS3] = []

    def expired(name: str, _number: int) -> None:
        if name == "put_object":
            raise client_error("ExpiredToken", 400)

    clients[0].before = clients[1].before = expired
    with ThreadPoolExecutor(1) as pool:

        def new(_self: Bucket, **_: Any) -> Live:
            made.append(clients[len(made)])
            return Live(session=None, client=made[-1], pool=pool, checksums=True, signs_bodies=True)

        monkeypatch.setattr(Bucket, "_new", new)
        store = S3Store("s3://bucket/run")
        store.names("")
        with pytest.raises(StorageRefused, match="ExpiredToken"):
            store.put("a", b"12345")
        store.put("a", b"12345")
    assert len(made) == 3
    assert clients[2].objects == {"run/a": b"12345"}


def test_a_view_is_a_file_over_memory() -> None:
    """Reading, seeking and its end are those of a file; nothing is copied."""
    memory = memoryview(bytearray(b"0123456789"))
    view = View(memory)
    first = view.read(4)
    memory[0] = ord("x")
    assert bytes(first) == b"x123"
    assert view.tell() == 4
    assert bytes(view.read()) == b"456789"
    assert not view.read(1)
    assert view.seek(-2, os.SEEK_END) == 8
    assert bytes(view.read(None)) == b"89"
    assert view.seek(0) == 0
    assert view.checksum() == View(memory).checksum()
    assert [bytes(piece) for piece in view.pieces()] == [b"x123456789"] * 1
    assert [bytes(piece) for piece in view.pieces()] == [bytes(memory)]


@pytest.mark.parametrize(
    ("endpoint", "signed"), [("http://127.0.0.1:1", True), ("https://127.0.0.1:1", False)]
)
def test_bodies_are_signed_where_nothing_else_protects_them(
    endpoint: str, signed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TLS the body is hashed once, by us; without it botocore signs it. The client's retries are few."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    live = Bucket(
        "b", {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    ).live()
    config = live.client.meta.config
    assert live.client.meta.endpoint_url == endpoint
    assert (config.s3 or {}).get("payload_signing_enabled", True) is signed
    assert live.signs_bodies is signed
    assert config.retries == {"mode": "standard", "total_max_attempts": 2}
    assert live.checksums


def test_the_mode_of_checksums_is_botocores(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set for every program that uses S3 holds here too."""
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    options = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    assert not Bucket("b", options).live().checksums


# -- a real server


@pytest.mark.slow
@pytest.mark.parametrize("size", [PART, PART + 1, 3 * PART + 12345])
def test_large_objects(seaweedfs: Server, size: int) -> None:
    """Parts of the true size, there and back; the server has checked the checksum of each."""
    store = real(seaweedfs)
    data = mmap.mmap(-1, size)
    data[:MEBIBYTE] = pattern_bytes(MEBIBYTE)
    data[-5:] = b"12345"
    store.put_large("big", memoryview(data))
    assert store.begun("") == []
    assert read_all(store, "big") == data[:]
    with pytest.raises(StorageExists):
        store.put_large("big", memoryview(bytes(size)))
    assert store.begun("") == []


@pytest.mark.slow
def test_a_wrong_checksum_is_refused(seaweedfs: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server compares: what changed on its way is not stored."""
    store = real(seaweedfs)
    monkeypatch.setattr(View, "checksum", lambda _self: "AAAAAA==")
    with pytest.raises(StorageError):
        store.put_large("a", memoryview(pattern_bytes(PART + 1)))
    with pytest.raises(StorageError):
        store.put("b", b"x")
    assert store.list("") == []
    assert store.begun("") == []


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("number", range(1, 6))
def test_nothing_is_left_on_a_real_server(
    seaweedfs: Server, number: int, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in memory: whatever request is interrupted, no upload remains."""
    store = real(seaweedfs)
    monkeypatch.setattr(s3_transfer, "cut", partial(cut, piece=MIN_PART))
    call, count, lock = store._bucket.call, [0], threading.Lock()

    def interrupted(method: str, **params: Any) -> Any:
        with lock:
            count[0] += 1
            mine = count[0] == number
        if mine and when == "before":
            raise KeyboardInterrupt
        answer = call(method, **params)
        if mine:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(store._bucket, "call", interrupted)
    data = pattern_bytes(2 * MIN_PART + PART)
    with pytest.raises(KeyboardInterrupt):
        store.put_large("big", memoryview(data))
    monkeypatch.setattr(store._bucket, "call", call)
    if number == 1 and when == "after":
        store.abort_uploads("")
    assert store.begun("") == []
    listed = s3_client(seaweedfs).list_multipart_uploads(Bucket=store._bucket.name, Prefix=store._prefix)
    assert listed.get("Uploads", []) == []  # others share the bucket


@pytest.mark.slow
def test_expired_and_wrong_credentials(seaweedfs: Server) -> None:
    """A secret that is not right is refused, by every operation that asks the server."""
    store = S3Store(
        seaweedfs.url("run"),
        endpoint_url=seaweedfs.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key="wrong",
        region_name="us-east-1",
    )
    with pytest.raises(StorageRefused, match="SignatureDoesNotMatch"):
        store.create("a", b"x")
    with pytest.raises(StorageRefused):
        store.names("")


def _in_child(store: S3Store, done: Any) -> None:
    store.put("child", b"from the child")
    done.put(store.names(""))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_client_of_its_own(seaweedfs: Server) -> None:
    """No connection is shared over a fork."""
    store = real(seaweedfs)
    store.put("parent", b"x")
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    child = context.Process(target=_in_child, args=(store, done))
    child.start()
    assert done.get(timeout=60) == ["child", "parent"]
    child.join()
    assert child.exitcode == 0
    assert store.names("") == ["child", "parent"]
