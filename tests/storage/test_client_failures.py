"""What clients of object stores raise, in the classes of our tree: by their own code, not by our memory of it."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import Any

import pytest

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageExpired,
    StorageFull,
    StorageNotFound,
    StorageRefused,
    StorageShort,
    StorageUnavailable,
)
from spotsafe.storage.client_failures import class_of_client_error


def raised(call: Any, *args: Any, **kwargs: Any) -> Exception:
    """What a call raises."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


# -- S3: botocore's ClientError, as it is and as s3fs translates it

S3_ANSWERS = [
    ("NoSuchKey", 404, StorageNotFound),
    ("404", 404, StorageNotFound),
    ("NoSuchBucket", 404, StorageError),
    ("NoSuchUpload", 404, StorageError),
    ("PreconditionFailed", 412, StorageExists),
    ("412", 412, StorageExists),
    ("ConditionalRequestConflict", 409, StorageUnavailable),
    ("OperationAborted", 409, StorageUnavailable),
    ("InvalidRange", 416, StorageShort),
    ("AccessDenied", 403, StorageRefused),
    ("403", 403, StorageRefused),
    ("InvalidAccessKeyId", 403, StorageRefused),
    ("SignatureDoesNotMatch", 403, StorageRefused),
    ("RequestTimeTooSkewed", 403, StorageRefused),
    ("ExpiredToken", 400, StorageExpired),
    ("ExpiredTokenException", 400, StorageExpired),
    ("InvalidToken", 400, StorageExpired),
    ("TokenRefreshRequired", 400, StorageExpired),
    ("SlowDown", 503, StorageUnavailable),
    ("ServiceUnavailable", 503, StorageUnavailable),
    ("InternalError", 500, StorageUnavailable),
    ("RequestTimeout", 400, StorageUnavailable),
    ("Throttling", 400, StorageUnavailable),
    ("BadDigest", 400, StorageUnavailable),
    ("XAmzContentSHA256Mismatch", 400, StorageUnavailable),
    ("QuotaExceeded", 403, StorageFull),
    ("XMinioStorageFull", 507, StorageFull),
    ("EntityTooLarge", 400, StorageError),
    ("NotImplemented", 501, StorageError),
    ("InvalidArgument", 400, StorageError),
    ("400", 400, StorageError),
    ("SomethingNew", 503, StorageUnavailable),
    ("SomethingNew", 403, StorageRefused),
]


