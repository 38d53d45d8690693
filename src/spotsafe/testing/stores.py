"""The tests that every store passes, for whoever writes one.

::

    import pytest
    from spotsafe.testing.stores import StoreConformance

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)

The store must be empty, and new for every test. Needs pytest.
"""

from __future__ import annotations

import mmap
import random
import threading
from collections.abc import Callable, Collection
from typing import ClassVar

import pytest

from spotsafe.errors import StorageError, StorageExists, StorageNotFound, StorageShort, StorageUnavailable
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Entry, Store, creates_exclusively
from spotsafe.testing.faults import LostResponseStore

MEBIBYTE = 1024 * 1024

ODD_NAMES = (
    "with space",
    "a[0]",
    "star*",
    "what?",
    "{a,b}",
    "h#sh",
    "per%20cent",
    "plus+and&",
    "back\\slash",
    "\u00e4\u00f6\u00fc",
    "\u6a21\u578b",
    "\U0001f40d",
    ".hidden",
    "-dash",
    "~tilde",
)
"""Base names that are legal and that a careless store takes for a pattern, a url or an option."""

BAD_PATHS = ("/absolute", "../out", "a/../../out", "a//b", "a/", "./a", "a/./b", "..", ".", "nul\0")
"""Paths that no store may take."""


def pattern_bytes(size: int, *, seed: int = 0) -> bytes:
    """`size` bytes that differ from place to place, so that a shifted or repeated block is found."""
    return random.Random(seed).randbytes(size)


def aligned_memory(data: bytes, *, shift: int = 0) -> memoryview:
    """A copy of `data` in writable memory that begins `shift` bytes after a page's start."""
    block = mmap.mmap(-1, max(1, len(data) + shift))
    block[shift : shift + len(data)] = data
    return memoryview(block)[shift : shift + len(data)]


def read_all(store: Store, path: str) -> bytes:
    """A whole object by `read_into`."""
    buffer = bytearray(store.size(path))
    store.read_into(path, 0, memoryview(buffer))
    return bytes(buffer)


