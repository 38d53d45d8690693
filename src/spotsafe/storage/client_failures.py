"""What an error of a client library of an object store means: one table for each, one place.

Clients agree on the built-in types only for the common cases, and not on all of those: a missing bucket is no
missing object, and an object that exists comes as EINVAL. So the server's own word counts first, which hangs somewhere
down the chain of causes; then the error's own class, by name; the built-in types, the status, the errno, and last
the names of the classes down the chain. What stays unknown is a plain `StorageError`: it stops, and is never "there is
none".

Classes are named, not imported: none of the packages has to be installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
from spotsafe.storage.failures import class_of

# Where botocore keeps it: error.response["Error"]["Code"].
_S3: dict[type[StorageError], tuple[str, ...]] = {
    # HEAD has no body and so no code: botocore then gives the status.
    StorageNotFound: ("404", "NoSuchKey", "NotFound"),
    StorageExists: ("412", "PreconditionFailed"),
    StorageShort: ("416", "InvalidRange"),
    StorageFull: (
        "InsufficientStorage",
        "QuotaExceeded",
        "XMinioAdminBucketQuotaExceeded",
        "XMinioStorageFull",
    ),
    StorageExpired: (
        "ExpiredToken",
        "ExpiredTokenException",
        "InvalidToken",
        "RequestExpired",
        "TokenRefreshRequired",
    ),
    StorageRefused: (
        "AccessDenied",
        "AllAccessDisabled",
        "InvalidAccessKeyId",
        "InvalidObjectState",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    ),
    StorageUnavailable: (
        "BadDigest",
        "ConditionalRequestConflict",  # the answer to one of two writers at once; nothing need exist
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestLimitExceeded",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    ),
    # 404, 405 and 501 that say nothing about the object and do not pass.
    StorageError: ("EntityTooLarge", "MethodNotAllowed", "NoSuchBucket", "NoSuchUpload", "NotImplemented"),
}
# Where azure-core keeps it: error.error_code, or the header x-ms-error-code.
_AZURE: dict[type[StorageError], tuple[str, ...]] = {
    StorageNotFound: ("BlobNotFound",),
    StorageExists: ("BlobAlreadyExists", "ConditionNotMet", "UnauthorizedBlobOverwrite"),
    StorageExpired: ("InvalidAuthenticationInfo", "NoAuthenticationInformation"),
    StorageRefused: (
        "AccountIsDisabled",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "AuthorizationPermissionMismatch",
        "BlobArchived",
        "BlobBeingRehydrated",
        "BlobImmutableDueToPolicy",
        "InsufficientAccountPermissions",
        "LeaseIdMissing",
    ),
    StorageShort: ("InvalidRange",),
    StorageUnavailable: (
        "ContainerBeingDeleted",
        "InternalError",
        "Md5Mismatch",
        "OperationTimedOut",
        "ServerBusy",
    ),
    StorageError: ("ContainerDisabled", "ContainerNotFound", "ResourceNotFound"),
}
# Names of classes, of any client, that say what their status or type does not.
_NAMES: dict[type[StorageError], tuple[str, ...]] = {
    StorageExpired: ("RefreshError", "TokenRetrievalError"),
    StorageRefused: (
        "ClientAuthenticationError",
        "CredentialUnavailableError",
        "DefaultCredentialsError",
        "NoCredentialsError",
        "PartialCredentialsError",
    ),
    StorageUnavailable: (
        "BadHttpMessage",
        "ChecksumError",
        "ClientConnectionError",
        "ClientPayloadError",
        "ConnectionError",
        "CredentialRetrievalError",
        "FlexibleChecksumError",
        "HTTPClientError",
        "IncompleteReadError",
        "MetadataRetrievalError",
        "ProtocolError",
        "ResponseParserError",
        "ServerDisconnectedError",
        "ServiceRequestError",
        "ServiceResponseError",
        "TimeoutError",
        "TransportError",
    ),
}
# gcsfs says some things in words alone, in an OSError without a number. The first that fits counts.
_WORDS: dict[type[StorageError], tuple[str, ...]] = {
    StorageUnavailable: ("rateLimitExceeded", "Rate Limit Exceeded"),
    StorageRefused: ("Forbidden: ",),
}
_BUILT_IN: dict[type[StorageError], tuple[type[BaseException], ...]] = {
    StorageNotFound: (FileNotFoundError, NotADirectoryError, IsADirectoryError),
    StorageExists: (FileExistsError,),
    StorageRefused: (PermissionError,),
    StorageUnavailable: (TimeoutError, ConnectionError),
}
_STATUS: dict[type[StorageError], tuple[int, ...]] = {
    StorageNotFound: (404, 410),
    StorageExists: (409, 412),
    StorageShort: (416,),
    StorageExpired: (401,),
    StorageRefused: (403,),
    StorageFull: (507,),
    StorageUnavailable: (408, 425, 429),
    StorageError: (501, 505),
}
# Where azure-core, aiohttp and gcsfs keep the status of the server's answer.
_STATUS_NAMES = ("status_code", "status", "code")

CLASS_OF_S3_CODE = {code: kind for kind, codes in _S3.items() for code in codes}
"""The class for each code of the S3 API, and of servers that speak it."""
_CLASS_OF_CODE = {code: kind for kind, codes in _AZURE.items() for code in codes} | CLASS_OF_S3_CODE
_CLASS_OF_NAME = {name: kind for kind, names in _NAMES.items() for name in names}
_CLASS_OF_STATUS = {status: kind for kind, numbers in _STATUS.items() for status in numbers}


def class_of_client_error(error: BaseException) -> type[StorageError]:
    """The class for what a client library of an object store raised."""
    return (
        _CLASS_OF_CODE.get(_code(error))
        or _class_of_names(type(error).__mro__)
        or _class_of_names(_telling(error))
        or _class_of_type(error)
        or _class_of_answer(error)
        or _class_of_number(error)
        or _class_of_names(base for link in _causes(error) for base in type(link).__mro__)
        or _class_of_words(error)
    )


def class_of_status(status: int) -> type[StorageError]:
    """The class for the status of an answer that says nothing else."""
    kind = _CLASS_OF_STATUS.get(status)
    if kind is not None:
        return kind
    return StorageUnavailable if status >= 500 else StorageError


def _class_of_words(error: BaseException) -> type[StorageError]:
    text = str(error) if isinstance(error, OSError) else ""
    return next((kind for kind, words in _WORDS.items() if any(word in text for word in words)), StorageError)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, innermost last.

    A chain that bites its own tail ends; so does one at an error of our own, which belongs to another request.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and not isinstance(link, StorageError):
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _class_of_names(classes: Iterable[type]) -> type[StorageError] | None:
    return next((_CLASS_OF_NAME[one.__name__] for one in classes if one.__name__ in _CLASS_OF_NAME), None)


def _telling(error: BaseException) -> Iterator[type]:
    """Classes down the chain that say more than a type or a status above them.

    No credentials; and an answer that is none, to which aiohttp hangs a 400 that no server has sent.
    """
    names = {*_NAMES[StorageExpired], *_NAMES[StorageRefused], "BadHttpMessage"}
    return (base for link in _causes(error) for base in type(link).__mro__ if base.__name__ in names)


def _class_of_type(error: BaseException) -> type[StorageError] | None:
    return next((kind for kind, built_in in _BUILT_IN.items() if isinstance(error, built_in)), None)


def _class_of_answer(error: BaseException) -> type[StorageError] | None:
    status = _status(error)
    return None if status is None else class_of_status(status)


def _class_of_number(error: BaseException) -> type[StorageError] | None:
    return class_of(error.errno) if isinstance(error, OSError) and error.errno is not None else None


def _code(error: BaseException) -> str:
    """The server's own word for what is wrong; empty if there is none."""
    for link in _causes(error):
        response = getattr(link, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        code = code or getattr(link, "error_code", None)
        if code:
            return str(getattr(code, "value", code))
    return ""


def _status(error: BaseException) -> int | None:
    """The status of the server's answer."""
    for link in _causes(error):
        response = getattr(link, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            status = next((getattr(link, name, None) for name in _STATUS_NAMES if hasattr(link, name)), None)
        if isinstance(status, str) and status.isdigit():
            status = int(status)
        if isinstance(status, int) and 100 <= status <= 599:
            return status
    return None
