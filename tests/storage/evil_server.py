"""A server that answers with what has no end: for what a client may do without one."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

PIECE = bytes(1 << 16)


class EvilServer:
    """Counts what is asked of it, and what it sends.

    Attributes:
        answer: does what a test wants with each request.
        requests: so far.
        sent: bytes of endless bodies so far.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests = 0
        self.sent = 0
        self.url = ""


class Asked(BaseHTTPRequestHandler):
    """One request, and the means to answer it."""

    protocol_version = "HTTP/1.1"
    evil: EvilServer

    def do(self) -> None:
        self.evil.requests += 1
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with suppress(ConnectionError):  # a client that has had enough
            self.evil.answer(self)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do

    def log_message(self, *_: object) -> None:
        """Tests print nothing."""

    @property
    def query(self) -> str:
        return urlsplit(self.path).query

    def say(self, status: int, body: bytes = b"", **headers: str) -> None:
        """A whole answer."""
        headers = {"Content-Length": str(len(body)), "Content-Type": "application/xml", **headers}
        self._head(status, headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def go_on_for_ever(self, status: int = 200, **headers: str) -> None:
        """A body that ends when the client goes; as long as it says, or else in chunks."""
        if self.command == "HEAD":
            self.say(200)
            return
        in_chunks = "Content_Length" not in headers
        self._head(status, headers | ({"Transfer-Encoding": "chunked"} if in_chunks else {}))
        while True:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(PIECE), PIECE) if in_chunks else PIECE)
            self.evil.sent += len(PIECE)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()


Answer = Callable[[Asked], None]


@contextmanager
def serving(answer: Answer, *, tls: ssl.SSLContext | None = None) -> Iterator[EvilServer]:
    """A server on a free port of 127.0.0.1, over https if there is a `tls`."""
    evil = EvilServer(answer)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Asked,), {"evil": evil}))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients go away in the middle
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    evil.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield evil
    finally:
        server.shutdown()
        server.server_close()
