"""One bucket, through boto3: a client for each process, and bytes without copies.

boto3 copies what it is given, hashes it more than once and sends it 16 KiB at a time. Here a body is a view of
the caller's memory that is handed to the socket in large pieces, its CRC is computed by us (the server compares
it), and a download goes from the socket into the caller's memory.

The CRT transfer client is never used: it ignores `endpoint_url`.
"""

from __future__ import annotations

import os
import threading
from base64 import b64encode
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import boto3
from botocore.config import Config

from spotsafe.errors import StorageError
from spotsafe.storage.s3_errors import EXPIRED, code_of, is_in_a_circle

CONNECTIONS = 8
"""Parts of large objects that are sent or received at the same time, over all threads of a store."""

# Seconds. One part of 16 MiB is answered in a second or two; assembling a large upload may take a minute.
_CONNECT_S, _READ_S = 10, 90
_OF_SESSION = frozenset(
    {
        "aws_access_key_id",
        "aws_secret_access_key",
        "aws_session_token",
        "region_name",
        "botocore_session",
        "profile_name",
    }
)
# Bytes handed to the socket at once. It may take the whole timeout for each.
_PIECE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Live:
    """What one process has."""

    session: Any
    client: Any
    pool: ThreadPoolExecutor
    checksums: bool
    """Whether writes carry a checksum."""
    signs_bodies: bool
    """Whether the signature of a write covers its body: without TLS, or where the user's settings say so."""


class Bucket:
    """Calls S3 for one bucket, with credentials and settings as botocore finds them.

    The endpoint and the mode of checksums come from botocore's own variables and files (`AWS_ENDPOINT_URL`,
    `AWS_REQUEST_CHECKSUM_CALCULATION=when_required` for servers that refuse checksums, ...).

    Args:
        name: of the bucket.
        options: handed to `boto3.session.Session` (such as ``profile_name``) and to its `client` (such as
            ``endpoint_url``).
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name = name
        self._session_options = {key: value for key, value in options.items() if key in _OF_SESSION}
        self._client_options = {key: value for key, value in options.items() if key not in _OF_SESSION}
        self._by_process: dict[int, Live] = {}
        self._lock = threading.Lock()

    def live(self) -> Live:
        """The client and the threads of this process; a forked child makes its own."""
        found = self._by_process.get(os.getpid())
        if found is None:
            # A lock that another thread held at a fork would stay locked in the child: so none is waited for.
            found = self._by_process.setdefault(os.getpid(), self._new())
        return found

    def call(self, method: str, **params: Any) -> Any:
        """One request. Credentials that have expired are looked up again, once.

        Raises:
            StorageError: the server redirects in a circle.
            Exception: what botocore raises; see `s3_errors`.
        """
        live = self.live()
        try:
            return getattr(live.client, method)(Bucket=self.name, **params)
        except Exception as error:
            if is_in_a_circle(error):
                raise self._redirected(live) from error
            if code_of(error) not in EXPIRED:
                raise
        body = params.get("Body")
        if isinstance(body, View):
            body.seek(0)
        return getattr(self._renewed(live).client, method)(Bucket=self.name, **params)

    def _redirected(self, live: Live) -> StorageError:
        return StorageError(
            f"{live.client.meta.endpoint_url} sends every request for s3://{self.name} on, and in a circle; "
            "check the endpoint (AWS_ENDPOINT_URL) and the region",
            path=f"s3://{self.name}",
        )

    def _renewed(self, old: Live) -> Live:
        pid = os.getpid()
        with self._lock:
            if self._by_process.get(pid) is old:
                self._by_process[pid] = self._new(pool=old.pool)
            return self._by_process[pid]

    def _new(self, *, pool: ThreadPoolExecutor | None = None) -> Live:
        session = boto3.session.Session(**self._session_options)
        client = self._client(session, sign_bodies=True)
        tls = client.meta.endpoint_url.startswith("https://")
        # Without TLS nothing but the signature protects a body on its way. With it, it is the user's to say.
        signs = not tls or bool((client.meta.config.s3 or {}).get("payload_signing_enabled"))
        if not signs:
            client = self._client(session, sign_bodies=False)
        for operation in ("PutObject", "UploadPart"):
            client.meta.events.register(f"before-send.s3.{operation}", _send_in_pieces)
        mode = getattr(client.meta.config, "request_checksum_calculation", None)
        return Live(
            session=session,
            client=client,
            pool=pool or ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="spotsafe-s3"),
            checksums=mode != "when_required",
            signs_bodies=signs,
        )

    def _client(self, session: Any, *, sign_bodies: bool) -> Any:
        config = Config(
            connect_timeout=_CONNECT_S,
            read_timeout=_READ_S,
            max_pool_connections=4 * CONNECTIONS,
            retries={"mode": "standard", "total_max_attempts": 2},
            s3={} if sign_bodies else {"payload_signing_enabled": False},
        )
        return session.client("s3", config=config, **self._client_options)


class View:
    """A body for boto3: a file over memory that is never copied.

    Args:
        data: flat bytes; they must not change until the request has been answered.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def read(self, size: int | None = -1) -> memoryview:
        """The next bytes, at most `size` of them."""
        end = len(self._data) if size is None or size < 0 else self._at + size
        piece = self._data[self._at : end]
        self._at += len(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As for a file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        self._at = min(max(base + offset, 0), len(self._data))
        return self._at

    def tell(self) -> int:
        """As for a file."""
        return self._at

    def pieces(self) -> _Pieces:
        """The same bytes for a socket."""
        return _Pieces(self._data)

    def checksum(self) -> str:
        """CRC-32 as S3 writes it."""
        return b64encode(crc32(self._data).to_bytes(4, "big")).decode("ascii")


@dataclass(frozen=True, slots=True)
class _Pieces:
    """No file: urllib3 reads those 16 KiB at a time. An iterable is sent as it comes."""

    data: memoryview

    def __iter__(self) -> Iterator[memoryview]:
        for start in range(0, len(self.data), _PIECE):
            yield self.data[start : start + _PIECE]

    def seek(self, _offset: int) -> int:
        """Botocore rewinds a body before it sends it again; every iteration begins at the front anyway."""
        return 0


def _send_in_pieces(request: Any, **_: object) -> None:
    """Botocore calls this when a request is signed and about to be sent."""
    if isinstance(request.body, View):
        request.body = request.body.pieces()
