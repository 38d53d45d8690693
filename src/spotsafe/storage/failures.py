"""What an operating system's error means for a store: one table, one place.

The classes matter more than the texts: only `StorageUnavailable` is tried again, and only `StorageNotFound`
says that the object is not there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageExpired,
    StorageFull,
    StorageNotFound,
    StorageRefused,
    StorageUnavailable,
)

_CLASSES: dict[type[StorageError], tuple[int, ...]] = {
    # ENOTDIR: a part of the path is a file, so nothing can lie below it.
    StorageNotFound: (errno.ENOENT, errno.ENOTDIR),
    StorageExists: (errno.EEXIST,),
    StorageRefused: (errno.EACCES, errno.EPERM, errno.EROFS),
    StorageFull: (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    StorageUnavailable: (
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.EREMOTEIO,
        errno.ENOLINK,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOBUFS,
        errno.EPIPE,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.ECONNABORTED,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENETRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    ),
}
_CLASS_OF = {number: kind for kind, numbers in _CLASSES.items() for number in numbers}

_ADVICE: dict[type[StorageError], str] = {
    StorageExists: "what is there was left as it is",
    StorageRefused: "check the permissions and who owns it",
    StorageExpired: "get new ones, then start again",
    StorageFull: "free some space, raise the quota, or keep fewer checkpoints",
    StorageUnavailable: "the store may answer later",
}


def class_of(number: int | None) -> type[StorageError]:
    """The class of error that an errno stands for; `StorageError` itself for one that is not in the table."""
    return StorageError if number is None else _CLASS_OF.get(number, StorageError)


def storage_error(
    cause: BaseException, *, doing: str, path: str, where: str, kind: type[StorageError]
) -> StorageError:
    """An error of our tree that says what was tried, where, why it failed and what to do.

    Args:
        cause: the error underneath; the caller chains it.
        doing: the verb, like ``"read"``.
        path: the object's path inside the run.
        where: the same place in full, for people.
        kind: the class to make.
    """
    number = cause.errno if isinstance(cause, OSError) else None
    reason = (cause.strerror or os.strerror(number)) if isinstance(cause, OSError) and number else str(cause)
    reason = reason or type(cause).__name__
    advice = _ADVICE.get(kind)
    error = kind(f"cannot {doing} {where}: {reason}" + (f"; {advice}" if advice else ""), path=path)
    error.errno = number
    return error


@contextmanager
def translated(
    doing: str, *, path: str, where: str, missing: type[StorageError] = StorageNotFound
) -> Iterator[None]:
    """Turn every `OSError` of the body into one of our tree, with the original as its cause.

    Args:
        doing: the verb, like ``"read"``.
        path: the object's path inside the run.
        where: the same place in full, for people.
        missing: the class for "no such file". For a write it is `StorageError`: a folder that vanished under
            a write says nothing about the object.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as cause:
        kind = class_of(cause.errno)
        kind = missing if kind is StorageNotFound else kind
        raise storage_error(cause, doing=doing, path=path, where=where, kind=kind) from cause


def too_large(where: str, *, path: str, max_bytes: int) -> StorageError:
    """The error for an object of more bytes than a file of its name can have.

    Args:
        where: the object, for people.
        path: its path in the store.
        max_bytes: what it may have.
    """
    reason = f"is larger than the {max_bytes} bytes it may have; it is no file of this run's format"
    return StorageError(f"{where} {reason}", path=path)