class StoreConformance:
    """Derive a class named ``Test...`` from this one and override the fixture `store`."""

    atomic_create: ClassVar[bool] = True
    """False for a store whose `create` is only a look and a write: it may have several winners in a race.

    Such a store needs an attribute ``exclusive = False``, by which the session knows it, unless its `create` goes
    over what is there.
    """
    whole_or_nothing: ClassVar[bool] = True
    """False for a store that shows a large object while it grows."""
    unkept_names: ClassVar[Collection[str]] = ()
    """Those of `ODD_NAMES` that the service itself cannot keep apart from others."""
    races: ClassVar[int] = 25
    """How many objects the writers race for; less for a service that is slow at it."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store."""
        raise NotImplementedError("override the fixture `store`")

    # -- an empty store

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        """Looking at what does not exist finds nothing, and makes nothing."""
        for folder in ("", "no", "no/such"):
            assert store.list(folder) == []
            assert store.names(folder) == []

    def test_a_missing_object_is_not_found(self, store: Store) -> None:
        """Every way to read says that there is no such object, beside others too."""
        for _ in range(2):
            for path in ("none", "folder/none"):
                with pytest.raises(StorageNotFound):
                    store.read(path, max_bytes=10)
                with pytest.raises(StorageNotFound):
                    store.read_into(path, 0, memoryview(bytearray(1)))
                with pytest.raises(StorageNotFound):
                    store.read_into(path, 0, memoryview(bytearray()))
                with pytest.raises(StorageNotFound):
                    store.size(path)
            store.put("folder/some" if not store.names("folder") else "folder/more", b"x")

    def test_it_says_where_it_is(self, store: Store) -> None:
        """The url is text for people."""
        assert store.url
        assert isinstance(store.url, str)

    # -- put

    @pytest.mark.parametrize("data", [b"", b"x", b"\0\xff\n\r" * 1000])
    def test_put_then_read(self, store: Store, data: bytes) -> None:
        """What was put is read, byte for byte."""
        store.put("folder/object", data)
        assert store.read("folder/object", max_bytes=len(data)) == data
        assert store.size("folder/object") == len(data)
        assert read_all(store, "folder/object") == data

    def test_put_never_overwrites(self, store: Store) -> None:
        """A second write to the same name is an error and changes nothing, small or large."""
        store.put("a", b"first")
        store.put_large("b", memoryview(b"first"))
        for path in ("a", "b"):
            with pytest.raises(StorageExists):
                store.put(path, b"second")
            with pytest.raises(StorageExists):
                store.put_large(path, memoryview(b"other"))
            assert store.read(path, max_bytes=100) == b"first"
        assert store.names("") == ["a", "b"]

    @pytest.mark.parametrize("shift", [0, 1, 64])
    @pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, MEBIBYTE, 3 * MEBIBYTE + 77, 4 * MEBIBYTE])
    def test_put_large_from_any_memory(self, store: Store, size: int, shift: int) -> None:
        """Large objects are whole, whatever their size and wherever their memory begins."""
        data = pattern_bytes(size)
        store.put_large("large", aligned_memory(data, shift=shift))
        assert store.size("large") == size
        assert read_all(store, "large") == data

    def test_put_large_from_read_only_memory(self, store: Store) -> None:
        """Memory that cannot be written can be stored."""
        data = pattern_bytes(2 * MEBIBYTE + 5)
        store.put_large("large", memoryview(data))
        assert read_all(store, "large") == data

    def test_put_large_does_not_keep_the_memory(self, store: Store) -> None:
        """Once the call has returned, the memory may be used again."""
        data = pattern_bytes(MEBIBYTE)
        memory = aligned_memory(data)
        store.put_large("large", memory)
        memory[:] = bytes(len(memory))
        assert read_all(store, "large") == data

    def test_put_after_delete(self, store: Store) -> None:
        """A deleted name is free again."""
        store.put("folder/object", b"first")
        store.delete("folder/object")
        store.put("folder/object", b"second")
        assert store.read("folder/object", max_bytes=100) == b"second"

    # -- create

    def test_create_is_true_once(self, store: Store) -> None:
        """The first writer wins; another loses and changes nothing; the same bytes again are ours."""
        assert store.create("attempts/1.json", b"mine") is True
        assert store.create("attempts/1.json", b"mine") is True
        assert store.create("attempts/1.json", b"else") is False
        assert store.create("attempts/1.json", b"much longer than the first") is False
        assert store.create("attempts/1.json", b"") is False
        assert store.read("attempts/1.json", max_bytes=100) == b"mine"

    def test_create_does_not_win_over_put(self, store: Store) -> None:
        """An object that was put is there for `create` too, and the other way round."""
        store.put("a", b"put")
        assert store.create("a", b"created") is False
        assert store.create("b", b"created") is True
        with pytest.raises(StorageExists):
            store.put("b", b"put")

    def test_create_after_a_lost_response(self, store: Store) -> None:
        """A writer whose answer was lost finds its own bytes and has won; another one has lost."""
        deaf = LostResponseStore(store, times=1)
        with pytest.raises(StorageUnavailable):
            deaf.create("claim", b"mine")
        assert deaf.create("claim", b"mine") is True
        assert deaf.create("claim", b"else") is False

    def test_retries_after_a_lost_response(self, store: Store) -> None:
        """Every write succeeds when it is tried again after its answer was lost."""
        data = pattern_bytes(MEBIBYTE + 3)
        calls: list[Callable[[Store], object]] = [
            lambda it: it.create("create", b"mine"),
            lambda it: it.put("put", b"mine"),
            lambda it: it.put_large("large", memoryview(data)),
            lambda it: it.replace("replace", b"mine"),
            lambda it: it.delete("put"),
        ]
        for call in calls:
            call(RetryingStore(LostResponseStore(store, times=1), sleep=lambda _seconds: None))
        assert store.names("") == ["create", "large", "replace"]
        assert read_all(store, "large") == data

    def test_create_races_have_one_winner(self, store: Store) -> None:
        """Of eight writers at the same instant exactly one is told that it won, and its bytes are there."""
        if not (self.atomic_create or self.whole_or_nothing):
            pytest.skip("a store that writes in place and without conditions has no winner")
        for number in range(self.races):
            path = f"race/{number:02d}"
            won = _race(store, path)
            found = store.read(path, max_bytes=100)
            if self.atomic_create:
                assert [found] == won
            else:
                assert found in won
        assert len(store.names("race")) == self.races

    def test_a_create_that_may_have_two_winners_is_found_out(self, store: Store) -> None:
        """A second create shows it, or the attribute `exclusive` says it: no trial finds a look and a write."""
        assert store.create("attempts/000001.json", b"mine")
        said = creates_exclusively(store)
        if self.atomic_create:
            assert said is not False
        else:
            assert said is False or store.create("attempts/000001.json", b"another's")

    # -- replace

    def test_replace(self, store: Store) -> None:
        """Replacing creates, and overwrites with longer and shorter bytes."""
        for data in (b"first", b"a longer second", b"3", b""):
            store.replace("ledger/heartbeat.json", data)
            assert store.read("ledger/heartbeat.json", max_bytes=100) == data
        assert store.names("ledger") == ["heartbeat.json"]

    # -- read

    def test_read_is_bounded(self, store: Store) -> None:
        """An object of exactly the allowed size is read; a larger one is an error that is not "not found"."""
        store.put("object", b"12345")
        assert store.read("object", max_bytes=5) == b"12345"
        assert store.read("object", max_bytes=1 << 40) == b"12345"
        for bound in (4, 1, 0):
            with pytest.raises(StorageError) as caught:
                store.read("object", max_bytes=bound)
            assert not isinstance(caught.value, (StorageNotFound, StorageUnavailable))

    def test_read_into_ranges(self, store: Store) -> None:
        """Exactly the bytes that were asked for, no matter where they begin."""
        data = pattern_bytes(10_000)
        store.put("object", data)
        for start, length in ((0, 10_000), (0, 1), (9_999, 1), (4_095, 3), (123, 0), (10_000, 0)):
            buffer = bytearray(length)
            store.read_into("object", start, memoryview(buffer))
            assert bytes(buffer) == data[start : start + length]

    def test_read_into_a_part_of_a_buffer(self, store: Store) -> None:
        """Only the given part of the memory changes."""
        store.put("object", b"12345")
        buffer = bytearray(b"........")
        store.read_into("object", 1, memoryview(buffer)[2:5])
        assert bytes(buffer) == b"..234..."

    @pytest.mark.parametrize(("start", "length"), [(0, 6), (4, 2), (5, 1), (100, 1)])
    def test_read_into_past_the_end(self, store: Store, start: int, length: int) -> None:
        """An object that ends too soon is `StorageShort`, which is neither "not found" nor "unavailable"."""
        store.put("object", b"12345")
        with pytest.raises(StorageShort):
            store.read_into("object", start, memoryview(bytearray(length)))

    def test_negative_offsets_are_refused(self, store: Store) -> None:
        """A negative offset is a mistake of the caller, not the object's end counted backwards."""
        store.put("object", b"12345")
        with pytest.raises(ValueError, match="negative"):
            store.read_into("object", -1, memoryview(bytearray(1)))

    def test_a_folder_is_no_object(self, store: Store) -> None:
        """The name of a folder is not found as an object, and deleting it deletes nothing."""
        store.put("folder/object", b"x")
        with pytest.raises(StorageNotFound):
            store.size("folder")
        with pytest.raises(StorageNotFound):
            store.read("folder", max_bytes=10)
        store.delete("folder")
        assert store.read("folder/object", max_bytes=10) == b"x"

    # -- list and names

    def test_list_and_names(self, store: Store) -> None:
        """Listings are sorted, hold what lies below the folder and nothing of its neighbours."""
        for path in ("b/2", "b/10", "a", "b/c/d/e", "bb/1", "b.json"):
            store.put(path, path.encode())
        assert [entry.path for entry in store.list("")] == ["a", "b.json", "b/10", "b/2", "b/c/d/e", "bb/1"]
        assert store.list("b") == [Entry("b/10", 4), Entry("b/2", 3), Entry("b/c/d/e", 7)]
        assert store.list("b/c") == [Entry("b/c/d/e", 7)]
        assert store.names("") == ["a", "b", "b.json", "bb"]
        assert store.names("b") == ["10", "2", "c"]
        assert store.names("b/c") == ["d"]

    def test_an_object_is_no_folder(self, store: Store) -> None:
        """Below an object lies nothing."""
        store.put("object", b"x")
        assert store.list("object") == []
        assert store.names("object") == []
        with pytest.raises(StorageNotFound):
            store.size("object/below")
        store.delete("object/below")

    def test_listings_are_fresh(self, store: Store) -> None:
        """What was written or deleted a moment ago is seen, without any cache in between."""
        assert store.names("folder") == []
        store.put("folder/a", b"x")
        assert store.names("folder") == ["a"]
        assert store.create("folder/b", b"y")
        assert [entry.path for entry in store.list("folder")] == ["folder/a", "folder/b"]
        store.delete("folder/a")
        assert store.names("folder") == ["b"]

    # -- delete and abort_uploads

    def test_delete(self, store: Store) -> None:
        """Only the one object goes; deleting it again, or what never was, is no error."""
        store.put("folder/a", b"x")
        store.put("folder/b", b"y")
        for _ in range(2):
            store.delete("folder/a")
            store.delete("none")
            store.delete("none/at/all")
        assert store.names("folder") == ["b"]
        with pytest.raises(StorageNotFound):
            store.read("folder/a", max_bytes=10)

    def test_abort_uploads_keeps_what_is_whole(self, store: Store) -> None:
        """Giving up begun writes touches no object, and may be done where nothing is."""
        store.put("folder/a", b"x")
        for folder in ("", "folder", "none/such"):
            assert store.begun(folder) == []
            store.abort_uploads(folder)
        assert store.list("") == [Entry("folder/a", 1)]

    # -- names

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_names(self, store: Store, name: str) -> None:
        """A name is a name: never a pattern, a url or an option."""
        if name in self.unkept_names:
            pytest.skip("the service cannot keep this name")
        bystander = "folder/ab0"
        store.put(bystander, b"bystander")
        path = f"{name}/{name}"
        assert store.create(path, b"mine")
        store.replace(f"{name}/again", b"1")
        assert store.read(path, max_bytes=10) == b"mine"
        assert store.names(name) == sorted(["again", name])
        assert Entry(path, 4) in store.list(name)
        store.delete(path)
        store.delete(f"{name}/again")
        assert store.list("") == [Entry(bystander, 9)]

    @pytest.mark.parametrize("path", BAD_PATHS)
    def test_bad_paths_are_refused(self, store: Store, path: str) -> None:
        """A path that leaves the run, or is spelled in two ways, is a mistake of the caller."""
        calls: list[Callable[[], object]] = [
            lambda: store.put(path, b"x"),
            lambda: store.put_large(path, memoryview(b"x")),
            lambda: store.create(path, b"x"),
            lambda: store.replace(path, b"x"),
            lambda: store.read(path, max_bytes=1),
            lambda: store.read_into(path, 0, memoryview(bytearray(1))),
            lambda: store.size(path),
            lambda: store.list(path),
            lambda: store.names(path),
            lambda: store.delete(path),
            lambda: store.begun(path),
            lambda: store.abort_uploads(path),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="path"):
                call()

    # -- readers beside writers

    def test_nothing_appears_before_it_is_whole(self, store: Store) -> None:
        """A reader beside the writer sees no object, or all of it."""
        data = pattern_bytes(4 * MEBIBYTE + 9)
        torn: list[str] = []
        for number in range(3):
            path = f"folder/large-{number}"
            done = threading.Event()

            def write(path: str = path, done: threading.Event = done) -> None:
                try:
                    store.put_large(path, aligned_memory(data))
                finally:
                    done.set()

            writer = threading.Thread(target=write)
            writer.start()
            while not done.is_set():
                torn += _look(store, path, data)
            writer.join()
            assert read_all(store, path) == data
        if self.whole_or_nothing:
            assert torn == []

    def test_replace_is_at_once(self, store: Store) -> None:
        """A reader beside `replace` sees the old or the new bytes, never neither and never a mixture."""
        versions = [bytes([number]) * 5000 for number in range(40)]
        store.replace("heartbeat", versions[0])
        done = threading.Event()

        def write() -> None:
            try:
                for version in versions:
                    store.replace("heartbeat", version)
            finally:
                done.set()

        writer = threading.Thread(target=write)
        writer.start()
        seen = set()
        while not done.is_set():
            try:
                seen.add(store.read("heartbeat", max_bytes=5000))
            except StorageError:  # what is written in place can be found half there
                assert not self.whole_or_nothing
        writer.join()
        if self.whole_or_nothing:
            assert seen <= set(versions)
        assert store.read("heartbeat", max_bytes=5000) == versions[-1]


def _race(store: Store, path: str, *, writers: int = 8) -> list[bytes]:
    """Let threads create one object at the same instant; the bytes of those that were told they won."""
    barrier = threading.Barrier(writers)
    won: list[bytes] = []

    def claim(mine: bytes) -> None:
        barrier.wait()
        if store.create(path, mine):
            won.append(mine)

    threads = [
        threading.Thread(target=claim, args=(f"writer {number}".encode(),)) for number in range(writers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return won


def _look(store: Store, path: str, data: bytes) -> list[str]:
    """What is wrong with an object that is being written, looked at right now."""
    faults = []
    try:
        size = store.size(path)
        if size != len(data):
            faults.append(f"{path} shows {size} of {len(data)} bytes")
        elif read_all(store, path) != data:
            faults.append(f"{path} shows other bytes")
    except (StorageNotFound, StorageShort) as error:
        if isinstance(error, StorageShort):
            faults.append(str(error))
    listed = [entry.size for entry in store.list("folder") if entry.path == path]
    if listed not in ([], [len(data)]):
        faults.append(f"{path} is listed with {listed}")
    if any(name.startswith(".tmp") for name in store.names("folder")):
        faults.append("a temporary file is shown")
    return faults
