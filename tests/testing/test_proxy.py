"""The proxy that spoils answers does what its script says, and nothing else."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from spotsafe.testing.proxy import Fault, FaultyProxy

BODY = bytes(range(256)) * 40


class Echo(BaseHTTPRequestHandler):
    """Keeps what is put and gives it back."""

    protocol_version = "HTTP/1.1"
    kept: dict[str, bytes]

    def do_PUT(self) -> None:
        self.kept[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self.kept["host"] = self.headers["Host"].encode()
        self._answer(200, b"")

    def do_GET(self) -> None:
        self._answer(200 if self.path in self.kept else 404, self.kept.get(self.path, b"no"))

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Own", "kept")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[str]:
    """A server of one object, at its address."""
    handler = type("Handler", (Echo,), {"kept": {"/object": BODY}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.kept = handler.kept  # type: ignore[attr-defined]  # for the test to look at
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def proxy(echo: str) -> Iterator[FaultyProxy]:
    with FaultyProxy(echo) as one:
        yield one


def connect(proxy: FaultyProxy) -> http.client.HTTPConnection:
    parts = urlsplit(proxy.url)
    return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)


def ask(
    proxy: FaultyProxy, method: str, path: str = "/object", body: bytes | None = None
) -> tuple[int, bytes]:
    connection = connect(proxy)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_without_faults_it_is_not_noticed(proxy: FaultyProxy) -> None:
    """Bodies, statuses, headers and the name of the host go through; a connection carries several requests."""
    connection = connect(proxy)
    connection.request("PUT", "/new%20name?x=1", BODY)
    assert connection.getresponse().read() == b""
    connection.request("GET", "/host")
    assert connection.getresponse().read() == b"no"
    connection.request("HEAD", "/object")
    head = connection.getresponse()
    assert (head.read(), head.headers["Content-Length"], head.headers["X-Own"]) == (b"", "10240", "kept")
    connection.request("GET", "/new%20name?x=1", headers={"Expect": "100-continue"})
    assert connection.getresponse().read() == BODY
    connection.request("PUT", "/chunks", iter([b"one", b"two"]), encode_chunked=True)
    assert connection.getresponse().read() == b""
    connection.close()
    assert ask(proxy, "GET", "/chunks") == (200, b"onetwo")
    assert [one.status for one in proxy.seen] == [200, 404, 200, 200, 200, 200]
    assert proxy.fired == 0


@pytest.mark.parametrize("kind", ["lose_response", "half_close"])
def test_a_lost_answer(proxy: FaultyProxy, kind: str) -> None:
    """The server has done it, and the client does not learn of it."""
    proxy.add(Fault(kind, method="PUT"))  # type: ignore[arg-type]  # one of two literals
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        ask(proxy, "PUT", "/new", b"landed")
    assert ask(proxy, "GET", "/new") == (200, b"landed")
    assert [one.status for one in proxy.seen] == [200, 200]
    assert proxy.fired == 1


def test_a_refused_connection(proxy: FaultyProxy) -> None:
    """The server has seen nothing."""
    proxy.add(Fault("refuse", path="new"))
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        ask(proxy, "PUT", "/new", b"lost")
    assert ask(proxy, "GET", "/new")[0] == 404
    assert proxy.seen[0].status is None


def test_an_answer_of_the_script(proxy: FaultyProxy) -> None:
    """So often, after so many that went well, and only to what fits."""
    proxy.add(Fault("status", method="GET", path=r"object$", times=2, skip=1, status=503, body=b"later"))
    assert ask(proxy, "GET")[0] == 200
    assert ask(proxy, "HEAD")[0] == 200
    assert ask(proxy, "GET", "/object2")[0] == 404
    assert ask(proxy, "GET") == (503, b"later")
    assert ask(proxy, "GET") == (503, b"later")
    assert ask(proxy, "GET") == (200, BODY)
    proxy.add(Fault("status", contains=b"land", status=409))
    assert ask(proxy, "PUT", "/new", b"at sea")[0] == 200
    assert ask(proxy, "PUT", "/new", b"landed")[0] == 409
    proxy.add(Fault("status", method="HEAD", body=b"none has a body"))
    assert ask(proxy, "HEAD") == (503, b"")


def test_bodies_that_are_not_whole(proxy: FaultyProxy) -> None:
    """One that breaks off, one that claims to be whole, and one with a wrong bit."""
    proxy.add(Fault("cut", keep=10), Fault("shorten", keep=10), Fault("flip"))
    with pytest.raises(http.client.IncompleteRead):
        ask(proxy, "GET")
    assert ask(proxy, "GET") == (200, BODY[:10])
    status, body = ask(proxy, "GET")
    assert status == 200
    assert sum(one != two for one, two in zip(body, BODY, strict=True)) == 1


def test_a_late_answer(proxy: FaultyProxy) -> None:
    """It comes, and not before its time."""
    proxy.add(Fault("delay", seconds=0.2))
    before = time.monotonic()
    assert ask(proxy, "GET") == (200, BODY)
    assert time.monotonic() - before >= 0.2


def test_stopping_ends_what_waits(proxy: FaultyProxy) -> None:
    """A client that waits for a late answer is not left hanging."""
    proxy.add(Fault("delay", seconds=1000))
    connection = connect(proxy)
    connection.request("GET", "/object")
    while not proxy.seen:
        time.sleep(0.01)
    proxy.stop()
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        connection.getresponse()
    connection.close()
    proxy.start()


def test_clear(proxy: FaultyProxy) -> None:
    """What was to go wrong goes well."""
    proxy.add(Fault("refuse", times=100))
    proxy.clear()
    assert ask(proxy, "GET")[0] == 200


@pytest.mark.parametrize("target", ["https://127.0.0.1:1", "127.0.0.1:80", "http://127.0.0.1"])
def test_a_target_must_be_a_plain_address(target: str) -> None:
    """TLS cannot be looked into."""
    with pytest.raises(ValueError, match="address like"):
        FaultyProxy(target)


def test_it_has_no_address_before_it_runs(echo: str) -> None:
    """The port is not known yet."""
    with pytest.raises(RuntimeError, match="with"):
        _ = FaultyProxy(echo).url
