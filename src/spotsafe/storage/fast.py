"""Uploads to S3 by obstore: the same bytes for a third of the processor time, and without the interpreter's lock.

Only large uploads. obstore has no conditional multipart upload (so it is looked whether the name is free; nobody
else writes under our names), rewrites unusual names, and does not survive a fork: in these cases, and whenever it
refuses something that boto3 may know how to do, boto3 does it.
"""

from __future__ import annotations

import logging
import os
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import obstore
from obstore import exceptions
from obstore.exceptions import GenericError
from obstore.store import S3Store as ObstoreS3

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageFull,
    StorageNotFound,
    StorageRefused,
    StorageUnavailable,
)
from spotsafe.storage import s3_transfer as transfer
from spotsafe.storage.client_failures import class_of_client_error
from spotsafe.storage.failures import storage_error
from spotsafe.storage.parts import MEBIBYTE, part_size
from spotsafe.storage.s3 import S3Store
from spotsafe.storage.s3_client import CONNECTIONS, Live
from spotsafe.storage.s3_errors import class_of_answer, class_of_s3_error

_log = logging.getLogger(__name__)

_CLASSES: dict[str, type[StorageError]] = {
    "AlreadyExistsError": StorageExists,
    "JoinError": StorageUnavailable,
    "NotFoundError": StorageNotFound,
    "PermissionDeniedError": StorageRefused,
    "PreconditionError": StorageExists,
    "UnauthenticatedError": StorageRefused,
}
# Keys that obstore sends as they are.
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.=-]+(/[A-Za-z0-9_.=-]+)*")
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_CREDENTIALS_FOR = timedelta(minutes=5)
_CONNECT_S, _PART_S = 10, 120
# What boto3 would meet too.
_FINAL = (StorageExists, StorageFull, StorageUnavailable)

_runtime_of: int | None = None
"""The process whose threads obstore uses, from its first upload on."""


class FastS3Store(S3Store):
    """An `S3Store` whose large uploads go through obstore where it can."""

    def _upload_parts(self, key: str, data: memoryview) -> None:
        live = self._bucket.live()
        store = self._obstore(key, len(data), live)
        if store is None:
            super()._upload_parts(key, data)
            return
        self._refuse_existing(key)
        try:
            obstore.put(
                store,
                key,
                data,
                use_multipart=True,
                chunk_size=part_size(len(data)),
                max_concurrency=CONNECTIONS,
            )
            return
        except BaseException as error:
            self._abort(key)
            if not isinstance(error, Exception) or isinstance(error, MemoryError):
                raise
            kind, said = class_of_obstore_error(error), str(error).partition("\n\nDebug source")[0]
            if kind in _FINAL:
                where = f"s3://{self._bucket.name}/{key}"
                raise storage_error(
                    RuntimeError(said), doing="write", path=key, where=where, kind=kind
                ) from error
        # Other credentials, another region, another way to ask: boto3 may know better, or says what is wrong.
        _log.info("%s: obstore could not write %s, boto3 tries: %s", self.url, key, said)
        super()._upload_parts(key, data)

    def _obstore(self, key: str, size: int, live: Live) -> Any:
        """A client for one upload, with the credentials and the endpoint of the boto3 client; None if there is none."""
        global _runtime_of  # noqa: PLW0603 - obstore's threads are the process's, not a store's
        if _runtime_of not in {None, os.getpid()} or not _PLAIN_KEY.fullmatch(key):
            return None
        endpoint = str(live.client.meta.endpoint_url)
        credentials, trust = live.session.get_credentials(), _trust(live, endpoint)
        if credentials is None or trust is None:
            return None
        _runtime_of = os.getpid()

        def current() -> dict[str, Any]:
            frozen = credentials.get_frozen_credentials()
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": datetime.now(timezone.utc) + _CREDENTIALS_FOR,
            }

        seconds = max(
            _PART_S, part_size(size) // MEBIBYTE
        )  # a connection that carries less is as good as none
        return _made(
            self._bucket.name,
            config={
                **_config(live.client.meta, endpoint),
                **_protection(live),
            },
            credential_provider=current,
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "connect_timeout": timedelta(seconds=_CONNECT_S),
                "timeout": timedelta(seconds=seconds),
                **trust,
            },
            retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=2 * seconds)},
        )

    def _refuse_existing(self, key: str) -> None:
        try:
            self._bucket.call("head_object", Key=key)
        except Exception as error:
            if class_of_s3_error(error) is not StorageNotFound:
                raise
            return
        raise StorageExists(f"s3://{self._bucket.name}/{key} exists already and was left as it is", path=key)

    def _abort(self, key: str) -> None:
        """Obstore aborts most uploads that fail, but not all, and not for good."""
        try:
            for upload in self._uploads(key):
                if upload["Key"] == key:
                    transfer.abort_upload(self._bucket, key, upload["UploadId"])
        except Exception as error:  # noqa: BLE001 - the error that led here counts; a later sweep aborts the upload
            _log.warning(
                "an upload of %s could not be aborted (%s); abort_uploads will try again", key, error
            )


def class_of_obstore_error(error: BaseException) -> type[StorageError]:
    """The class for what obstore raised. For most it has one class, and a text with the server's answer."""
    if not isinstance(error, GenericError):
        return _CLASSES.get(type(error).__name__) or class_of_client_error(error)
    status, code = _STATUS.search(str(error)), _CODE.search(str(error))
    if status is None:  # no answer came
        return StorageUnavailable
    return class_of_answer(code[1] if code else "", int(status[1]))


def _trust(live: Live, endpoint: str) -> dict[str, Any] | None:
    """How certificates are checked, as botocore has been told; None if obstore cannot do that."""
    verify = live.client._endpoint.http_session._verify  # noqa: SLF001 - shown nowhere else
    if verify is True or not endpoint.startswith("https://"):
        return {}
    try:
        return {"root_certificate": Path(verify).read_bytes()}
    except (OSError, TypeError):  # a folder of certificates, or none are checked at all
        return None


def _made(bucket: str, **options: Any) -> Any:
    """A client of obstore; None if this version does not know all that it is told."""
    try:
        return ObstoreS3(bucket, **options)
    except (exceptions.BaseError, TypeError, ValueError) as error:
        _log.warning("obstore is not used, pip install -U obstore may help: %s", error)
        return None


def _protection(live: Live) -> dict[str, Any]:
    """What tells the server that a part is not what was sent: a signature of its SHA-256, or else a CRC beside TLS.

    The CRC costs a small part of what the SHA-256 does. A server that refuses it is left to boto3.
    """
    if live.signs_bodies:
        return {"unsigned_payload": False}
    return {"unsigned_payload": True, **({"checksum_algorithm": "CRC64NVME"} if live.checksums else {})}


def _config(meta: Any, endpoint: str) -> dict[str, Any]:
    """Region, endpoint and style as botocore has resolved them."""
    style = (meta.config.s3 or {}).get("addressing_style", "auto")
    at_aws = ".amazonaws.com" in endpoint
    config: dict[str, Any] = {
        "region": meta.region_name or "us-east-1",
        "virtual_hosted_style_request": style == "virtual" or (at_aws and style != "path"),
    }
    return config if at_aws else {**config, "endpoint": endpoint}
