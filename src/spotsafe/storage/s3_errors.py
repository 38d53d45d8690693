"""What botocore's errors mean for a store.

The code in the server's answer says more than its status: a missing bucket is no missing object, and a
conflict of two conditional writes is no object that exists. Classes are compared by name, so that the table can be
read, and tested, without botocore.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageExpired,
    StorageFull,
    StorageRefused,
    StorageUnavailable,
)
from spotsafe.storage.client_failures import CLASS_OF_S3_CODE, class_of_client_error
from spotsafe.storage.failures import storage_error

EXPIRED = frozenset(code for code, kind in CLASS_OF_S3_CODE.items() if kind is StorageExpired)
"""Codes for credentials that were good once; a new client may find newer ones."""

_REFUSED = frozenset(
    {
        "LoginError",
        "NoAuthTokenError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "RefreshWithMFAUnsupportedError",
        "SSOError",
        "TokenRetrievalError",
    }
)
_UNAVAILABLE = frozenset(
    {
        "ChecksumError",
        "ConnectionError",
        "CredentialRetrievalError",
        "EventStreamError",
        "FlexibleChecksumError",
        "HTTPClientError",
        "HTTPError",
        "HTTPException",
        "IncompleteReadError",
        "MetadataRetrievalError",
        "ResponseStreamingError",
    }
)


def code_of(error: BaseException) -> str:
    """The code in the server's answer; empty if the error is not an answer."""
    return str(_answer(error).get("Error", {}).get("Code", ""))


def is_in_a_circle(error: BaseException) -> bool:
    """Whether a server redirects for ever: botocore follows by calling itself, and may wrap what ends that."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, RecursionError):
            return True
        found = found.__context__
    return False


def class_of_s3_error(error: BaseException) -> type[StorageError]:
    """The class for what botocore, or the connection below it, raised; `StorageError` for what is unknown."""
    if _answer(error):
        status = _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return class_of_answer(code_of(error), status)
    names = {base.__name__ for base in type(error).__mro__}
    if names & _REFUSED or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return StorageRefused
    return StorageUnavailable if names & _UNAVAILABLE else class_of_client_error(error)


def class_of_answer(code: str, status: int) -> type[StorageError]:
    """The class for what a server of S3 answered: its code if it is a known one, else the status."""
    if code in CLASS_OF_S3_CODE:
        return CLASS_OF_S3_CODE[code]
    if status in {401, 403}:
        return StorageRefused
    if status == 412:
        return StorageExists
    if status == 507:
        return StorageFull
    # Of a 409 that is not in the table nothing is known but that it may pass; the caller looks what is there.
    passes = status in {408, 409, 425, 429} or (status >= 500 and status != 501)
    return StorageUnavailable if passes else StorageError


@contextmanager
def s3_translated(doing: str, *, path: str, where: str) -> Iterator[None]:
    """Turn whatever botocore raises in the body into our tree. A lack of memory is not the store's.

    Args:
        doing: the verb, like ``"read"``.
        path: the object's path inside the run.
        where: the same place in full, for people.
    """
    try:
        yield
    except (StorageError, MemoryError):
        raise
    except Exception as cause:
        kind = class_of_s3_error(cause)
        raise storage_error(cause, doing=doing, path=path, where=where, kind=kind) from cause


def _answer(error: BaseException) -> dict[str, Any]:
    response = getattr(error, "response", None)
    return response if isinstance(response, dict) else {}
