"""The fsspec store: what clients do wrong, and what comes of it here."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
import uuid
from collections.abc import Iterator
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageExpired,
    StorageNotFound,
    StorageRefused,
    StorageShort,
    StorageUnavailable,
)
from spotsafe.storage import clients, remote
from spotsafe.storage.remote import FsspecStore
from spotsafe.storage.store import Entry
from spotsafe.testing.stores import StoreConformance, pattern_bytes, read_all


class OddFileSystem(MemoryFileSystem):
    """A memory file system in which a test can put something into the way of a call."""

    protocol = "odd"
    faults: ClassVar[dict[str, Any]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("odd://", "memory://"))

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        fault = self.faults.get(name)
        real = getattr(super(), name)
        return fault(real, *args, **kwargs) if fault else real(*args, **kwargs)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self._call("pipe_file", path, value, mode=mode, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return self._call("cat_file", path, start=start, end=end, **kwargs)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return self._call("info", path, **kwargs)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        return self._call("ls", path, detail=detail, **kwargs)

    def rm_file(self, path: str) -> None:
        self._call("rm_file", path)


class Slow(AsyncFileSystem):
    """An asynchronous file system over a dict, as those of the clouds are made."""

    protocol = "slow"
    objects: ClassVar[dict[str, bytes]] = {}
    loops: ClassVar[list[Any]] = []

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        await asyncio.sleep(0)
        self.loops.append(asyncio.get_running_loop())
        if mode == "create" and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = bytes(value)

    async def _cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file"}
        if any(name.startswith(path + "/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        below = [name for name in self.objects if name.startswith(path + "/")]
        if not below:
            raise FileNotFoundError(path)
        first = {name: name[len(path) + 1 :].partition("/") for name in below}
        found = {
            f"{path}/{head}": {
                "name": f"{path}/{head}",
                "size": 0 if slash else len(self.objects[name]),
                "type": "directory" if slash else "file",
            }
            for name, (head, slash, _rest) in first.items()
        }
        return list(found.values()) if detail else list(found)

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]


@pytest.fixture(autouse=True)
def _protocols() -> Iterator[None]:
    """Two protocols of our own, known while a test runs."""
    fsspec.register_implementation("odd", OddFileSystem, clobber=True)
    fsspec.register_implementation("slow", Slow, clobber=True)
    OddFileSystem.faults = {}
    Slow.objects, Slow.loops = {}, []
    yield
    OddFileSystem.faults = {}
    Slow.objects, Slow.loops = {}, []


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> FsspecStore:
    """A store whose client can be made to misbehave, with conditional writes."""
    monkeypatch.setitem(clients._CLIENTS, "odd", clients._MEMORY)
    return FsspecStore(f"odd://{uuid.uuid4().hex}/run")


def raise_(error: BaseException) -> Any:
    def call(_real: Any, *_args: Any, **_kwargs: Any) -> None:
        raise error

    return call


class TestAsync(StoreConformance):
    """An asynchronous client passes the suite, on an event loop of its own."""

    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> FsspecStore:
        monkeypatch.setitem(clients._CLIENTS, "slow", clients._MEMORY)
        return FsspecStore("slow://bucket/run")


# -- urls


@pytest.mark.parametrize(
    ("url", "shown"),
    [("memory://a/b/", "memory://a/b"), ("memory://a", "memory://a"), ("memory://", "memory://")],
)
def test_url(url: str, shown: str) -> None:
    """A trailing slash is not kept."""
    assert FsspecStore(url).url == shown


def test_options_are_not_shown() -> None:
    """Keys and tokens stand in no url and no repr."""
    store = FsspecStore("memory://a", token="secret")
    assert "secret" not in store.url + repr(store)


def test_unknown_protocol() -> None:
    """The message names the url, the protocol and what can be given."""
    with pytest.raises(ValueError, match=r"nope://x: unknown protocol 'nope'.*s3://"):
        FsspecStore("nope://x")


@pytest.mark.parametrize(
    ("protocol", "extra"), [("s3", "s3"), ("gs", "gcs"), ("abfs", "azure"), ("az", "azure")]
)
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, protocol: str, extra: str) -> None:
    """The message says what to install."""

    def missing(_protocol: str) -> None:
        raise ImportError("no such package")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(StorageError, match=rf"pip install 'spotsafe\[{extra}\]'"):
        FsspecStore(f"{protocol}://bucket/run")


def test_a_package_that_we_have_no_extra_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec's own advice is handed on."""

    def missing(_protocol: str) -> None:
        raise ImportError("Install paramiko")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(StorageError, match="Install paramiko"):
        FsspecStore("sftp://host/run")


