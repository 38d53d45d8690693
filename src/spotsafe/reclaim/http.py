"""The few lines of HTTP that link-local metadata services need.

Made of sockets rather than an opener: `urllib` and botocore send even link-local requests through
``http_proxy``, and take the proxy's word for the machine's fate. Nothing here knows what a proxy is.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

MOST_BYTES = 65536
"""Longest body that is read. Metadata is a few hundred bytes; more is somebody else's server."""


class Reply(NamedTuple):
    """One answer."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class LocalHttp:
    """Sends single requests to one server, over a new connection each.

    One thread sends; any thread may `close`.
    """

    def __init__(self, endpoint: str, *, connect_timeout_s: float = 1.0) -> None:
        """Nothing is sent yet.

        Args:
            endpoint: like ``http://169.254.169.254``; a path in it is put before each request's.
            connect_timeout_s: seconds; a link-local server answers in milliseconds or not at all.

        Raises:
            ValueError: not such a URL.
        """
        self.endpoint = endpoint.rstrip("/")
        self._host, self._port, self._prefix = _split(self.endpoint)
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._closed = False

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        read_timeout_s: float = 2.0,
    ) -> Reply:
        """Send one request and read its answer. Redirects are not followed.

        Args:
            method: like ``GET``.
            path: from the slash on, with the query.
            headers: to send.
            body: to send; None for none.
            read_timeout_s: seconds without a byte before giving up; also the limit for reading the body.

        Raises:
            TimeoutError: no connection, or no answer, in time.
            OSError: anything else that is wrong with the connection or the answer.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._connect_timeout_s)
        try:
            connection.connect()
            self._hold(connection.sock)
            connection.sock.settimeout(read_timeout_s)
            connection.request(
                method, self._prefix + path, body, headers={"Connection": "close", **(headers or {})}
            )
            response = connection.getresponse()
            answer = _read(response, until=time.monotonic() + read_timeout_s)
            return Reply(
                response.status, {name.lower(): value for name, value in response.getheaders()}, answer
            )
        except http.client.HTTPException as error:
            raise ConnectionError(f"not a whole HTTP answer: {type(error).__name__}: {error}") from error
        finally:
            self._hold(None)
            connection.close()

    def close(self) -> None:
        """End a request in progress with an OSError, and let none begin."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def _hold(self, connected: socket.socket | None) -> None:
        with self._lock:
            self._socket = connected
            if connected is not None and self._closed:
                raise ConnectionAbortedError("closed")


def _split(endpoint: str) -> tuple[str, int, str]:
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError(f"{endpoint!r} is not a URL: {error}") from error
    if parts.scheme != "http" or not host or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(
            f"{endpoint!r} is not the URL of a metadata service; write it like http://169.254.169.254"
        )
    return host, 80 if port is None else port, parts.path


def _read(response: http.client.HTTPResponse, *, until: float) -> bytes:
    """The whole body, within limits of size and time that a server trickling bytes cannot stretch."""
    body = b""
    while piece := response.read1(MOST_BYTES + 1 - len(body)):
        body += piece
        if len(body) > MOST_BYTES:
            raise ConnectionError(f"an answer of more than {MOST_BYTES} bytes")
        if time.monotonic() > until:
            raise TimeoutError("the answer comes too slowly")
    if response.length:
        raise ConnectionError(f"the answer ends {response.length} bytes early")
    return body
