"""Multipart uploads to S3 by s3fs's own client, part by part.

s3fs's `pipe_file` wants the whole as `bytes`, waits for the slowest of each ten parts, and leaves the upload behind
when it is cancelled. This one copies a part at a time, and gives up what it began on every way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

from spotsafe.storage.eventloop import gather
from spotsafe.storage.listing import Pages
from spotsafe.storage.parts import Part, cut

_AT_ONCE = 6
_MARKERS = {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
_LOOKS = 5  # how often an upload that was given up is looked at: parts that were under way may still arrive


async def upload(fs: Any, path: str, data: memoryview) -> None:
    """Write a large object under a new name; it is there whole or not at all.

    Raises:
        Exception: whatever the client raises; the upload was given up then.
    """
    bucket, key, _version = fs.split_path(path)
    begun = await _call(fs, "create_multipart_upload", Bucket=bucket, Key=key)
    this = {"Bucket": bucket, "Key": key, "UploadId": begun["UploadId"]}
    etags: dict[int, str] = {}

    async def send(part: Part) -> None:
        body = bytes(data[part.start : part.start + part.length])
        answer = await _call(fs, "upload_part", PartNumber=part.number, Body=body, **this)
        etags[part.number] = answer["ETag"]

    try:
        await gather((partial(send, part) for part in cut(len(data))), at_once=_AT_ONCE)
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        await _call(
            fs, "complete_multipart_upload", MultipartUpload={"Parts": parts}, IfNoneMatch="*", **this
        )
    except BaseException:
        with suppress(Exception):  # the first error is the one to tell; a sweep finds what is left
            await asyncio.shield(_give_up(fs, this))
        raise


async def begun(fs: Any, prefix: str) -> list[str]:
    """Paths, as the file system writes them, of the uploads below `prefix` that were begun and not completed."""
    return [f"{one['Bucket']}/{one['Key']}" async for one in _begun(fs, prefix)]


async def abort(fs: Any, prefix: str) -> None:
    """Give up all uploads below `prefix`, and no others of the bucket."""
    for one in [one async for one in _begun(fs, prefix)]:
        await _give_up(fs, one)


async def _begun(fs: Any, prefix: str) -> AsyncIterator[dict[str, str]]:
    bucket, start, _version = fs.split_path(prefix + "/")
    pages = Pages(_MARKERS, where=f"the uploads below {prefix}", path="")
    after: dict[str, Any] | None = {}
    while after is not None:
        page = await _call(fs, "list_multipart_uploads", Bucket=bucket, Prefix=start, **after)
        for one in page.get("Uploads", ()):
            if one["Key"].startswith(start):  # a server that ignores the prefix shows the uploads of others
                yield {"Bucket": bucket, "Key": one["Key"], "UploadId": one["UploadId"]}
        after = pages.after(page)


async def _give_up(fs: Any, this: dict[str, str]) -> None:
    for _ in range(_LOOKS):
        try:
            await _call(fs, "abort_multipart_upload", **this)
            if not (await _call(fs, "list_parts", **this)).get("Parts"):
                return
        except FileNotFoundError:  # NoSuchUpload: gone, or completed
            return


async def _call(fs: Any, name: str, **kwargs: Any) -> dict[str, Any]:
    answer: dict[str, Any] = await fs._call_s3(name, **kwargs)  # noqa: SLF001 - its twin waits on another loop
    return answer
