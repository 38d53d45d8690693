"""The base of all stores around stores."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from spotsafe.storage.local import LocalStore
from spotsafe.storage.remote import FsspecStore
from spotsafe.storage.store import Entry, Store, reads_in_place
from spotsafe.storage.wrapping import READS, WRITES, Operation, WrappingStore
from spotsafe.testing.memory import MemoryStore

T = TypeVar("T")

METHODS = {
    name for name, value in vars(Store).items() if inspect.isfunction(value) and not name.startswith("_")
}


class Noting(WrappingStore):
    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.noted: list[Operation] = []

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        self.noted.append(operation)
        return super().around(operation, call)


def test_the_names_of_operations_are_those_of_the_protocol() -> None:
    """Every method of the protocol is in exactly one of the two sets."""
    assert WRITES | READS == METHODS
    assert not WRITES & READS


def test_signatures_are_those_of_the_protocol() -> None:
    """A store of ours takes exactly what the protocol says, by the same names."""
    for kind in (WrappingStore, LocalStore, FsspecStore):
        for name in METHODS:
            expected = inspect.signature(getattr(Store, name))
            assert inspect.signature(getattr(kind, name)) == expected, (kind, name)


def test_every_method_goes_through_around_once(tmp_path: Path) -> None:
    """Each call is one operation with its name and path, and its result comes back."""
    store = Noting(LocalStore(tmp_path))
    buffer = bytearray(2)
    store.put("a/put", b"12")
    store.put_large("a/large", memoryview(b"123"))
    assert store.create("a/create", b"1") is True
    store.replace("a/replace", b"1")
    assert store.read("a/put", max_bytes=2) == b"12"
    store.read_into("a/large", 1, memoryview(buffer))
    assert bytes(buffer) == b"23"
    assert store.size("a/large") == 3
    assert store.names("a") == ["create", "large", "put", "replace"]
    assert store.list("a")[0] == Entry("a/create", 1)
    store.delete("a/put")
    assert store.begun("a") == []
    store.abort_uploads("a")
    assert store.noted == [
        Operation("put", "a/put"),
        Operation("put_large", "a/large"),
        Operation("create", "a/create"),
        Operation("replace", "a/replace"),
        Operation("read", "a/put"),
        Operation("read_into", "a/large"),
        Operation("size", "a/large"),
        Operation("names", "a"),
        Operation("list", "a"),
        Operation("delete", "a/put"),
        Operation("begun", "a"),
        Operation("abort_uploads", "a"),
    ]
    assert store.url == str(tmp_path)
    assert len(store.noted) == 12


def test_what_the_inner_store_says_of_itself_stays(tmp_path: Path) -> None:
    """A local disk is read in place, through any number of wrappers; one that says nothing is not."""
    assert reads_in_place(WrappingStore(WrappingStore(LocalStore(tmp_path))))
    assert not reads_in_place(WrappingStore(MemoryStore()))