def test_an_old_fsspec(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that swallows mode="create" and overwrites is refused."""
    monkeypatch.setattr(AbstractFileSystem, "pipe_file", lambda self, path, value, **kwargs: None)
    with pytest.raises(StorageError, match="pip install -U fsspec"):
        FsspecStore("memory://a")


def test_a_client_that_does_not_know_create(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known protocol with a client that is too old is treated like one without conditions."""
    old = type("Old", (OddFileSystem,), {"pipe_file": lambda self, path, value, **kwargs: None})
    assert remote._knows(OddFileSystem, {"mode": "create"})
    assert not remote._knows(old, {"mode": "create"})
    assert remote._knows(Slow, {"mode": "create"})


# -- the instance


def test_the_instance_is_private() -> None:
    """Neither the user's cached instance nor its cache of listings is used."""
    url = f"memory://{uuid.uuid4().hex}"
    shared = fsspec.filesystem("memory")
    store = FsspecStore(url)
    assert store._connection._opened().fs is not shared
    assert store._connection._opened().fs is store._connection._opened().fs
    assert FsspecStore(url)._connection._opened().fs is not store._connection._opened().fs
    assert store._connection._opened().fs.storage_options.get("use_listings_cache") is False


def test_after_a_fork_there_is_a_new_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system does not survive a fork, so each process has its own; its parent's is left alone."""
    store = FsspecStore(f"memory://{uuid.uuid4().hex}")
    store.put("parent", b"x")
    mine = store._connection._opened().fs
    monkeypatch.setattr(os, "getpid", lambda: 2**22 + 1)
    other = store._connection._opened().fs
    assert other is not mine
    monkeypatch.undo()
    assert store._connection._opened().fs is mine


def test_an_asynchronous_client_has_a_loop_of_its_own() -> None:
    """Not fsspec's shared one, which a data loader may block."""
    from fsspec.asyn import get_loop

    store = FsspecStore("slow://bucket/run")
    store.put("a", b"x")
    assert Slow.loops
    assert get_loop() not in Slow.loops
    assert len(set(map(id, Slow.loops))) == 1


def test_the_loop_ends_with_the_store() -> None:
    """A store that is gone leaves no thread and no open loop."""
    store = FsspecStore("slow://bucket/run")
    store.put("a", b"x")
    threads = [thread for thread in threading.enumerate() if thread.name == "spotsafe-storage"]
    loop = Slow.loops[-1]
    assert threads
    del store
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert loop.is_closed()


# -- writes that go wrong


def test_a_cancelled_write_is_not_success(odd: FsspecStore) -> None:
    """A client that returns and has written nothing is found out."""
    OddFileSystem.faults["pipe_file"] = lambda _real, *_args, **_kwargs: None
    for write in (
        lambda: odd.put("a", b"x"),
        lambda: odd.put_large("a", memoryview(b"x")),
        lambda: odd.replace("a", b"x"),
        lambda: odd.create("a", b"x"),
    ):
        with pytest.raises(StorageUnavailable):
            write()


def test_a_truncated_write_is_not_success(odd: FsspecStore) -> None:
    """A client that has written half is found out."""
    OddFileSystem.faults["pipe_file"] = lambda real, path, value, **kwargs: real(path, value[:2], **kwargs)
    with pytest.raises(StorageUnavailable, match="2 bytes after 4"):
        odd.put("a", b"1234")
    with pytest.raises(StorageUnavailable, match="2 bytes after 4"):
        odd.replace("a", b"1234")


@pytest.mark.parametrize(
    "error",
    [
        FileExistsError("exists"),
        OSError(errno.EINVAL, "pre-conditions"),
        TimeoutError(),
        ConnectionResetError(),
        RuntimeError("?"),
    ],
)
def test_a_lost_answer_to_create(odd: FsspecStore, error: Exception) -> None:
    """Whatever the client says, our bytes there are success, and other bytes a loss."""

    def write_and_fail(real: Any, path: str, value: bytes, mode: str) -> None:
        if mode == "create":
            try:
                real(path, value, mode=mode)
            finally:
                raise error

    OddFileSystem.faults["pipe_file"] = write_and_fail
    assert odd.create("a", b"mine") is True
    assert odd.create("a", b"else") is False
    OddFileSystem.faults.clear()
    assert odd.read("a", max_bytes=9) == b"mine"


def test_a_lost_answer_to_put(odd: FsspecStore) -> None:
    """The client's own repetition finds our object in the way; the bytes decide."""

    def write_and_fail(real: Any, path: str, value: bytes, mode: str) -> None:
        real(path, value, mode=mode)
        raise FileExistsError(path)

    OddFileSystem.faults["pipe_file"] = write_and_fail
    odd.put("a", b"mine")
    odd.put_large("b", memoryview(b"mine"))
    OddFileSystem.faults.clear()
    with pytest.raises(StorageExists, match="left as it is"):
        odd.put("a", b"else")


def test_exists_and_then_nothing(odd: FsspecStore) -> None:
    """S3's 409: "exists" although nothing is there. Tried again, and "unavailable" in the end."""
    calls = []

    def conflict(real: Any, path: str, value: bytes, mode: str) -> None:
        calls.append(path)
        if len(calls) < 3 or path.endswith("never"):
            raise FileExistsError(path)
        real(path, value, mode=mode)

    OddFileSystem.faults["pipe_file"] = conflict
    assert odd.create("a", b"mine") is True
    assert len(calls) == 3
    with pytest.raises(StorageUnavailable, match="never"):
        odd.create("never", b"mine")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError("no"), StorageRefused),
        (TimeoutError(), StorageUnavailable),
        (FileNotFoundError("no such bucket"), StorageError),
        (KeyError("bug of a client"), StorageError),
    ],
)
def test_a_write_that_fails(odd: FsspecStore, error: Exception, kind: type[StorageError]) -> None:
    """Nothing there and an error: the error, in its class; a missing bucket is not a missing object."""
    OddFileSystem.faults["pipe_file"] = raise_(error)
    for write in (odd.put, odd.create, odd.replace):
        with pytest.raises(kind) as caught:
            write("a", b"x")
        assert caught.value.__cause__ is error
        assert not isinstance(caught.value, StorageNotFound)
        assert "odd://" in str(caught.value)


