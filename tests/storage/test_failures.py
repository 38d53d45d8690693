"""Which error means what, for the operating system and for clients of object stores."""

from __future__ import annotations

import errno
import os

import pytest

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageFull,
    StorageNotFound,
    StorageRefused,
    StorageUnavailable,
)
from spotsafe.storage.failures import class_of, storage_error, translated


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ENOENT", StorageNotFound),
        ("ENOTDIR", StorageNotFound),
        ("EEXIST", StorageExists),
        ("EACCES", StorageRefused),
        ("EPERM", StorageRefused),
        ("EROFS", StorageRefused),
        ("ENOSPC", StorageFull),
        ("EDQUOT", StorageFull),
        ("EFBIG", StorageFull),
        ("EIO", StorageUnavailable),
        ("ESTALE", StorageUnavailable),
        ("ETIMEDOUT", StorageUnavailable),
        ("EMFILE", StorageUnavailable),
        ("ENOMEM", StorageUnavailable),
        ("ECONNRESET", StorageUnavailable),
        ("EHOSTUNREACH", StorageUnavailable),
        ("EINVAL", StorageError),
        ("ENAMETOOLONG", StorageError),
        ("ELOOP", StorageError),
        ("EISDIR", StorageError),
    ],
)
def test_the_table(name: str, kind: type[StorageError]) -> None:
    """Every errno that storage shows has its class, here and through the context manager."""
    number = getattr(errno, name)
    assert class_of(number) is kind
    with pytest.raises(kind) as caught, translated("read", path="a/b", where="/run/a/b"):
        raise OSError(number, os.strerror(number))
    assert type(caught.value) is kind
    assert caught.value.errno == number
    assert caught.value.path == "a/b"
    assert os.strerror(number) in str(caught.value)
    assert str(caught.value).startswith("cannot read /run/a/b: ")


def test_only_not_found_says_not_found() -> None:
    """No errno but the two that say so may look like a missing object."""
    missing = [number for number in errno.errorcode if class_of(number) is StorageNotFound]
    assert sorted(missing) == sorted([errno.ENOENT, errno.ENOTDIR])
    assert class_of(None) is StorageError


def test_our_own_errors_pass() -> None:
    """An error of the tree is not wrapped again."""
    mine = StorageFull("full", path="x")
    with pytest.raises(StorageFull) as caught, translated("read", path="a", where="/a"):
        raise mine
    assert caught.value is mine


def test_other_errors_pass() -> None:
    """A bug, and a lack of memory, are no storage errors."""
    for error in (TypeError("bug"), MemoryError()):
        with pytest.raises(type(error)), translated("read", path="a", where="/a"):
            raise error


def test_missing_under_a_write() -> None:
    """A folder that vanished under a write says nothing about the object."""
    with (
        pytest.raises(StorageError) as caught,
        translated("write", path="a", where="/a", missing=StorageError),
    ):
        raise FileNotFoundError(errno.ENOENT, "gone")
    assert type(caught.value) is StorageError


@pytest.mark.parametrize("kind", [StorageRefused, StorageFull, StorageUnavailable])
def test_the_message_says_what_to_do(kind: type[StorageError]) -> None:
    """After the reason stands an advice."""
    error = storage_error(OSError("odd"), doing="write", path="a", where="/run/a", kind=kind)
    assert str(error).startswith("cannot write /run/a: odd; ")


def test_a_cause_without_words() -> None:
    """An exception without a message is named by its class."""
    error = storage_error(TimeoutError(), doing="read", path="a", where="/a", kind=StorageUnavailable)
    assert "TimeoutError" in str(error)
