"""What spotsafe asks of storage: one small protocol.

Paths are relative to the run, with ``/``, without a leading one. An implementation raises only errors of
`spotsafe.errors.StorageError`'s branch, and keeps "there is none" (`StorageNotFound`) apart from "could not
look" (`StorageUnavailable`, `StorageRefused`). When a writing call returns, the bytes are durable.
`spotsafe.testing.StoreConformance` is the test suite that every store passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """An object that a listing shows."""

    path: str
    size: int
    """Bytes."""


def creates_exclusively(store: Store) -> bool | None:
    """What a store says of its `create`: the value of its attribute ``exclusive``, if it has one.

    Returns:
        True: of several writers at the same instant one wins, and the others are told. False: it looks and then
        writes, so that two may believe that they won. None: it does not know, as with a server that may ignore
        conditions; whoever depends on it has to try.
    """
    answer: bool | None = getattr(store, "exclusive", None)
    return answer


def reads_in_place(store: Store) -> bool:
    """What a store says of its `read_into`: the value of its attribute ``in_place``, false if it has none.

    Returns:
        True: a call costs no more than the copy of its bytes, as on a local disk. What belongs to several places is
        then read to each of them, instead of whole into one and copied from there.
    """
    answer: bool = getattr(store, "in_place", False)
    return answer


@runtime_checkable
class Store(Protocol):
    """Objects under one root. Safe to use from several threads.

    A store may have an attribute ``exclusive``; see `creates_exclusively`. One whose `create` looks and then
    writes must have it: no trial from outside can find that out. It may have ``in_place``; see `reads_in_place`.
    """

    @property
    def url(self) -> str:
        """Where it is, for people."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a small object under a name that nobody has written before."""
        ...

    def put_large(self, path: str, data: memoryview) -> None:
        """Write an object of any size, straight from `data` (flat bytes), visible only when it is whole.

        `data` must not change until the call returns. Page-aligned memory is written without a copy where the
        store can.
        """
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Create a small object if there is none; true if the object there now is this one.

        `data` must hold something that no other writer has (a nonce): after a lost response the object is
        read back and compared, and equality is success.
        """
        ...

    def replace(self, path: str, data: bytes) -> None:
        """Write a small object, over an older one if there is one, at once or not at all."""
        ...

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """The whole object.

        Raises:
            StorageNotFound: there is none.
            StorageError: it is larger than `max_bytes`, or could not be read.
        """
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset` on.

        Raises:
            StorageNotFound: there is none.
            StorageShort: it ends before the buffer is full.
        """
        ...

    def size(self, path: str) -> int:
        """Size of an object in bytes.

        Raises:
            StorageNotFound: there is none.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """Base names of what lies directly in a folder, objects and folders, sorted; empty if none."""
        ...

    def delete(self, path: str) -> None:
        """Delete an object; deleting one that is not there is no error."""
        ...

    def begun(self, folder: str) -> list[str]:
        """Paths below `folder` of writes that were begun and never completed, by whomever, sorted.

        As far as the store can tell: a client that shows none answers with an empty list. A path may be that of
        the object that was to be, or of a temporary one beside it.
        """
        ...

    def abort_uploads(self, folder: str) -> None:
        """Give up writes below `folder` that were begun and never completed, by whomever."""
        ...

    def list(self, folder: str) -> list[Entry]:
        """All objects below a folder (``""`` for all), sorted by path; empty if there is no such folder."""
        ...
