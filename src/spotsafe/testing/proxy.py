"""A proxy that spoils some of the answers of an HTTP server: what proves that a client survives its network.

::

    with FaultyProxy("http://127.0.0.1:8333") as proxy:
        proxy.add(Fault("lose_response", method="PUT", path="manifest"))
        store = FsspecStore("s3://bucket/run", endpoint_url=proxy.url, ...)
        ...
        assert proxy.fired == 1

It stands on 127.0.0.1 in front of one server, hands every request on as it came, `Host` and signature included,
and does what its faults say. Bodies are held in memory. Standard library only; plain HTTP only.
"""

from __future__ import annotations

import http.client
import re
import socket
import socketserver
import threading
import types
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

Kind = Literal["lose_response", "half_close", "refuse", "status", "delay", "cut", "shorten", "flip"]

_HOP = frozenset({"connection", "expect", "keep-alive", "proxy-connection", "te", "transfer-encoding"})
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with which requests.

    ``lose_response``: the server does it, and its answer is lost with the connection.
    ``half_close``: the server does it, and only our way back is shut: the client may go on sending.
    ``refuse``: the connection is closed, the server sees nothing.
    ``status``: the server sees nothing, the answer is `status` with `body`.
    ``delay``: the answer comes after `seconds`.
    ``cut``: the connection breaks after `keep` bytes of the answer's body.
    ``shorten``: only `keep` bytes of the body come, and the answer says that this is all.
    ``flip``: one bit in the middle of the answer's body is wrong.
    """

    kind: Kind
    method: str = ".*"
    """A regular expression that the whole method matches."""
    path: str = ""
    """A regular expression that is found in the path with its query, as the client wrote it."""
    contains: bytes = b""
    """Bytes that are found in the request's body. Google's uploads have the object's name there."""
    times: int = 1
    """How many requests are hit before all go well again."""
    skip: int = 0
    """How many requests that fit go well before."""
    status: int = 503
    body: bytes = b""
    seconds: float = 0.0
    keep: int = 0

    def fits(self, method: str, path: str, body: bytes = b"") -> bool:
        """Whether it is about such a request."""
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        return self.contains in body


class Seen(NamedTuple):
    """A request that came to the proxy."""

    method: str
    path: str
    """With its query, as the client wrote it."""
    status: int | None
    """What the server answered; None if it was not asked."""
    fault: Fault | None


@dataclass(slots=True)
class _Pending:
    fault: Fault
    skip: int
    times: int


