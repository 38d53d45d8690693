"""A bucket in memory with the methods of boto3's client: small pages, and faults where a test wants them."""

from __future__ import annotations

import io
import itertools
import threading
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

PAGE = 2


def client_error(code: str, status: int, operation: str = "Operation") -> ClientError:
    """What boto3 raises for an answer."""
    answer = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(answer, operation)


class Stream(io.BytesIO):
    """The connection below a body."""

    def release_conn(self) -> None:
        self.released = True


class Body:
    def __init__(self, data: bytes) -> None:
        self._raw_stream = Stream(data)

    def read(self, size: int = -1) -> bytes:
        return self._raw_stream.read(size)

    def close(self) -> None:
        self._raw_stream.close()


class FakeS3:
    """Objects and uploads of one bucket.

    Attributes:
        calls: method and key of every request so far.
        before, after: called with the method's name and the request's number, from 1, before and after each; what
            they raise is what the client gets.
        late_parts: how many aborts leave the parts of an upload, as those that were under way do.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.before: Callable[[str, int], None] = lambda _name, _number: None
        self.after: Callable[[str, int], None] = lambda _name, _number: None
        self.late_parts = 0
        self._names = itertools.count()
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(type(self), f"_{name}")

        def call(*, Bucket: str, **params: Any) -> Any:
            with self._lock:
                self.calls.append((name, params))
                number = len(self.calls)
                self.before(name, number)
                result = method(self, **params)
                self.after(name, number)
                return result

        return call

    def named(self, name: str) -> list[dict[str, Any]]:
        """The requests of a method."""
        return [params for called, params in self.calls if called == name]

    def _new(self, key: str, data: bytes, condition: str | None) -> None:
        if condition and key in self.objects:
            raise client_error("PreconditionFailed", 412)
        self.objects[key] = data

    def _put_object(self, Key: str, Body: Any, IfNoneMatch: str | None = None, **_: Any) -> dict[str, Any]:
        self._new(Key, bytes(Body.read()), IfNoneMatch)
        return {"ETag": "x"}

    def _object(self, key: str, code: str) -> bytes:
        if key not in self.objects:
            raise client_error(code, 404)
        return self.objects[key]

    def _head_object(self, Key: str) -> dict[str, Any]:
        return {"ContentLength": len(self._object(Key, "404"))}

    def _get_object(self, Key: str, Range: str | None = None) -> dict[str, Any]:
        data = self._object(Key, "NoSuchKey")
        if Range is not None:
            start, end = map(int, Range.removeprefix("bytes=").split("-"))
            if start >= len(data):
                raise client_error("InvalidRange", 416)
            data = data[start : end + 1]
        return {"Body": Body(data), "ContentLength": len(data)}

    def _delete_object(self, Key: str) -> dict[str, Any]:
        self.objects.pop(Key, None)
        return {}

    def _list_objects_v2(
        self, Prefix: str, Delimiter: str = "", ContinuationToken: str = ""
    ) -> dict[str, Any]:
        found: dict[str, tuple[str, dict[str, Any]]] = {}
        for key, data in self.objects.items():
            if key.startswith(Prefix):
                head, slash, _ = key[len(Prefix) :].partition("/") if Delimiter else ("", "", "")
                folder = Prefix + head + slash
                if slash:
                    found[folder] = ("CommonPrefixes", {"Prefix": folder})
                else:
                    found[key] = ("Contents", {"Key": key, "Size": len(data)})
        left = sorted(name for name in found if name > ContinuationToken)
        page: dict[str, Any] = {"IsTruncated": len(left) > PAGE}
        for name in left[:PAGE]:
            page.setdefault(found[name][0], []).append(found[name][1])
        if page["IsTruncated"]:
            page["NextContinuationToken"] = left[PAGE - 1]
        return page

    def _create_multipart_upload(self, Key: str, **_: Any) -> dict[str, Any]:
        name = f"upload-{next(self._names):03d}"
        self.uploads[name] = (Key, {})
        return {"UploadId": name}

    def _parts(self, upload: str) -> dict[int, bytes]:
        if upload not in self.uploads:
            raise client_error("NoSuchUpload", 404)
        return self.uploads[upload][1]

    def _upload_part(self, Key: str, UploadId: str, PartNumber: int, Body: Any, **_: Any) -> dict[str, Any]:
        self._parts(UploadId)[PartNumber] = bytes(Body.read())
        return {"ETag": f"{UploadId}-{PartNumber}"}

    def _complete_multipart_upload(
        self, Key: str, UploadId: str, MultipartUpload: dict[str, Any], IfNoneMatch: str
    ) -> dict[str, Any]:
        parts = self._parts(UploadId)
        listed = [part["PartNumber"] for part in MultipartUpload["Parts"]]
        assert listed == sorted(parts)
        self._new(Key, b"".join(parts[number] for number in listed), IfNoneMatch)
        del self.uploads[UploadId]
        return {}

    def _abort_multipart_upload(self, Key: str, UploadId: str) -> dict[str, Any]:
        self._parts(UploadId)
        if self.late_parts:
            self.late_parts -= 1
        else:
            del self.uploads[UploadId]
        return {}

    def _list_parts(self, Key: str, UploadId: str) -> dict[str, Any]:
        return {"Parts": [{"PartNumber": number} for number in self._parts(UploadId)]}

    def _list_multipart_uploads(
        self, Prefix: str, KeyMarker: str = "", UploadIdMarker: str = ""
    ) -> dict[str, Any]:
        found = sorted((key, upload) for upload, (key, _) in self.uploads.items() if key.startswith(Prefix))
        left = [one for one in found if one > (KeyMarker, UploadIdMarker)]
        page: dict[str, Any] = {
            "IsTruncated": len(left) > PAGE,
            "Uploads": [{"Key": key, "UploadId": upload} for key, upload in left[:PAGE]],
        }
        if page["IsTruncated"]:
            page["NextKeyMarker"], page["NextUploadIdMarker"] = left[PAGE - 1]
        return page
