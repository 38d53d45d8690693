"""A stand-in for the EC2 instance metadata service, on 127.0.0.1, that a test or a person can script.

::

    with FakeAwsMetadata() as aws:
        process = subprocess.Popen([sys.executable, "train.py"], env={**os.environ, **aws.environ})
        aws.notice("terminate", in_seconds=120)

It answers as the Amazon EC2 User Guide says the real one does ("Use the Instance Metadata Service to access
instance metadata", "Spot Instance interruption notices"), and fails on demand in the ways it has been seen to
fail. Standard library only.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from spotsafe.clock import Clock, SystemClock

TOKEN_PATH = "/latest/api/token"  # noqa: S105 - a path, not a secret
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 - a header's name
LONGEST_TTL_S = 21600

INSTANCE_ACTION = "spot/instance-action"
TERMINATION_TIME = "spot/termination-time"
REBALANCE = "events/recommendations/rebalance"
LIFE_CYCLE = "instance-life-cycle"

_KEY_PATH = re.compile(r"/(?:latest|\d{4}-\d\d-\d\d)/meta-data/(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that was received."""

    method: str
    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    status: int | None
    """What was answered; None: the connection was left without an answer."""


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong, until it is set otherwise. The defaults are a service in good health."""

    latency_s: float = 0.0
    """Seconds before every answer."""
    drop_put: bool = False
    """Token requests are never answered, as beyond the hop limit of a container's network."""
    refuse_put: int | None = None
    """Token requests are answered with this status: 403 where the service is off, 404 or 405 elsewhere."""
    refuse_tokens: bool = False
    """Every token is refused with 401, fresh ones too."""
    refuse_all: int | None = None
    """Every request is answered with this status."""
    token: str | None = None
    """Given out in place of a real token."""
    truncate_json: bool = False
    """JSON stops in the middle, in an answer that is whole by its headers."""
    cut_connection: bool = False
    """The connection closes in the middle of a body."""


@dataclass(slots=True)
class _Value:
    body: str
    visible_from: float


