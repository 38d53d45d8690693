"""A store in a bucket of S3, or of a server that speaks its protocol, through boto3.

Every request is conditional where it makes something new, and every doubt is settled by looking: a client that
repeats a write whose answer was lost finds its own object in the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageFull,
    StorageNotFound,
    StorageRefused,
    StorageShort,
    StorageUnavailable,
)
from spotsafe.storage import s3_transfer as transfer
from spotsafe.storage.failures import too_large
from spotsafe.storage.listing import Pages, bounded
from spotsafe.storage.parts import PART, Part, cut
from spotsafe.storage.paths import check_folder, check_path
from spotsafe.storage.s3_client import Bucket
from spotsafe.storage.s3_errors import code_of, s3_translated
from spotsafe.storage.store import Entry
from spotsafe.storage.writing import flat, window

Upload = Callable[[str, memoryview], None]
"""Writes a large new object under a key."""

SIGN_BODIES = (
    "if the bucket's policy asks for signed bodies (s3:x-amz-content-sha256), set "
    "`payload_signing_enabled = true` below `s3 =` in ~/.aws/config"
)
"""What to do where a write over TLS, whose body is not signed, is refused."""

# How often `create` tries when the store says "exists" and then shows nothing.
_CREATE_TRIES = 5


class S3Store:
    """Objects below ``s3://bucket/prefix``.

    Credentials, region, endpoint and the mode of checksums are found as botocore does. Uploads that were begun
    and never completed are seen and can be aborted.

    Args:
        url: ``s3://bucket`` or ``s3://bucket/prefix``.
        **options: handed to `boto3.session.Session` and its `client`, such as ``endpoint_url``.

    Raises:
        ValueError: the url names no bucket.
    """

    def __init__(self, url: str, **options: Any) -> None:
        protocol, _, rest = url.partition("://")
        name, _, prefix = rest.rstrip("/").partition("/")
        if protocol.lower() not in {"s3", "s3a"} or not name:
            raise ValueError(f"{url}: give a url like s3://bucket/run")
        self._url = url.rstrip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._bucket = Bucket(name, options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._url!r})"

    @property
    def url(self) -> str:
        """The url, without the options."""
        return self._url

    # -- writing

    def put(self, path: str, data: bytes) -> None:
        """Write a small object under a new name; the same bytes again are no error.

        Raises:
            StorageExists: the name is taken by other bytes; they were left as they are.
            StorageError: see `spotsafe.storage.s3_errors`.
        """
        self._write_new(path, memoryview(data), self._upload_whole)

    def put_large(self, path: str, data: memoryview) -> None:
        """Write an object of any size under a new name, from `data` without a copy of it; see `put`.

        What is larger than a part (16 MiB) is sent in parts, several at the same time. After any error, also one
        that interrupts, the upload is aborted.
        """
        data = flat(data)
        self._write_new(path, data, self._upload_parts if self._is_large(len(data)) else self._upload_whole)

    def create(self, path: str, data: bytes) -> bool:
        """Create a small object if there is none; true if the object there now is this one.

        Raises:
            StorageUnavailable: the store said that there is an object, and then showed none, again and again.
            StorageError: see `spotsafe.storage.s3_errors`.
        """
        view = memoryview(data)
        for _ in range(_CREATE_TRIES):
            try:
                self._writing(path, view, self._upload_whole)
                return True
            except (StorageRefused, StorageFull):
                raise
            except StorageError as error:
                failure = error
            with suppress(StorageNotFound):
                return self._holds(path, view)
            if not isinstance(failure, StorageExists):
                raise failure
        raise StorageUnavailable(f"cannot create {self._full(path)}: it keeps vanishing", path=path)

    def replace(self, path: str, data: bytes) -> None:
        """Write a small object, over an older one if there is one."""
        self._writing(path, memoryview(data), partial(transfer.upload_whole, self._bucket, new=False))

    def delete(self, path: str) -> None:
        """Delete an object; one that is not there is no error."""
        key = self._key(check_path(path))
        with suppress(StorageNotFound), self._translated("delete", path):
            self._bucket.call("delete_object", Key=key)

    def begun(self, folder: str) -> list[str]:
        """Paths of the objects below `folder` whose uploads were begun and never completed, sorted."""
        prefix, start = self._folder_key(folder), len(self._prefix)
        with self._translated("list uploads below", folder):
            return sorted({upload["Key"][start:] for upload in self._uploads(prefix)})

    def abort_uploads(self, folder: str) -> None:
        """Abort the uploads of objects below `folder` that were begun and never completed, by whomever."""
        prefix = self._folder_key(folder)
        with self._translated("abort uploads below", folder):
            for upload in self._uploads(prefix):
                transfer.abort_upload(self._bucket, upload["Key"], upload["UploadId"])

    # -- reading

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """The whole object.

        Raises:
            StorageNotFound: there is none.
            StorageError: it is larger than `max_bytes`, or could not be read.
        """
        key = self._key(check_path(path))
        with self._translated("read", path):
            data = transfer.download_whole(self._bucket, key, max_bytes=max_bytes)
        if data is None:
            raise too_large(self._full(path), path=path, max_bytes=max_bytes)
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset` (bytes) on, large ranges by several connections.

        Raises:
            StorageNotFound: there is none.
            StorageShort: it ends before the buffer is full.
        """
        view = window(offset, buffer)
        if not len(view):
            self.size(path)
        parts = cut(len(view), piece=PART)
        if len(parts) == 1:
            self._receive(path, offset, view, parts[0])
        elif parts:
            with self._translated("read", path):
                pool = self._bucket.live().pool
            transfer.in_parallel(pool, partial(self._receive, path, offset, view), parts)

    def size(self, path: str) -> int:
        """Size of an object in bytes.

        Raises:
            StorageNotFound: there is none.
        """
        key = self._key(check_path(path))
        with self._translated("look at", path):
            return int(self._bucket.call("head_object", Key=key)["ContentLength"])

    def names(self, folder: str) -> list[str]:
        """Base names of what lies directly in a folder, sorted; empty if there is no such folder."""
        prefix = self._folder_key(folder)
        with self._translated("list", folder):
            listed = self._objects("CommonPrefixes", "Contents", prefix=prefix, Delimiter="/")
            found = {one.get("Prefix") or one["Key"] for one in listed}
        return sorted({name[len(prefix) :].rstrip("/") for name in found} - {""})

    def list(self, folder: str) -> list[Entry]:
        """All objects below a folder, sorted by path; empty if there is no such folder."""
        prefix, start = self._folder_key(folder), len(self._prefix)
        with self._translated("list", folder):
            return sorted(
                Entry(one["Key"][start:], int(one["Size"]))
                for one in self._objects("Contents", prefix=prefix)
                if not one["Key"].endswith("/")  # some consoles mark folders by empty objects
            )

    # -- inside

    def _key(self, path: str) -> str:
        return self._prefix + path

    def _folder_key(self, folder: str) -> str:
        return self._key(f"{check_folder(folder)}/" if folder else "")

    def _full(self, path: str) -> str:
        return f"{self._url}/{path}" if path else self._url

    def _translated(self, doing: str, path: str) -> AbstractContextManager[None]:
        return s3_translated(doing, path=path, where=self._full(path))

    def _is_large(self, size: int) -> bool:
        """Whether an object is worth more than one request."""
        return size > PART

    def _upload_whole(self, key: str, data: memoryview) -> None:
        transfer.upload_whole(self._bucket, key, data, new=True)

    def _upload_parts(self, key: str, data: memoryview) -> None:
        transfer.upload_parts(self._bucket, key, data)

    def _writing(self, path: str, data: memoryview, upload: Upload) -> None:
        key = self._key(check_path(path))
        try:
            with self._translated("write", path):
                upload(key, data)
        except StorageRefused as error:
            answered = error.__cause__ is not None and code_of(error.__cause__)
            if not answered or self._bucket.live().signs_bodies:
                raise
            # A policy of the bucket may ask for signed bodies, and the server's answer does not say so.
            raise type(error)(f"{error}; {SIGN_BODIES}", path=error.path) from error

    def _write_new(self, path: str, data: memoryview, upload: Upload) -> None:
        try:
            self._writing(path, data, upload)
            return
        except (StorageRefused, StorageFull):
            raise
        except StorageError as error:
            failure = error
        # Whether it is ours can be seen, whatever the answer was; if not even that, the first error counts.
        with suppress(StorageError):
            if self._holds(path, data):
                return
        raise failure

    def _holds(self, path: str, data: memoryview) -> bool:
        """Whether the object is these bytes.

        Raises:
            StorageNotFound: there is none.
        """
        if self.size(path) != len(data):
            return False
        buffer = memoryview(bytearray(min(PART, len(data))))
        for part in cut(len(data), piece=PART):
            piece = buffer[: part.length]
            self.read_into(path, part.start, piece)
            if piece != data[part.start : part.start + part.length]:
                return False
        return True

    def _receive(self, path: str, offset: int, view: memoryview, part: Part) -> None:
        key = self._key(check_path(path))
        there = Part(part.number, offset + part.start, part.length)
        try:
            with self._translated("read", path):
                done = transfer.download(
                    self._bucket, key, there, view[part.start : part.start + part.length]
                )
        except StorageShort as error:
            raise self._short(path, there) from error
        if done < part.length:
            raise self._short(path, there)

    def _short(self, path: str, part: Part) -> StorageShort:
        return StorageShort(
            f"{self._full(path)} ends before the {part.length} bytes from {part.start} on that were asked for",
            path=path,
        )

    def _uploads(self, prefix: str) -> Sequence[dict[str, Any]]:
        """What was begun under keys with this prefix and never completed."""
        markers = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
        return list(self._listed("list_multipart_uploads", ("Uploads",), prefix, markers))

    def _objects(self, *members: str, prefix: str, **params: Any) -> Iterator[dict[str, Any]]:
        markers = {"NextContinuationToken": "ContinuationToken"}
        return self._listed("list_objects_v2", members, prefix, markers, **params)

    def _listed(
        self, method: str, members: Sequence[str], prefix: str, markers: Mapping[str, str], **params: Any
    ) -> Iterator[dict[str, Any]]:
        """What all pages of a listing hold in these members."""
        where, path = f"s3://{self._bucket.name}/{prefix}", prefix.removeprefix(self._prefix)
        pages = self._pages(method, Pages(markers, where=where, path=path), Prefix=prefix, **params)
        found = (one for page in pages for member in members for one in page.get(member, ()))
        return bounded(found, where=where, path=path)

    def _pages(self, method: str, pages: Pages, **params: Any) -> Iterator[dict[str, Any]]:
        more: dict[str, Any] | None = {}
        while more is not None:
            page = self._bucket.call(method, **params, **more)
            yield page
            more = pages.after(page)
