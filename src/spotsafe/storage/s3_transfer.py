"""Large objects to and from S3: several parts at the same time, none left behind.

A part that fails ends the transfer, but only when no other part is under way any more: they use the caller's
memory, and a part that arrives behind an abort would stay in the bucket, unseen and paid for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

from spotsafe.storage.parts import Part, cut
from spotsafe.storage.s3_client import Bucket, View
from spotsafe.storage.s3_errors import code_of

T = TypeVar("T")

_log = logging.getLogger(__name__)
# How often an upload is aborted until the server shows none of its parts.
_ABORTS = 5


def upload_whole(bucket: Bucket, key: str, data: memoryview, *, new: bool) -> None:
    """One request for the whole object.

    Args:
        bucket: where to.
        key: the object.
        data: flat bytes.
        new: refuse if there is an object.
    """
    body = View(data)
    params: dict[str, Any] = {"IfNoneMatch": "*"} if new else {}
    if bucket.live().checksums:
        params["ChecksumCRC32"] = body.checksum()
    bucket.call("put_object", Key=key, Body=body, **params)


def upload_parts(bucket: Bucket, key: str, data: memoryview) -> None:
    """A new object in parts, which is there when the last request is answered. On any error nothing is left.

    Args:
        bucket: where to.
        key: the object; refused if there is one.
        data: flat bytes.
    """
    live = bucket.live()
    how = {"ChecksumAlgorithm": "CRC32"} if live.checksums else {}
    upload = bucket.call("create_multipart_upload", Key=key, **how)["UploadId"]
    try:
        done = in_parallel(
            live.pool,
            lambda part: _upload_part(bucket, key, upload, part, data, checksum=live.checksums),
            cut(len(data)),
        )
        bucket.call(
            "complete_multipart_upload",
            Key=key,
            UploadId=upload,
            MultipartUpload={"Parts": done},
            IfNoneMatch="*",
        )
    except BaseException:
        _abort_quietly(bucket, key, upload)
        raise


def abort_upload(bucket: Bucket, key: str, upload: str) -> None:
    """Abort an upload until the server shows none of its parts: one that was under way may land behind an abort."""
    for _ in range(_ABORTS):
        try:
            bucket.call("abort_multipart_upload", Key=key, UploadId=upload)
            if not bucket.call("list_parts", Key=key, UploadId=upload).get("Parts"):
                return
        except Exception as error:
            if code_of(error) == "NoSuchUpload":
                return
            raise
    _log.warning("parts of an aborted upload of %s are still shown; abort_uploads will try again", key)


def download_whole(bucket: Bucket, key: str, *, max_bytes: int) -> bytes | None:
    """The whole object; None if there are more than `max_bytes` of it, whatever the server had announced."""
    answer = bucket.call("get_object", Key=key)
    body, data = answer["Body"], bytearray()
    try:
        if int(answer.get("ContentLength", 0)) > max_bytes:
            return None
        # To the very end: only there botocore compares the length and the checksum.
        while piece := body.read(max_bytes + 1 - len(data)):
            data += piece
            if len(data) > max_bytes:
                return None
    finally:
        body.close()
    return bytes(data)


def download(bucket: Bucket, key: str, part: Part, buffer: memoryview) -> int:
    """Receive a range straight into memory; how many bytes came.

    Args:
        bucket: where from.
        key: the object.
        part: which of its bytes; `start` counts from the object's first.
        buffer: flat, `part.length` bytes.

    Raises:
        ConnectionError: the connection ended before the bytes that the server had announced.
    """
    end = part.start + part.length - 1
    answer = bucket.call("get_object", Key=key, Range=f"bytes={part.start}-{end}")
    body, announced = answer["Body"], int(answer["ContentLength"])
    try:
        if announced > part.length:
            raise ValueError("the server ignores ranges; parts of objects cannot be read")
        _receive(body, buffer[:announced])
    finally:
        body.close()
    return announced


def _receive(body: Any, buffer: memoryview) -> None:
    """Fill `buffer` from below botocore's own check, which is for whole objects: readers have their own digests.

    `readinto` of botocore and of urllib3 reads and then copies; that of the HTTP response below them does not.
    """
    stream = body._raw_stream  # noqa: SLF001 - see above
    source, done = getattr(stream, "_fp", stream), 0
    while done < len(buffer):
        count = source.readinto(buffer[done:])
        if not count:
            raise ConnectionError(f"the connection ended after {done} of {len(buffer)} bytes")
        done += count
    stream.release_conn()  # all is read: the next request may use the connection


def in_parallel(pool: ThreadPoolExecutor, work: Callable[[Part], T], parts: Iterable[Part]) -> list[T]:
    """Results in order. An error is raised when nothing is under way any more; also one that interrupts us."""
    jobs = [pool.submit(work, part) for part in parts]
    try:
        return [job.result() for job in jobs]
    except BaseException:
        for job in jobs:
            job.cancel()
        wait(jobs)
        raise


def _upload_part(
    bucket: Bucket, key: str, upload: str, part: Part, data: memoryview, *, checksum: bool
) -> dict[str, Any]:
    body = View(data[part.start : part.start + part.length])
    sums = {"ChecksumCRC32": body.checksum()} if checksum else {}
    answer = bucket.call("upload_part", Key=key, UploadId=upload, PartNumber=part.number, Body=body, **sums)
    return {"PartNumber": part.number, "ETag": answer["ETag"], **sums}


def _abort_quietly(bucket: Bucket, key: str, upload: str) -> None:
    try:
        abort_upload(bucket, key, upload)
    except Exception as error:  # noqa: BLE001 - the error that led here counts; a later sweep aborts the upload
        _log.warning("an upload of %s could not be aborted (%s); abort_uploads will try again", key, error)
