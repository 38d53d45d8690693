"""The store in memory gives the same strict answers as any other."""

from __future__ import annotations

import pytest

from spotsafe.errors import StorageError, StorageExists, StorageNotFound, StorageShort
from spotsafe.storage.store import Entry
from spotsafe.testing.memory import MemoryStore


def test_what_is_put_is_read() -> None:
    """Whole, in part, and by size."""
    store = MemoryStore()
    store.put("a/b", b"0123456789")
    store.put_large("a/c", memoryview(b"large"))
    buffer = bytearray(4)
    store.read_into("a/b", 3, memoryview(buffer))
    assert (store.read("a/b", max_bytes=10), bytes(buffer), store.size("a/c")) == (b"0123456789", b"3456", 5)


def test_no_name_is_put_twice() -> None:
    """A second `put` is an error and changes nothing."""
    store = MemoryStore()
    store.put("a", b"1")
    with pytest.raises(StorageExists):
        store.put("a", b"2")
    assert store.objects == {"a": b"1"}


def test_create_tells_who_was_first() -> None:
    """Only the first content wins; creating it again is still ours."""
    store = MemoryStore()
    assert store.create("a", b"1")
    assert not store.create("a", b"2")
    assert store.create("a", b"1")
    store.replace("a", b"3")
    assert store.read("a", max_bytes=1) == b"3"


def test_absence_and_ends_are_errors_of_their_own() -> None:
    """Not there, too short and too large are told apart; deleting what is not there is none."""
    store = MemoryStore()
    store.put("a", b"123")
    for absent in (lambda: store.read("b", max_bytes=9), lambda: store.size("b")):
        with pytest.raises(StorageNotFound):
            absent()
    with pytest.raises(StorageShort):
        store.read_into("a", 2, memoryview(bytearray(2)))
    with pytest.raises(StorageError, match="more than 2"):
        store.read("a", max_bytes=2)
    store.delete("a")
    store.delete("a")
    store.abort_uploads("a")
    assert store.list("") == []


def test_listing() -> None:
    """Objects below a folder, sorted, and the names that lie directly in one."""
    store = MemoryStore()
    for path in ("x/b/2", "x/a", "x/b/1", "xy", "x/c"):
        store.put(path, path.encode())
    assert store.list("x") == [Entry("x/a", 3), Entry("x/b/1", 5), Entry("x/b/2", 5), Entry("x/c", 3)]
    assert len(store.list("")) == 5
    assert store.names("x") == ["a", "b", "c"]
    assert store.names("") == ["x", "xy"]
    assert store.names("nowhere") == []


def test_copies_are_apart() -> None:
    """What happens to a copy does not happen to the store."""
    store = MemoryStore()
    store.put("a", b"1")
    other = store.copy()
    other.delete("a")
    assert (store.size("a"), other.list("")) == (1, [])
    assert other.url == store.url
