"""An S3 server that keeps next to nothing: what a client can do when the server costs nothing.

Small objects are kept, large ones are thrown away, and a range of one of these is bytes of a pattern that repeats
every 16 MiB. `benchmarks/store.py` starts it; run alone it does nothing.
"""

from __future__ import annotations

import random
import re
import socket
import socketserver
import sys
import threading
import urllib.parse
from dataclasses import dataclass
from xml.sax.saxutils import escape, unescape

PATTERN = 16 << 20
KEPT = 4 << 20
_CHUNK = 1 << 20


def pattern() -> bytes:
    """The bytes that large objects seem to have."""
    return random.Random(0).randbytes(PATTERN)


class Bucket:
    """Objects: bytes, or the size of what was thrown away."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes | int] = {}
        self.parts: dict[str, dict[int, int]] = {}
        self.lock = threading.Lock()
        self.twice = pattern() * 2


@dataclass(frozen=True)
class Request:
    """What a client asks; the body only if it is small."""

    method: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    size: int
    body: bytes


Answer = tuple[int, "bytes | tuple[int, int]", dict[str, str]]
"""Status, body (or the range of the pattern), headers."""


class Handler(socketserver.BaseRequestHandler):
    """One connection, request after request."""

    server: Sink

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.buffer = bytearray(_CHUNK)
        self.rest = b""
        while (head := self._head()) is not None:
            request, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = request.split(" ")
            headers = {
                name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
            }
            if headers.get("expect"):
                self.request.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            url = urllib.parse.urlsplit(target)
            query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
            size, body = self._body(headers)
            asked = Request(method, urllib.parse.unquote(url.path), query, headers, size, body)
            with self.server.bucket.lock:
                answer = self._answer(asked)
            self._send(method, *answer)

    def _head(self) -> bytes | None:
        data = self.rest
        while b"\r\n\r\n" not in data:
            more = self.request.recv(65536)
            if not more:
                return None
            data += more
        head, _, self.rest = data.partition(b"\r\n\r\n")
        return head

    def _body(self, headers: dict[str, str]) -> tuple[int, bytes]:
        """Size of the body, and the body itself if it is small."""
        left = size = int(headers.get("content-length", 0))
        begun, self.rest = self.rest[:size], self.rest[size:]
        left -= len(begun)
        kept = [begun] if size <= KEPT else []
        view = memoryview(self.buffer)
        while left:
            count = self.request.recv_into(view[: min(left, _CHUNK)])
            if not count:
                raise ConnectionError
            if size <= KEPT:
                kept.append(bytes(view[:count]))
            left -= count
        body = b"".join(kept)
        if "aws-chunked" in headers.get("content-encoding", ""):
            size = int(headers.get("x-amz-decoded-content-length", size))
            body = _unchunked(body)
        return size, body

    def _answer(self, asked: Request) -> Answer:
        if asked.method == "POST":
            return self._post(asked)
        objects, key = self.server.bucket.objects, asked.key
        if asked.method == "PUT" and "partNumber" in asked.query:
            self.server.bucket.parts[asked.query["uploadId"]][int(asked.query["partNumber"])] = asked.size
            return 200, b"", {"ETag": '"p"'}
        if asked.method == "PUT":
            objects[key] = asked.body if asked.size <= KEPT else asked.size
            return 200, b"", {"ETag": '"e"'}
        if "list-type" in asked.query or "uploads" in asked.query or key.count("/") < 2:
            return 200, self._listing(key, asked.query), {"Content-Type": "application/xml"}
        if key not in objects:
            return 404, _xml("Error", {"Code": "NoSuchKey"}), {}
        return self._object(objects[key], asked.headers.get("range"))

    def _post(self, asked: Request) -> Answer:
        bucket, query = self.server.bucket, asked.query
        if "uploads" in query:
            upload = f"u{len(bucket.parts)}"
            bucket.parts[upload] = {}
            return 200, _xml("InitiateMultipartUploadResult", {"Key": asked.key, "UploadId": upload}), {}
        if "delete" in query:
            for name in re.findall(r"<Key>(.*?)</Key>", asked.body.decode()):
                bucket.objects.pop(f"{asked.key.rstrip('/')}/{unescape(name)}", None)
            return 200, _xml("DeleteResult", {}), {}
        bucket.objects[asked.key] = sum(bucket.parts[query["uploadId"]].values())
        return 200, _xml("CompleteMultipartUploadResult", {"Key": asked.key, "ETag": "e"}), {}

    def _object(self, found: bytes | int, wanted: str | None) -> Answer:
        total = found if isinstance(found, int) else len(found)
        start, end = 0, total
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last or total) + 1, total)
        headers = {"ETag": '"e"', "Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT", "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
        body = (start, end) if isinstance(found, int) else found[start:end]
        return (206 if wanted else 200), body, headers

    def _listing(self, key: str, query: dict[str, str]) -> bytes:
        prefix = query.get("prefix", "")
        bucket = key.strip("/").split("/")[0]
        items, folders = "", set()
        for name, found in sorted(self.server.bucket.objects.items()):
            own, _, path = name.strip("/").partition("/")
            if own != bucket or not path.startswith(prefix):
                continue
            head, slash, _ = path[len(prefix) :].partition("/")
            if query.get("delimiter") and slash:
                folders.add(prefix + head + slash)
                continue
            size = found if isinstance(found, int) else len(found)
            items += f"<Contents><Key>{escape(path)}</Key><Size>{size}</Size><ETag>e</ETag>"
            items += "<LastModified>2026-11-30T00:00:00Z</LastModified></Contents>"
        items += "".join(
            f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode()

    def _send(self, method: str, status: int, body: bytes | tuple[int, int], headers: dict[str, str]) -> None:
        length = body[1] - body[0] if isinstance(body, tuple) else len(body)
        lines = [
            f"HTTP/1.1 {status} X",
            f"Content-Length: {length}",
            *(f"{k}: {v}" for k, v in headers.items()),
        ]
        self.request.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
        if method == "HEAD":
            return
        if isinstance(body, bytes):
            self.request.sendall(body)
            return
        at, end = body
        twice = memoryview(self.server.bucket.twice)
        while at < end:
            place = at % PATTERN
            count = min(end - at, PATTERN)
            self.request.sendall(twice[place : place + count])
            at += count


class Sink(socketserver.ThreadingTCPServer):
    """The server; one thread for each connection."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bucket = Bucket()

    def handle_error(self, request, client_address) -> None:
        """A client that goes away is no news."""


def _unchunked(body: bytes) -> bytes:
    data = b""
    while body:
        line, _, body = body.partition(b"\r\n")
        count = int(line.partition(b";")[0], 16)
        if not count:
            break
        data, body = data + body[:count], body[count + 2 :]
    return data


def _xml(root: str, members: dict[str, str]) -> bytes:
    inside = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in members.items())
    return f"<{root}>{inside}</{root}>".encode()


def serve() -> None:
    """Serve until the caller's pipe to us closes; our port is the first line of output."""
    sink = Sink()
    threading.Thread(target=sink.serve_forever, daemon=True).start()
    print(sink.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__" and sys.argv[1:] == ["serve"]:
    serve()
