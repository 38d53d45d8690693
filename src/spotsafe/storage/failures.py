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
    StorageFull: "free some space, raise the quota, or keep fewer checkpoints",
    StorageUnavailable: "the store may answer later",
}

_BUILT_IN: dict[type[StorageError], tuple[type[BaseException], ...]] = {
    StorageNotFound: (FileNotFoundError, NotADirectoryError, IsADirectoryError),
    StorageExists: (FileExistsError,),
    StorageRefused: (PermissionError,),
    StorageUnavailable: (TimeoutError, ConnectionError),
}

# Classes of aiohttp, botocore, urllib3, requests and azure-core for "no answer came", and asyncio's timeout,
# which on Python 3.10 is not the built-in one. Named, not imported: none of the packages has to be installed.
_NO_ANSWER = frozenset(
    {
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectionError",
        "HTTPClientError",
        "IncompleteReadError",
        "ProtocolError",
        "ServiceRequestError",
        "ServiceResponseError",
        "TimeoutError",
        "TransportError",
    }
)
# Where azure-core, aiohttp and gcsfs keep the status of the server's answer.
_STATUS_NAMES = ("status_code", "status", "code")


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
    reason = os.strerror(number) if number else str(cause) or type(cause).__name__
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


def class_of_client_error(error: BaseException) -> type[StorageError]:
    """The class for what a client library of an object store raised.

    Clients agree on the built-in types only for the common cases. For the rest the server's own answer
    counts, which hangs somewhere down the chain of causes, and last the name of the client's class. Whatever
    stays unknown is a plain `StorageError`: it stops, and is never "there is none".
    """
    for kind, classes in _BUILT_IN.items():
        if isinstance(error, classes):
            return kind
    status = _http_status(error)
    if status is not None:
        return _class_of_status(status)
    if isinstance(error, OSError) and error.errno is not None:
        return class_of(error.errno)
    names = {base.__name__ for link in _causes(error) for base in type(link).__mro__}
    return StorageUnavailable if names & _NO_ANSWER else StorageError


def _class_of_status(status: int) -> type[StorageError]:
    if status in {404, 410}:
        return StorageNotFound
    if status in {409, 412}:
        return StorageExists
    if status in {401, 403}:
        return StorageRefused
    if status == 507:
        return StorageFull
    return StorageUnavailable if status in {408, 425, 429} or status >= 500 else StorageError


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, innermost last; a chain that bites its own tail ends."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _http_status(error: BaseException) -> int | None:
    """The status of the server's answer, where botocore, azure-core, aiohttp or gcsfs keep it."""
    for link in _causes(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = next((getattr(link, name, None) for name in _STATUS_NAMES if hasattr(link, name)), None)
        if isinstance(status, int) and 100 <= status <= 599:
            return status
    return None
