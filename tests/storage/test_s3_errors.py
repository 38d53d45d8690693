"""What botocore's errors mean: all of its classes, and the codes of its servers."""

from __future__ import annotations

import http.client
import inspect
import ssl

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
from spotsafe.storage.s3_errors import (
    class_of_answer,
    class_of_s3_error,
    code_of,
    is_in_a_circle,
    s3_translated,
)
from tests.storage.fake_s3 import client_error

exceptions = pytest.importorskip("botocore.exceptions", reason="boto3 is not installed (extra s3)")
urllib3_exceptions = pytest.importorskip("urllib3.exceptions", reason="boto3 is not installed (extra s3)")

UNAVAILABLE = {
    "ChecksumError",
    "ConnectTimeoutError",
    "ConnectionClosedError",
    "ConnectionError",
    "CredentialRetrievalError",
    "EndpointConnectionError",
    "FlexibleChecksumError",
    "HTTPClientError",
    "IncompleteReadError",
    "MetadataRetrievalError",
    "ProxyConnectionError",
    "ReadTimeoutError",
    "ResponseStreamingError",
    "SSLError",
}
REFUSED = {
    "LoginAuthorizationCodeError",
    "LoginError",
    "LoginInsufficientPermissions",
    "LoginRefreshRequired",
    "LoginTokenLoadError",
    "NoAuthTokenError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "RefreshWithMFAUnsupportedError",
    "SSOError",
    "SSOTokenLoadError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
}


def make(kind: type[Exception]) -> Exception:
    """An error of a class, without knowing what its constructor wants."""
    error = kind.__new__(kind)
    Exception.__init__(error, "made")
    return error


def classes() -> list[type[Exception]]:
    found = [one for _, one in inspect.getmembers(exceptions, inspect.isclass) if issubclass(one, Exception)]
    return [one for one in found if one.__module__ == exceptions.__name__ and not issubclass(one, Warning)]


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_class_of_botocore(kind: type[Exception]) -> None:
    """Each is told apart: may pass, refused, or a plain error that stops. None says that an object is not there."""
    found = class_of_s3_error(make(kind))
    if kind.__name__ in UNAVAILABLE:
        assert found is StorageUnavailable
    elif kind.__name__ in REFUSED:
        assert found is StorageRefused
    else:
        # What a newer botocore adds may be known by its base.
        assert found in {StorageError, StorageUnavailable, StorageRefused}
        assert found is StorageError or any(
            base.__name__ in UNAVAILABLE | REFUSED | {"EventStreamError"} for base in kind.__mro__
        )


def test_what_the_tables_here_name_is_there() -> None:
    """The classes that matter most exist under these names."""
    core = {"ConnectionError", "HTTPClientError", "NoCredentialsError", "ReadTimeoutError", "ClientError"}
    assert core <= {kind.__name__ for kind in classes()}


@pytest.mark.parametrize(
    "error",
    [
        http.client.IncompleteRead(b""),
        http.client.RemoteDisconnected(),
        ConnectionResetError(),
        TimeoutError(),
        ssl.SSLError("unexpected end"),
        urllib3_exceptions.ProtocolError("broken"),
        urllib3_exceptions.ReadTimeoutError(None, "", "slow"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_comes_from_below_botocore(error: Exception) -> None:
    """A connection that breaks while a body is read may be there again."""
    assert class_of_s3_error(error) in {StorageUnavailable, StorageError}
    if not isinstance(error, ssl.SSLError):
        assert class_of_s3_error(error) is StorageUnavailable


def test_a_wrong_certificate_does_not_pass() -> None:
    """Trying again does not make a certificate right."""
    text = "[SSL: CERTIFICATE_VERIFY_FAILED] self signed"
    assert class_of_s3_error(exceptions.SSLError(endpoint_url="x", error=text)) is StorageRefused


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("NoSuchKey", 404, StorageNotFound),
        ("404", 404, StorageNotFound),
        ("NoSuchBucket", 404, StorageError),
        ("NoSuchUpload", 404, StorageError),
        ("SomethingElse", 404, StorageError),
        ("PreconditionFailed", 412, StorageExists),
        ("412", 412, StorageExists),
        ("Odd", 412, StorageExists),
        ("ConditionalRequestConflict", 409, StorageUnavailable),
        ("OperationAborted", 409, StorageUnavailable),
        ("Odd", 409, StorageUnavailable),
        ("InvalidRange", 416, StorageShort),
        ("AccessDenied", 403, StorageRefused),
        ("SignatureDoesNotMatch", 403, StorageRefused),
        ("ExpiredToken", 400, StorageExpired),
        ("Odd", 401, StorageRefused),
        ("Odd", 403, StorageRefused),
        ("SlowDown", 503, StorageUnavailable),
        ("InternalError", 500, StorageUnavailable),
        ("InternalError", 200, StorageUnavailable),
        ("RequestTimeout", 400, StorageUnavailable),
        ("BadDigest", 400, StorageUnavailable),
        ("Odd", 429, StorageUnavailable),
        ("Odd", 502, StorageUnavailable),
        ("NotImplemented", 501, StorageError),
        ("Odd", 501, StorageError),
        ("Odd", 400, StorageError),
        ("PermanentRedirect", 301, StorageError),
        ("Odd", 507, StorageFull),
        ("QuotaExceeded", 403, StorageFull),
        ("EntityTooLarge", 400, StorageError),
    ],
)
def test_answers(code: str, status: int, kind: type[StorageError]) -> None:
    """The code counts more than the status; what is unknown is a plain error, never "not found"."""
    assert class_of_answer(code, status) is kind
    error = client_error(code, status)
    assert code_of(error) == code
    assert class_of_s3_error(error) is kind
    with pytest.raises(kind) as caught, s3_translated("read", path="a", where="s3://b/a"):
        raise error
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error
    assert caught.value.path == "a"


def test_an_earlier_answer_does_not_count() -> None:
    """A connection that breaks while an answer is being dealt with is no such answer."""
    for kind in (exceptions.HTTPClientError, exceptions.ReadTimeoutError):
        error = make(kind)
        error.__context__ = client_error("NoSuchKey", 404)
        assert class_of_s3_error(error) is StorageUnavailable


def test_a_circle_is_one_wherever_it_ends() -> None:
    """How deep the caller's stack is decides whether botocore wraps the error that ends its redirections."""
    wrapped = exceptions.HTTPClientError(error="maximum recursion depth exceeded")
    assert not is_in_a_circle(wrapped)
    wrapped.__context__ = RecursionError()
    assert is_in_a_circle(wrapped)
    assert is_in_a_circle(RecursionError())


def test_what_is_not_translated() -> None:
    """Our own errors pass, and so do a lack of memory and an interrupt."""
    for error in (StorageFull("x"), MemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, s3_translated("read", path="a", where="a"):
            raise error
        assert caught.value is error