class FaultyProxy:
    """A proxy in front of one server. Use it in a `with` block, or `start` and `stop` it.

    Args:
        target: the server's address, like ``"http://127.0.0.1:8333"``.
        faults: what goes wrong; more can be added later. For each request the first that fits and is not used up
            counts.
    """

    def __init__(self, target: str, faults: Sequence[Fault] = ()) -> None:
        parts = urlsplit(target)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError(f"the target is an address like 'http://127.0.0.1:8333', not {target!r}")
        self._host, self._port = parts.hostname, parts.port
        self._lock = threading.Lock()
        self._pending: list[_Pending] = []
        self._seen: list[Seen] = []
        self._server: _Server | None = None
        self.add(*faults)

    def __enter__(self) -> FaultyProxy:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen on a free port of 127.0.0.1."""
        self._server = _Server(self)
        threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="faulty-proxy", daemon=True
        ).start()

    def stop(self) -> None:
        """Listen no more, and close every connection."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server.drop_all()
            self._server = None

    @property
    def url(self) -> str:
        """Where clients reach the server through the proxy."""
        if self._server is None:
            raise RuntimeError("the proxy is not running; use it in a `with` block")
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def seen(self) -> list[Seen]:
        """All requests so far, in the order in which they ended."""
        with self._lock:
            return list(self._seen)

    @property
    def fired(self) -> int:
        """How many requests were spoiled so far."""
        return sum(one.fault is not None for one in self.seen)

    def add(self, *faults: Fault) -> None:
        """Let more go wrong, behind what is already to go wrong."""
        with self._lock:
            self._pending += [_Pending(fault, fault.skip, fault.times) for fault in faults]

    def clear(self) -> None:
        """Let everything go well from now on."""
        with self._lock:
            self._pending.clear()

    # -- for the handler

    def choose(self, request: _Request) -> Fault | None:
        """The fault for a request, which is used up by it."""
        with self._lock:
            for one in self._pending:
                if one.times > 0 and one.fault.fits(request.method, request.path, request.body):
                    if one.skip > 0:
                        one.skip -= 1
                        return None
                    one.times -= 1
                    return one.fault
        return None

    def ask(self, request: _Request) -> _Answer:
        """The server's answer."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_PATIENCE_S)
        try:
            connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers:
                if name.lower() not in _HOP | {"content-length"}:
                    connection.putheader(name, value)
            if request.body or request.method in {"PUT", "POST"}:
                connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body)
            answer = connection.getresponse()
            return _Answer(answer.status, answer.reason, answer.getheaders(), answer.read())
        finally:
            connection.close()

    def record(self, seen: Seen) -> None:
        """Remember a request."""
        with self._lock:
            self._seen.append(seen)


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes = field(repr=False)


class _Answer(NamedTuple):
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, proxy: FaultyProxy) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy
        self.ended = threading.Event()
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is what this is for."""

    def drop_all(self) -> None:
        self.ended.set()
        for one in list(self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Handler(socketserver.StreamRequestHandler):
    """One connection of a client: request after request until it breaks."""

    server: _Server

    def handle(self) -> None:
        while (request := self._read()) is not None:
            proxy = self.server.proxy
            fault = proxy.choose(request)
            status: int | None = None
            try:
                if fault is None or fault.kind not in {"refuse", "status"}:
                    answer = proxy.ask(request)
                    status = answer.status
                else:
                    answer = _Answer(fault.status, "as the script says", [], fault.body)
            except OSError:
                return  # the server is gone: so are we
            finally:
                proxy.record(Seen(request.method, request.path, status, fault))
            if not self._reply(request, answer, fault):
                return

    def _read(self) -> _Request | None:
        line = self.rfile.readline(65537).decode("latin-1").split()
        if len(line) != 3:
            return None
        headers: list[tuple[str, str]] = []
        while text := self.rfile.readline(65537).decode("latin-1").rstrip("\r\n"):
            name, _, value = text.partition(":")
            headers.append((name, value.strip()))
        known = {name.lower(): value for name, value in headers}
        if known.get("expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if known.get("transfer-encoding", "").lower() == "chunked":
            body = self._read_chunks()
        else:
            body = self.rfile.read(int(known.get("content-length", 0)))
        return _Request(line[0], line[1], headers, body)

    def _read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(65537).split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline(65537)
        while self.rfile.readline(65537).strip():
            pass
        return body

    def _reply(self, request: _Request, answer: _Answer, fault: Fault | None) -> bool:
        """Answer as the fault says; whether the connection goes on."""
        kind = fault.kind if fault else None
        if kind in {"lose_response", "refuse"}:
            return False
        if kind == "half_close":
            self.connection.shutdown(socket.SHUT_WR)
            while self.connection.recv(65536):
                pass
            return False
        if fault and kind == "delay" and self.server.ended.wait(fault.seconds):
            return False
        body = answer.body
        if fault and kind == "shorten":
            body = body[: fault.keep]
        if kind == "flip" and body:
            at = len(body) // 2
            body = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
        body = b"" if request.method == "HEAD" else body
        head = self._head(request, answer, len(body))
        if fault and kind == "cut":
            self.wfile.write(head + body[: fault.keep])
            return False
        self.wfile.write(head + body)
        return True

    @staticmethod
    def _head(request: _Request, answer: _Answer, length: int) -> bytes:
        lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
        told = request.method == "HEAD"  # a HEAD's length is that of the body it does not have
        lines += [
            f"{name}: {value}"
            for name, value in answer.headers
            if name.lower() not in _HOP and (told or name.lower() != "content-length")
        ]
        if not told and answer.status not in {204, 304}:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")