class FakeAwsMetadata:
    """The service of one instance. Use it as a context manager, or `start` and `stop` it.

    Attributes:
        faults: what goes wrong; set its members at any time.
    """

    def __init__(self, *, clock: Clock | None = None, tokens_required: bool = True, port: int = 0) -> None:
        """Nothing listens yet.

        Args:
            clock: for times in answers, for token lifetimes and for what becomes visible later.
            tokens_required: ``HttpTokens=required``, IMDSv2 only; False answers without a token, too.
            port: to listen on; 0 takes a free one.
        """
        self._clock: Clock = SystemClock() if clock is None else clock
        self._service = _Service(clock=self._clock, tokens_required=tokens_required)
        self.faults = self._service.faults
        self._port = port
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> FakeAwsMetadata:
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
            self._service.closing.clear()
            self._server = _Server(("127.0.0.1", self._port), _handler_of(self._service))
            self._port = self._server.server_address[1]
            self._thread = threading.Thread(
                target=self._server.serve_forever, args=(0.02,), name="fake-aws-metadata", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop listening and let go of all that waits. `start` listens again, at the same port."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            self._service.closing.set()
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
        """The variable that makes spotsafe, and every AWS SDK, ask here."""
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url}

    def notice(
        self, action: str = "terminate", *, in_seconds: float = 120.0, after_seconds: float = 0.0
    ) -> None:
        """Mark the instance for an interruption.

        Args:
            action: ``terminate``, ``stop`` or ``hibernate``.
            in_seconds: from now to the interruption; negative gives the stale notice of one that failed.
            after_seconds: from now until the notice can be seen.
        """
        text = json.dumps({"action": action, "time": self._time(in_seconds)}, separators=(",", ":"))
        self.set_key(INSTANCE_ACTION, text, after_seconds=after_seconds)
        self.set_key(TERMINATION_TIME, self._time(in_seconds), after_seconds=after_seconds)

    def rebalance(self, *, after_seconds: float = 0.0) -> None:
        """Recommend to rebalance."""
        text = json.dumps({"noticeTime": self._time(after_seconds)}, separators=(",", ":"))
        self.set_key(REBALANCE, text, after_seconds=after_seconds)

    def cancel(self) -> None:
        """Take back the interruption and the recommendation."""
        for key in (INSTANCE_ACTION, TERMINATION_TIME, REBALANCE):
            self.set_key(key, None)

    def set_key(self, key: str, body: str | None, *, after_seconds: float = 0.0) -> None:
        """Set any key below ``meta-data/``; None removes it, so that it answers 404."""
        with self._service.lock:
            if body is None:
                self._service.values.pop(key, None)
            else:
                self._service.values[key] = _Value(body, self._clock.monotonic() + after_seconds)

    def fail_next(self, status: int, *, times: int = 1) -> None:
        """Answer the next `times` requests of any kind with a status, like 429 or 503."""
        with self._service.lock:
            self._service.burst += [status] * times

    def expire_tokens(self, *, after_uses: int = 0) -> None:
        """Refuse all tokens given out so far with 401, after `after_uses` more uses."""
        with self._service.lock:
            self._service.uses_left = after_uses or None
            if after_uses == 0:
                self._service.tokens.clear()

    @property
    def requests(self) -> list[Request]:
        """Every request so far, in the order of the answers."""
        with self._service.lock:
            return list(self._service.requests)

    def wait_for_requests(self, count: int, *, patience_s: float = 30.0) -> list[Request]:
        """Block until there have been `count` requests, and return them all.

        Raises:
            TimeoutError: they did not come within `patience_s` seconds.
        """
        with self._service.lock:
            if not self._service.lock.wait_for(lambda: len(self._service.requests) >= count, patience_s):
                raise TimeoutError(f"{len(self._service.requests)} of {count} requests came")
            return list(self._service.requests)

    def _time(self, in_seconds: float) -> str:
        at = datetime.fromtimestamp(self._clock.wall() + in_seconds, tz=timezone.utc)
        return at.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class _Service:
    """What the service knows and answers. Scripts and requests change it; both hold `lock`."""

    def __init__(self, *, clock: Clock, tokens_required: bool) -> None:
        self.lock = threading.Condition()
        self.faults = Faults()
        self.values = {LIFE_CYCLE: _Value("spot", float("-inf"))}
        self.tokens: dict[str, float] = {}
        self.uses_left: int | None = None
        self.burst: list[int] = []
        self.requests: list[Request] = []
        self.closing = threading.Event()
        self.clock = clock
        self._tokens_required = tokens_required

    def answer(self, method: str, path: str, headers: Mapping[str, str]) -> _Answer | None:
        """What the service says to a request; None: nothing, ever."""
        if self.faults.latency_s:
            self.closing.wait(self.faults.latency_s)
        if method == "PUT" and self.faults.drop_put:
            return None
        with self.lock:
            if self.burst:
                return _Answer(self.burst.pop(0))
            if self.faults.refuse_all is not None:
                return _Answer(self.faults.refuse_all)
            if method == "PUT":
                return self._give_token(path, headers)
            if method in {"GET", "HEAD"}:
                return self._read_key(path, headers)
            return _Answer(405)

    def record(self, method: str, path: str, headers: Mapping[str, str], status: int | None) -> None:
        """Keep a request; one that gets no answer holds its connection until the fake stops."""
        with self.lock:
            self.requests.append(Request(method=method, path=path, headers=headers, status=status))
            self.lock.notify_all()
        if status is None:
            self.closing.wait()

    def _give_token(self, path: str, headers: Mapping[str, str]) -> _Answer:
        if self.faults.refuse_put is not None:
            return _Answer(self.faults.refuse_put)
        if path != TOKEN_PATH or "x-forwarded-for" in headers:
            return _Answer(403)
        ttl = headers.get(TTL_HEADER.lower(), "")
        if not re.fullmatch("[0-9]{1,5}", ttl) or not 1 <= int(ttl) <= LONGEST_TTL_S:
            return _Answer(400)
        token = secrets.token_urlsafe(40) + "==" if self.faults.token is None else self.faults.token
        self.tokens[token] = self.clock.monotonic() + int(ttl)
        return _Answer(200, token, {TTL_HEADER: ttl})

    def _read_key(self, path: str, headers: Mapping[str, str]) -> _Answer:
        token = headers.get(TOKEN_HEADER.lower())
        if (token is not None or self._tokens_required) and not self._accepts(token):
            return _Answer(401)
        found = _KEY_PATH.fullmatch(path)
        value = self.values.get(found.group(1)) if found else None
        if value is None or self.clock.monotonic() < value.visible_from:
            return _Answer(404)
        return _Answer(200, value.body)

    def _accepts(self, token: str | None) -> bool:
        expires = None if token is None else self.tokens.get(token)
        if expires is None or self.clock.monotonic() >= expires or self.faults.refuse_tokens:
            return False
        if self.uses_left is not None:
            if self.uses_left == 0:
                self.tokens.clear()
                self.uses_left = None
                return False
            self.uses_left -= 1
        return True


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up are part of what is tested; nobody has to read a traceback."""


def _handler_of(service: _Service) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server_version = "EC2ws"
        sys_version = ""
        protocol_version = "HTTP/1.1"

        def do_any(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            answer = service.answer(self.command, self.path, headers)
            service.record(self.command, self.path, headers, None if answer is None else answer.status)
            self.close_connection = True
            if answer is not None:
                self._send(answer)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any  # noqa: N815 - the base class's names

        def _send(self, answer: _Answer) -> None:
            body = answer.body.encode()
            if service.faults.truncate_json and body.startswith(b"{"):
                body = body[: len(body) // 2]
            self.send_response(answer.status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if service.faults.cut_connection else body)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return formatdate(service.clock.wall() if timestamp is None else timestamp, usegmt=True)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Requests are recorded, not printed."""

    return Handler


def serve(
    *,
    port: int,
    notice_after_s: float,
    action: str = "terminate",
    in_seconds: float = 120.0,
    say: Callable[[str], None] = print,
    until: threading.Event | None = None,
) -> None:
    """Run a fake for a person: says how to point a program at it, and announces an interruption.

    Args:
        port: to listen on; 0 takes a free one.
        notice_after_s: seconds until the notice can be seen.
        action: as in `FakeAwsMetadata.notice`.
        in_seconds: seconds between the notice and the interruption that it speaks of.
        say: takes each line.
        until: ends it when set; None serves until interrupted.
    """
    with FakeAwsMetadata(port=port) as fake:
        fake.notice(action, in_seconds=notice_after_s + in_seconds, after_seconds=notice_after_s)
        for name, value in fake.environ.items():
            say(f"export {name}={value}")
        say(f"in {notice_after_s:g} s: {action}, {in_seconds:g} s ahead")
        (threading.Event() if until is None else until).wait()
