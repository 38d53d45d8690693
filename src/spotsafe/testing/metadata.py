"""What the stand-ins for metadata services share: a server on 127.0.0.1 that a test or a person can script.

Each cloud's fake says what its service answers (`FakeMetadata.answer`); this keeps the requests, and fails on demand
in the ways that such services have been seen to fail. Standard library only.
"""

from __future__ import annotations

import collections
import socket
import struct
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar
from urllib.parse import parse_qs, urlsplit

from spotsafe.clock import Clock, SystemClock

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that was received."""

    method: str
    path: str
    """With the query."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes = b""
    status: int | None = None
    """What was answered; None: the connection was left without an answer, or is so far."""

    @property
    def place(self) -> str:
        """The path without the query."""
        return urlsplit(self.path).path

    def asks(self, name: str) -> str | None:
        """A parameter of the query; None if it is not there."""
        return next(iter(parse_qs(urlsplit(self.path).query, keep_blank_values=True).get(name, [])), None)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a service says."""

    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "text/plain"


RESET = Answer(0)
"""In place of an answer: the connection is reset. Stands in `Request.status` as 0."""


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong, until it is set otherwise. The defaults are a service in good health."""

    latency_s: float = 0.0
    """Seconds before every answer."""
    refuse_all: int | None = None
    """Every request is answered with this status."""
    most_per_s: int | None = None
    """More requests than this within a second are answered with 429."""
    truncate_json: bool = False
    """JSON stops in the middle, in an answer that is whole by its headers."""
    cut_connection: bool = False
    """The connection closes in the middle of a body."""