def test_a_lack_of_memory_is_not_the_stores(odd: FsspecStore) -> None:
    """MemoryError and interrupts go through as they are."""
    for error in (MemoryError(), KeyboardInterrupt()):
        OddFileSystem.faults["pipe_file"] = raise_(error)
        with pytest.raises(type(error)):
            odd.put("a", b"x")


# -- reads that go wrong


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PermissionError("no"), StorageRefused),
        (TimeoutError(), StorageUnavailable),
        (ValueError("?"), StorageError),
    ],
)
def test_a_look_that_fails_is_not_empty(odd: FsspecStore, error: Exception, kind: type[StorageError]) -> None:
    """Listings and looks raise; they never say "there is none"."""
    odd.put("folder/a", b"x")
    OddFileSystem.faults.update(
        ls=raise_(error), info=raise_(error), cat_file=raise_(error), rm_file=raise_(error)
    )
    for look in (
        lambda: odd.names("folder"),
        lambda: odd.size("folder/a"),
        lambda: odd.read("folder/a", max_bytes=9),
        lambda: odd.read_into("folder/a", 0, memoryview(bytearray(1))),
        lambda: odd.delete("folder/a"),
    ):
        with pytest.raises(kind) as caught:
            look()
        assert not isinstance(caught.value, StorageNotFound)


