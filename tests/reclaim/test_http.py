"""The client asks who it is told to ask, and nobody else, and never waits or reads without end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from spotsafe.reclaim.http import MOST_BYTES, LocalHttp, Reply

PATIENCE_S = 30.0


class RawServer:
    """Accepts connections and lets a function talk; keeps what each client sent first."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.talk: Callable[[socket.socket], None] = lambda connection: None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def answer(self, data: bytes) -> None:
        self.talk = lambda connection: connection.sendall(data)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                try:
                    self.requests.append(connection.recv(65536))
                    self.talk(connection)
                except OSError:
                    continue

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(PATIENCE_S)


@pytest.fixture
def server() -> Iterator[RawServer]:
    running = RawServer()
    yield running
    running.close()


def whole(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def test_it_sends_what_it_is_told_and_returns_what_comes(server: RawServer):
    """Method, path, headers and host go out; status, lower-case headers and body come back."""
    server.answer(whole(b"hello", headers="X-Odd-Case: Yes\r\n"))
    reply = LocalHttp(server.url + "/").request("PUT", "/a?b=c", headers={"X-Mine": "1"})
    assert reply == Reply(200, reply.headers, b"hello")
    assert reply.headers["x-odd-case"] == "Yes"
    sent = server.requests[0].decode()
    assert sent.startswith("PUT /a?b=c HTTP/1.1\r\n")
    assert "X-Mine: 1\r\n" in sent
    assert f"Host: {server.url.removeprefix('http://')}\r\n" in sent


def test_a_path_in_the_endpoint_comes_first(server: RawServer):
    """A service behind a prefix is asked below it."""
    server.answer(whole(b""))
    LocalHttp(server.url + "/imds/").request("GET", "/latest")
    assert server.requests[0].startswith(b"GET /imds/latest ")


def test_a_redirect_is_not_followed(server: RawServer):
    """Metadata services do not redirect; whoever does is not asked further."""
    server.answer(whole(b"", status="302 Found", headers="Location: http://127.0.0.1:9/\r\n"))
    assert LocalHttp(server.url).request("GET", "/").status == 302
    assert len(server.requests) == 1


def test_no_proxy_of_the_environment_sees_anything(server: RawServer, monkeypatch: pytest.MonkeyPatch):
    """http_proxy in every spelling, and no no_proxy: the proxy gets no byte."""
    proxy = RawServer()
    proxy.answer(whole(b"from the proxy"))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "https_proxy"):
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server.answer(whole(b"from the service"))
    assert LocalHttp(server.url).request("GET", "/").body == b"from the service"
    assert proxy.requests == []
    proxy.close()


def test_nobody_listening_is_an_error_at_once():
    """A closed port refuses; that is an OSError, not an answer."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(OSError, match="refused"):
        LocalHttp(url).request("GET", "/")


def test_an_address_that_swallows_everything_costs_the_connect_timeout():
    """A full backlog lets no connection through: what a blackholed address looks like."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = []
        for _ in range(8):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
            fillers.append(filler)
        client = LocalHttp(f"http://127.0.0.1:{listener.getsockname()[1]}", connect_timeout_s=0.1)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            client.request("GET", "/", read_timeout_s=0.1)
        assert time.monotonic() - began < 5
        for filler in fillers:
            filler.close()


def test_silence_is_a_timeout(server: RawServer):
    """A server that accepts and says nothing costs the read timeout."""
    go_on = threading.Event()
    server.talk = lambda connection: go_on.wait(PATIENCE_S) and None
    with pytest.raises(TimeoutError):
        LocalHttp(server.url).request("GET", "/", read_timeout_s=0.05)
    go_on.set()


def test_a_body_that_trickles_is_cut_off(server: RawServer):
    """One byte at a time, each within the timeout, does not keep the client for ever."""

    def trickle(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
        for _ in range(60000):
            connection.sendall(b"x")
            time.sleep(0.01)

    server.talk = trickle
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        LocalHttp(server.url).request("GET", "/", read_timeout_s=0.1)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("length", [f"Content-Length: {MOST_BYTES + 1}\r\n", ""])
def test_a_huge_body_is_refused(server: RawServer, length: str):
    """More than any metadata is an error and is not read to its end."""
    server.answer(f"HTTP/1.1 200 OK\r\n{length}\r\n".encode() + b"x" * (MOST_BYTES + 1))
    with pytest.raises(ConnectionError, match="more than"):
        LocalHttp(server.url).request("GET", "/")


def test_a_body_of_exactly_the_limit_is_read(server: RawServer):
    """The limit itself is allowed."""
    server.answer(whole(b"x" * MOST_BYTES))
    assert len(LocalHttp(server.url).request("GET", "/").body) == MOST_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 200 " + b"x" * 70_000 + b"\r\n\r\n",
    ],
    ids=["nothing", "another protocol", "short body", "cut chunk", "too many headers", "too long a line"],
)
def test_what_is_no_whole_answer_is_a_connection_error(server: RawServer, data: bytes):
    """Half an answer, or somebody else's protocol, is never an answer."""
    server.answer(data)
    with pytest.raises(OSError, match=r"."):
        LocalHttp(server.url).request("GET", "/", read_timeout_s=2.0)


def test_close_ends_a_request_in_progress(server: RawServer):
    """A hanging GET ends when another thread closes the client, not after its timeout."""
    talking, go_on = threading.Event(), threading.Event()

    def hang(connection: socket.socket) -> None:
        talking.set()
        go_on.wait(PATIENCE_S)

    server.talk = hang
    client, errors = LocalHttp(server.url), list[BaseException]()

    def request() -> None:
        try:
            client.request("GET", "/", read_timeout_s=600.0)
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=request)
    thread.start()
    assert talking.wait(PATIENCE_S)
    client.close()
    thread.join(PATIENCE_S)
    go_on.set()
    assert not thread.is_alive()
    assert len(errors) == 1


def test_a_closed_client_asks_no_more(server: RawServer):
    """After `close` no request is sent."""
    client = LocalHttp(server.url)
    client.close()
    client.close()
    with pytest.raises(ConnectionAbortedError):
        client.request("GET", "/")


@pytest.mark.parametrize(
    "endpoint",
    [
        "169.254.169.254",
        "https://169.254.169.254",
        "http://",
        "http://a:b",
        "http://u:p@h",
        "http://h/?q",
        "ftp://h",
    ],
)
def test_what_is_no_url_of_a_service_is_a_value_error(endpoint: str):
    """A mistake in a variable is named when the client is made, not at each poll."""
    with pytest.raises(ValueError, match=r"."):
        LocalHttp(endpoint)


def test_ipv6_literals_are_understood():
    """The Nitro address in brackets is a host, with port 80."""
    client = LocalHttp("http://[fd00:ec2::254]")
    assert (client._host, client._port) == ("fd00:ec2::254", 80)