@pytest.mark.parametrize(("code", "status", "kind"), S3_ANSWERS)
def test_s3(code: str, status: int, kind: type[StorageError]) -> None:
    """botocore's own error, and what s3fs makes of it."""
    from botocore.exceptions import ClientError
    from s3fs.errors import translate_boto_error

    answer = {
        "Error": {"Code": code, "Message": "words"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error = ClientError(answer, "PutObject")
    assert class_of_client_error(error) is kind
    assert class_of_client_error(translate_boto_error(error)) is kind


def test_s3_without_an_answer() -> None:
    """Everything that botocore raises when no answer came may pass; no credentials will not."""
    from botocore import exceptions

    def made(name: str) -> Exception:
        words = {"endpoint_url": "http://127.0.0.1", "error": "x", "proxy_url": "x", "msg": "x"}
        words |= {"request": None, "response": None, "provider": "x", "error_msg": "x", "cred_var": "x"}
        words |= {"actual_bytes": 1, "expected_bytes": 2}
        found: Exception = getattr(exceptions, name)(**words)
        return found

    for name in (
        "ConnectTimeoutError",
        "ConnectionClosedError",
        "ConnectionError",
        "CredentialRetrievalError",
        "EndpointConnectionError",
        "HTTPClientError",
        "IncompleteReadError",
        "MetadataRetrievalError",
        "ProxyConnectionError",
        "ReadTimeoutError",
    ):
        assert class_of_client_error(made(name)) is StorageUnavailable, name
    for name in ("NoCredentialsError", "PartialCredentialsError"):
        assert class_of_client_error(made(name)) is StorageRefused, name


# -- Google: what gcsfs makes of an answer

GOOGLE_ANSWERS = [
    (404, "Not Found", StorageNotFound),
    (412, "conditionNotMet", StorageExists),
    (409, "conflict", StorageExists),
    (403, "does not have storage.objects.create access", StorageRefused),
    (403, "User Rate Limit Exceeded", StorageUnavailable),
    (401, "Invalid Credentials", StorageExpired),
    (408, "timeout", StorageUnavailable),
    (429, "slow down", StorageUnavailable),
    (416, "range", StorageShort),
    (500, "backendError", StorageUnavailable),
    (502, "bad gateway", StorageUnavailable),
    (503, "backendError", StorageUnavailable),
    (504, "gateway timeout", StorageUnavailable),
    (507, "full", StorageFull),
    (400, "invalid argument", StorageError),
    (400, "required", StorageError),
]


@pytest.mark.parametrize(("status", "words", "kind"), GOOGLE_ANSWERS)
@pytest.mark.parametrize("form", ["json", "text"])
def test_google(status: int, words: str, kind: type[StorageError], form: str) -> None:
    """gcsfs's own reading of an answer, which is an OSError without a number for 403."""
    from gcsfs.retry import validate_response

    body = json.dumps({"error": {"code": status, "message": words}}) if form == "json" else words
    assert class_of_client_error(raised(validate_response, status, body.encode(), "b/o")) is kind


def test_google_without_an_answer() -> None:
    """A login that has run out, one that is not there, and a network that fails."""
    from gcsfs.retry import ChecksumError
    from google.auth import exceptions

    assert class_of_client_error(exceptions.RefreshError("gone")) is StorageExpired
    assert class_of_client_error(exceptions.DefaultCredentialsError("none")) is StorageRefused
    assert class_of_client_error(exceptions.TransportError("down")) is StorageUnavailable
    assert class_of_client_error(ChecksumError("differs")) is StorageUnavailable


# -- Azure: what azure-core raises, and adlfs lets through

AZURE_ANSWERS = [
    ("ResourceNotFoundError", 404, "BlobNotFound", StorageNotFound),
    ("ResourceNotFoundError", 404, None, StorageNotFound),
    ("ResourceNotFoundError", 404, "ContainerNotFound", StorageError),
    ("ResourceExistsError", 409, "BlobAlreadyExists", StorageExists),
    ("ResourceModifiedError", 412, "ConditionNotMet", StorageExists),
    ("ResourceExistsError", 409, "ContainerBeingDeleted", StorageUnavailable),
    ("HttpResponseError", 409, "BlobImmutableDueToPolicy", StorageRefused),
    ("HttpResponseError", 412, "LeaseIdMissing", StorageRefused),
    ("ClientAuthenticationError", 403, "AuthenticationFailed", StorageRefused),
    ("ClientAuthenticationError", 401, "InvalidAuthenticationInfo", StorageExpired),
    ("HttpResponseError", 403, "AuthorizationPermissionMismatch", StorageRefused),
    ("HttpResponseError", 403, "UnauthorizedBlobOverwrite", StorageExists),
    ("HttpResponseError", 416, "InvalidRange", StorageShort),
    ("HttpResponseError", 500, "InternalError", StorageUnavailable),
    ("HttpResponseError", 500, "OperationTimedOut", StorageUnavailable),
    ("HttpResponseError", 503, "ServerBusy", StorageUnavailable),
    ("HttpResponseError", 400, "Md5Mismatch", StorageUnavailable),
    ("HttpResponseError", 400, "InvalidHeaderValue", StorageError),
    ("HttpResponseError", 429, None, StorageUnavailable),
]


@pytest.mark.parametrize(("name", "status", "code", "kind"), AZURE_ANSWERS)
def test_azure(name: str, status: int, code: str | None, kind: type[StorageError]) -> None:
    """The service's own code, which the storage client hangs to the error, before status and class."""
    from azure.core import exceptions

    error = getattr(exceptions, name)("words")
    error.status_code = status
    error.error_code = code
    assert class_of_client_error(error) is kind


def test_azure_without_an_answer() -> None:
    """Requests that never arrived, answers that never came, and a login that failed."""
    from azure.core import exceptions

    assert class_of_client_error(exceptions.ServiceRequestError("x")) is StorageUnavailable
    assert class_of_client_error(exceptions.ServiceResponseError("x")) is StorageUnavailable
    assert class_of_client_error(exceptions.IncompleteReadError("x")) is StorageUnavailable
    assert class_of_client_error(exceptions.ClientAuthenticationError("x")) is StorageRefused


# -- below all of them


def test_aiohttp_and_fsspec() -> None:
    """The connection under three of the clients, and fsspec's own limit of time."""
    import aiohttp
    from fsspec.exceptions import FSTimeoutError

    key: Any = None
    for error in (
        aiohttp.ClientConnectionError("x"),
        aiohttp.ClientOSError(errno.ECONNRESET, "x"),
        aiohttp.ClientPayloadError("cut"),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ServerTimeoutError("x"),
        aiohttp.ClientResponseError(key, (), status=503),
        FSTimeoutError(),
    ):
        assert class_of_client_error(error) is StorageUnavailable, error


def test_an_answer_that_is_none() -> None:
    """aiohttp calls a body that ends too soon, or a status line that is none, a 400 of the server."""
    import aiohttp
    from aiohttp.http_exceptions import BadStatusLine, ContentLengthError

    key: Any = None
    cut = aiohttp.ClientPayloadError("not completed")
    cut.__cause__ = ContentLengthError("50 of 100")
    garbled = aiohttp.ClientResponseError(key, (), status=400, message="Bad status line")
    garbled.__cause__ = BadStatusLine("<Error>")
    wrapped = OSError(errno.EIO, "by another client")
    wrapped.__cause__ = garbled
    for error in (cut, garbled, wrapped):
        assert class_of_client_error(error) is StorageUnavailable


class Botocore(Exception):
    """As botocore's ClientError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


class Azure(Exception):
    """As azure-core's HttpResponseError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
        self.status_code = status


class Gcsfs(Exception):
    """As gcsfs's HttpError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"answered {status}")
        self.code = status


class ServiceRequestError(Exception):
    """As azure-core's class of that name."""


class EndpointConnectionError(ServiceRequestError):
    """A class that derives from a known one."""


@pytest.mark.parametrize("client", [Botocore, Azure, Gcsfs])
@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, StorageNotFound),
        (401, StorageExpired),
        (403, StorageRefused),
        (409, StorageExists),
        (412, StorageExists),
        (408, StorageUnavailable),
        (429, StorageUnavailable),
        (500, StorageUnavailable),
        (503, StorageUnavailable),
        (507, StorageFull),
        (400, StorageError),
        (416, StorageShort),
        (501, StorageError),
    ],
)
def test_what_a_server_answered(client: type[Exception], status: int, kind: type[StorageError]) -> None:
    """The status decides, raised as it is or as the cause of an OSError with a poor errno, as s3fs does."""
    assert class_of_client_error(client(status)) is kind
    wrapped = OSError(errno.EINVAL, "the pre-conditions did not hold")
    wrapped.__cause__ = client(status)
    assert class_of_client_error(wrapped) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), StorageNotFound),
        (IsADirectoryError("x"), StorageNotFound),
        (FileExistsError(), StorageExists),
        (PermissionError("x"), StorageRefused),
        (TimeoutError(), StorageUnavailable),
        (asyncio.TimeoutError(), StorageUnavailable),
        (ConnectionResetError(), StorageUnavailable),
        (OSError(errno.ENOSPC, "x"), StorageFull),
        (OSError(errno.EIO, "x"), StorageUnavailable),
        (OSError("no number"), StorageError),
        (ServiceRequestError(), StorageUnavailable),
        (EndpointConnectionError(), StorageUnavailable),
        (ValueError("x"), StorageError),
        (RuntimeError("x"), StorageError),
    ],
)
def test_what_a_client_raised(error: Exception, kind: type[StorageError]) -> None:
    """Built-in types, errnos and known class names; the unknown is a plain error, never "not found"."""
    assert class_of_client_error(error) is kind


def test_a_chain_that_bites_its_tail() -> None:
    """Causes that form a ring do not hang the classification."""
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert class_of_client_error(first) is StorageError


def test_odd_statuses_are_ignored() -> None:
    """A `code` that is no HTTP status, such as a text or an exit code, decides nothing."""
    for value in ("NoSuchKey", 7, None):
        error = RuntimeError("x")
        error.code = value  # type: ignore[attr-defined]  # as clients do
        assert class_of_client_error(error) is StorageError


def test_an_error_of_ours_ends_the_chain() -> None:
    """What another request was answered, a moment before, says nothing about this one."""
    earlier = StorageExists("exists already", path="a")
    earlier.__cause__ = Botocore(412)
    error = RuntimeError("payload is not whole")
    error.__context__ = earlier
    assert class_of_client_error(error) is StorageError