def refuse_below(folder: str, error: Exception) -> Any:
    """`fs.ls` that fails for one folder."""

    def install(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
        real, real_async = kind.ls, getattr(kind, "_ls", None)

        def ls(self: Any, path: str, **kwargs: Any) -> Any:
            if path.endswith(folder):
                raise error
            return real(self, path, **kwargs)

        async def ls_async(self: Any, path: str, **kwargs: Any) -> Any:
            if path.endswith(folder):
                raise error
            return await real_async(self, path, **kwargs)

        if real_async is None:
            monkeypatch.setattr(kind, "ls", ls)
        else:
            monkeypatch.setattr(kind, "_ls", ls_async)

    return install


@pytest.mark.parametrize("protocol", ["file", "slow"])
def test_a_folder_that_cannot_be_listed_is_not_left_out(
    protocol: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec's own walk skips folders that it cannot list; ours raises."""
    store = FsspecStore(f"{protocol}://{tmp_path}/run")
    store.put("a/b/c", b"x")
    refuse_below("/a/b", PermissionError(errno.EACCES, "no"))(
        monkeypatch, type(store._connection._opened().fs)
    )
    with pytest.raises(StorageRefused):
        FsspecStore(store.url).list("")


@pytest.mark.parametrize("protocol", ["file", "slow"])
def test_a_folder_that_vanishes_while_it_is_listed(
    protocol: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody deletes one checkpoint while we list: the others are still there."""
    store = FsspecStore(f"{protocol}://{tmp_path}/run")
    store.put("a/one", b"x")
    store.put("b/two", b"x")
    refuse_below("/a", FileNotFoundError("gone"))(monkeypatch, type(store._connection._opened().fs))
    assert FsspecStore(store.url).list("") == [Entry("b/two", 1)]


@pytest.mark.parametrize("error", [OSError(errno.EINVAL, "InvalidRange"), RuntimeError("416")])
def test_a_server_that_refuses_ranges_past_the_end(odd: FsspecStore, error: Exception) -> None:
    """Its own kind of error is "short" if the object is too short, and an error otherwise."""
    odd.put("a", b"12345")
    OddFileSystem.faults["cat_file"] = raise_(error)
    with pytest.raises(StorageShort):
        odd.read_into("a", 4, memoryview(bytearray(2)))
    with pytest.raises(StorageError) as caught:
        odd.read_into("a", 0, memoryview(bytearray(2)))
    assert not isinstance(caught.value, StorageShort)


def test_a_server_that_ignores_ranges(odd: FsspecStore) -> None:
    """The whole object instead of a part must not be taken for the part."""
    odd.put("a", b"12345")
    OddFileSystem.faults["cat_file"] = lambda real, path, start, end: real(path, start=None, end=None)
    with pytest.raises(StorageError, match="ignores ranges"):
        odd.read_into("a", 0, memoryview(bytearray(2)))


def test_ranges_are_read_in_pieces(odd: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large range takes several requests, each by keywords, and none is wrong at a seam."""
    monkeypatch.setattr(remote, "_PIECE", 1000)
    requests = []

    def cat(real: Any, path: str, start: int, end: int) -> bytes:
        requests.append((start, end))
        return real(path, start=start, end=end)

    data = pattern_bytes(2500)
    odd.put("a", data)
    OddFileSystem.faults["cat_file"] = cat
    assert read_all(odd, "a") == data
    assert requests == [(0, 1000), (1000, 2000), (2000, 2500)]


def test_an_object_that_grows_between_look_and_read(odd: FsspecStore) -> None:
    """The bound holds for what was read, too."""
    odd.put("a", b"1")
    OddFileSystem.faults["cat_file"] = lambda _real, *_args, **_kwargs: b"12345"
    with pytest.raises(StorageError, match="larger than the 3 bytes"):
        odd.read("a", max_bytes=3)


def test_a_store_that_hides_sizes(odd: FsspecStore) -> None:
    """Without a size nothing can be checked, and that is said."""
    odd.put("a", b"1")
    OddFileSystem.faults["info"] = lambda _real, path: {"name": path, "size": None, "type": "file"}
    with pytest.raises(StorageError, match="how large"):
        odd.size("a")


def test_two_runs_in_one_bucket() -> None:
    """A run whose name begins like another's sees nothing of it."""
    base = f"memory://{uuid.uuid4().hex}"
    one, two = FsspecStore(f"{base}/run"), FsspecStore(f"{base}/run-2")
    one.put("a", b"1")
    two.put("a", b"2")
    two.put("b", b"2")
    assert one.list("") == [Entry("a", 1)]
    assert one.names("") == ["a"]
    assert FsspecStore(base).names("") == ["run", "run-2"]


def test_the_root_of_a_file_system() -> None:
    """A url without a path works too."""
    store = FsspecStore("memory://")
    folder = uuid.uuid4().hex
    store.put(f"{folder}/a", b"x")
    assert store.list(folder) == [Entry(f"{folder}/a", 1)]
    assert folder in store.names("")
    store.delete(f"{folder}/a")


# -- credentials that expire


class ExpiredToken(Exception):
    """As botocore's error of an old token."""

    response: ClassVar[dict[str, Any]] = {
        "Error": {"Code": "ExpiredToken"},
        "ResponseMetadata": {"HTTPStatusCode": 400},
    }


def test_expired_credentials_are_looked_for_anew_once(odd: FsspecStore) -> None:
    """A new instance reads them again; the caller notices nothing."""
    odd.put("a", b"1")
    old = odd._connection._opened().fs

    def info(real: Any, path: str) -> dict[str, Any]:
        if real.__self__ is old:
            raise ExpiredToken
        return real(path)

    OddFileSystem.faults["info"] = info
    assert odd.size("a") == 1
    assert odd._connection._opened().fs is not old


def test_credentials_that_stay_expired_are_never_an_empty_run(odd: FsspecStore) -> None:
    """A second refusal is told, after two requests and not more."""
    odd.put("a", b"1")
    asked: list[str] = []

    def refuse(_real: Any, path: str, **_kwargs: Any) -> None:
        asked.append(path)
        raise ExpiredToken

    OddFileSystem.faults.update(info=refuse, ls=refuse)
    for look in (lambda: odd.size("a"), lambda: odd.names("")):
        asked.clear()
        with pytest.raises(StorageExpired, match="get new ones"):
            look()
        assert len(asked) == 2


# -- memory and time


def test_a_large_read_has_few_pieces_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside its buffer a read needs the memory of so many pieces, whatever the object's size."""
    monkeypatch.setattr(remote, "_PIECE", 1000)
    store = FsspecStore(f"slow://{uuid.uuid4().hex}/run")
    data = pattern_bytes(30_500)
    store.put("a", data)
    under_way, most = 0, 0
    real = Slow._cat_file

    async def cat(self: Slow, path: str, start: int, end: int) -> bytes:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return await real(self, path, start=start, end=end)

    monkeypatch.setattr(Slow, "_cat_file", cat)
    assert read_all(store, "a") == data
    assert most == 4
    store.close()


def test_a_cancelled_request_of_the_client_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not success, and not "there is none"."""
    store = FsspecStore(f"slow://{uuid.uuid4().hex}/run")

    async def cancelled(*_args: Any, **_kwargs: Any) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(Slow, "_pipe_file", cancelled)
    monkeypatch.setattr(Slow, "_ls", cancelled)
    for ask in (lambda: store.replace("a", b"1"), lambda: store.names("")):
        with pytest.raises(StorageUnavailable, match="not known"):
            ask()
    store.close()


def test_a_closed_store_opens_again() -> None:
    """Closing ends connections, not the store."""
    store = FsspecStore(f"slow://{uuid.uuid4().hex}/run")
    store.put("a", b"1")
    store.close()
    assert store.read("a", max_bytes=1) == b"1"
    store.close()
    store.close()