class FakeMetadata:
    """The service of one machine. Use it as a context manager, or `start` and `stop` it.

    Attributes:
        faults: what goes wrong; set its members at any time.
        lock: held while a request is answered. Whoever changes what is answered holds it, and notifies.
        clock: for times in answers, and for what becomes visible later.
    """

    server = "metadata"
    """What the service calls itself in the header ``Server``."""
    actions: tuple[str, ...] = ()
    """What it can announce, in the cloud's words; the usual one first."""
    faults: Faults

    def __init__(self, *, clock: Clock | None = None, port: int = 0) -> None:
        """Nothing listens yet.

        Args:
            clock: for times in answers, and for what becomes visible later.
            port: to listen on; 0 takes a free one.
        """
        self.clock: Clock = SystemClock() if clock is None else clock
        self.faults = Faults()
        self.lock = threading.Condition()
        self.closing = threading.Event()
        self._burst: list[int] = []
        self._requests: list[Request] = []
        self._asked_at: collections.deque[float] = collections.deque()
        self._port = port
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    # -- its life ---

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Listen, in a thread."""
        if self._server is None:
            self.closing.clear()
            self._server = _Server(("127.0.0.1", self._port), _handler_of(self))
            self._port = self._server.server_address[1]
            self._thread = threading.Thread(
                target=self._server.serve_forever,
                args=(0.02,),
                name=f"fake-{type(self).__name__}",
                daemon=True,
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop listening and let go of all that waits. `start` listens again, at the same port."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            self.closing.set()
            with self.lock:
                self.lock.notify_all()
            server.shutdown()
            server.server_close()
            self._thread.join()

    @property
    def url(self) -> str:
        """Where it listens, like ``http://127.0.0.1:41234``.

        Raises:
            RuntimeError: it has never been started, so that there is no port yet.
        """
        if not self._port:
            raise RuntimeError("the fake has no address before start()")
        return f"http://127.0.0.1:{self._port}"

    @property
    def environ(self) -> dict[str, str]:
        """The variables that make spotsafe, and the cloud's own libraries where they have any, ask here."""
        raise NotImplementedError

    # -- the script ---

    def notice(self, action: str, *, in_seconds: float = 120.0, after_seconds: float = 0.0) -> None:
        """Announce the end of this machine.

        Args:
            action: one of `actions`.
            in_seconds: from now to the end that is spoken of.
            after_seconds: from now until it can be seen.
        """
        raise NotImplementedError

    def cancel(self) -> None:
        """Take back what was announced."""
        raise NotImplementedError

    def fail_next(self, status: int, *, times: int = 1) -> None:
        """Answer the next `times` requests of any kind with a status, like 429 or 503."""
        with self.lock:
            self._burst += [status] * times

    # -- what was asked ---

    @property
    def requests(self) -> list[Request]:
        """Every request so far, in the order of the answers."""
        with self.lock:
            return list(self._requests)

    def wait_for_requests(self, count: int, *, patience_s: float = 30.0) -> list[Request]:
        """Block until there have been `count` requests, and return them all.

        Raises:
            TimeoutError: they did not come within `patience_s` seconds.
        """
        with self.lock:
            if not self.lock.wait_for(lambda: len(self._requests) >= count, patience_s):
                raise TimeoutError(f"{len(self._requests)} of {count} requests came")
            return list(self._requests)

    # -- answering ---

    def answer(self, request: Request) -> Answer | None:
        """What the service in good health says; None: nothing, ever. Called with `lock` held, which it may wait on."""
        raise NotImplementedError

    def take(self, request: Request) -> Answer | None:
        """What is said to a request, faults included."""
        if self.faults.latency_s:
            self.closing.wait(self.faults.latency_s)
        with self.lock:
            if self._burst:
                return Answer(self._burst.pop(0))
            if self.faults.refuse_all is not None:
                return Answer(self.faults.refuse_all)
            if self._asks_too_often():
                return Answer(429)
            return self.answer(request)

    def record(self, request: Request) -> None:
        """Keep a request; one that gets no answer holds its connection until the fake stops."""
        with self.lock:
            self._requests.append(request)
            self.lock.notify_all()
        if request.status is None:
            self.closing.wait()

    def _asks_too_often(self) -> bool:
        most, now = self.faults.most_per_s, self.clock.monotonic()
        if most is None:
            return False
        while self._asked_at and self._asked_at[0] <= now - 1:
            self._asked_at.popleft()
        self._asked_at.append(now)
        return len(self._asked_at) > most


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of what is tested; nobody has to read a traceback."""


class _Handler(BaseHTTPRequestHandler):
    fake: ClassVar[FakeMetadata]
    sys_version = ""
    protocol_version = "HTTP/1.1"

    def do_any(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        length = headers.get("content-length", "0")
        body = self.rfile.read(int(length)) if length.isdigit() else b""
        request = Request(method=self.command, path=self.path, headers=headers, body=body)
        answer = self.fake.take(request)
        self.close_connection = True
        if answer is RESET:  # before anybody learns of it
            self._reset()
        status = None if answer is None else answer.status
        self.fake.record(replace(request, status=status))
        if answer is not None and answer is not RESET:
            self._send(answer)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any  # noqa: N815 - the base class's names

    def _reset(self) -> None:
        """As a service that goes away in the middle: the client gets ECONNRESET."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def _send(self, answer: Answer) -> None:
        body = answer.body.encode()
        if self.fake.faults.truncate_json and body.startswith((b"{", b"[")):
            body = body[: len(body) // 2]
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(body)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if self.fake.faults.cut_connection else body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(self.fake.clock.wall() if timestamp is None else timestamp, usegmt=True)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Requests are recorded, not printed."""


def _handler_of(fake: FakeMetadata) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"fake": fake, "server_version": fake.server})


def serve(
    fake: FakeMetadata,
    *,
    notice_after_s: float,
    action: str,
    in_seconds: float = 120.0,
    say: Callable[[str], None] = print,
    until: threading.Event | None = None,
) -> None:
    """Run a fake for a person: says how to point a program at it, and announces the machine's end.

    Args:
        fake: not started yet.
        notice_after_s: seconds until the notice can be seen.
        action: one of the fake's.
        in_seconds: seconds between the notice and the end that it speaks of.
        say: takes each line.
        until: ends it when set; None serves until interrupted.

    Raises:
        OSError: the port cannot be listened on.
    """
    with fake:
        fake.notice(action, in_seconds=notice_after_s + in_seconds, after_seconds=notice_after_s)
        for name, value in fake.environ.items():
            say(f"export {name}={value}")
        say(f"in {notice_after_s:g} s: {action}, {in_seconds:g} s ahead")
        (threading.Event() if until is None else until).wait()
