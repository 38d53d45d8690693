"""Multipart uploads by s3fs: little memory, and nothing left behind."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from spotsafe.storage import uploads
from spotsafe.storage.parts import cut


class FakeS3:
    """Answers the calls of s3fs's client; a test can make one of them fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.uploads: list[dict[str, str]] = []
        self.parts: dict[int, bytes] = {}
        self.late: list[list[int]] = []
        self.fail: dict[str, BaseException] = {}
        self.under_way = self.most = 0

    @staticmethod
    def split_path(path: str) -> tuple[str, str, None]:
        bucket, _, key = path.partition("/")
        return bucket, key, None

    async def _call_s3(self, name: str, **kwargs: Any) -> dict[str, Any]:
        self.calls.append((name, kwargs))
        if name in self.fail:
            raise self.fail[name]
        return await getattr(self, name)(**kwargs) or {}

    async def create_multipart_upload(self, Bucket: str, Key: str) -> dict[str, str]:
        self.uploads.append({"Bucket": Bucket, "Key": Key, "UploadId": "1"})
        return {"UploadId": "1"}

    async def upload_part(self, PartNumber: int, Body: bytes, **_this: str) -> dict[str, str]:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        self.under_way -= 1
        self.parts[PartNumber] = Body
        return {"ETag": f"tag-{PartNumber}"}

    async def complete_multipart_upload(self, **_kwargs: Any) -> None:
        self.uploads.clear()

    async def abort_multipart_upload(self, UploadId: str, **_this: str) -> None:
        if not self.late:
            self.uploads = [one for one in self.uploads if one["UploadId"] != UploadId]

    async def list_parts(self, UploadId: str, **_this: str) -> dict[str, Any]:
        if self.late:
            return {"Parts": self.late.pop()}
        raise FileNotFoundError("NoSuchUpload")

    async def list_multipart_uploads(self, Prefix: str, KeyMarker: str = "", **_rest: str) -> dict[str, Any]:
        found = sorted(self.uploads, key=lambda one: one["Key"])
        rest = [one for one in found if one["Key"] > KeyMarker]
        page = rest[:2]
        more = len(rest) > 2
        markers = {"NextKeyMarker": page[-1]["Key"], "NextUploadIdMarker": "x"} if more else {}
        return {"Uploads": page, "IsTruncated": more, **markers}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "cut", partial(cut, piece=10))


@pytest.mark.usefixtures("small_parts")
def test_parts_are_whole_in_order_and_few_at_a_time() -> None:
    """All bytes arrive, the list of parts is sorted, and completing carries the condition."""
    fs, data = FakeS3(), bytes(range(256)) * 2
    asyncio.run(uploads.upload(fs, "bucket/run/large", memoryview(data)))
    assert b"".join(fs.parts[number] for number in sorted(fs.parts)) == data
    assert fs.most == 6
    name, last = fs.calls[-1]
    assert name == "complete_multipart_upload"
    assert last["IfNoneMatch"] == "*"
    assert [part["PartNumber"] for part in last["MultipartUpload"]["Parts"]] == list(range(1, 53))
    assert fs.uploads == []


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("call", ["upload_part", "complete_multipart_upload"])
@pytest.mark.parametrize("error", [OSError("no"), asyncio.CancelledError(), KeyboardInterrupt()])
def test_every_way_out_gives_the_upload_up(call: str, error: BaseException) -> None:
    """Also a cancellation, which no `except Exception` sees; again, while parts still arrive."""
    fs = FakeS3()
    fs.fail[call] = error
    fs.late = [[1], [1, 2]]
    with pytest.raises(type(error)):
        asyncio.run(uploads.upload(fs, "bucket/run/large", memoryview(bytes(50))))
    assert fs.uploads == []
    assert [name for name, _ in fs.calls].count("abort_multipart_upload") == 3


def test_only_our_own_uploads_are_seen_and_given_up() -> None:
    """Those of other runs stay, even if the server ignores the prefix; pages are followed."""
    fs = FakeS3()
    keys = ["other/a", "run-2/b", "run/c", "run/d", "run/e", "zzz"]
    fs.uploads = [{"Bucket": "bucket", "Key": key, "UploadId": key} for key in keys]
    assert asyncio.run(uploads.begun(fs, "bucket/run")) == ["bucket/run/c", "bucket/run/d", "bucket/run/e"]
    asyncio.run(uploads.abort(fs, "bucket/run"))
    assert [one["Key"] for one in fs.uploads] == ["other/a", "run-2/b", "zzz"]
