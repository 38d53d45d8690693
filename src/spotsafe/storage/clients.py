"""What fsspec's clients of object stores need, and what they leave out: one table, one place.

All that is known here of a client's inside is asked for carefully: a version that looks different is used as it is.
"""

from __future__ import annotations

import inspect
import io
import weakref
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotsafe.storage import uploads

_CONNECT_S, _READ_S = 5, 30
"""Seconds until a connection stands, and between two pieces of an answer."""
_PIECE = 16 * 1024 * 1024


def _nothing(_fs: Any) -> None:
    return None


async def _close_nothing(_fs: Any) -> None:
    return None


def _is_right(_info: Mapping[str, Any], _data: memoryview) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """How to use the file system of a protocol."""

    extra: str | None = None
    """The extra of this package that installs it."""
    creates: bool = False
    """Whether `pipe_file` with the words of `new` is one conditional request; all others look and then write."""
    new: Mapping[str, Any] = field(default_factory=lambda: {"mode": "create"})
    """How `pipe_file` is told that there must be no such object yet."""
    over: Mapping[str, Any] = field(default_factory=lambda: {"mode": "overwrite"})
    """How it is told that there may be one."""
    folders: bool = False
    """Whether a folder has to be made before an object can lie in it. Buckets are never made."""
    refused: str = ""
    """Characters that a path must not hold: the client or the service loses such an object in listings."""
    body: Callable[[memoryview], Any] = bytes
    """Memory as `pipe_file` takes it, without a copy where the client can."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Storage options that a user's own go over."""
    prepare: Callable[[Any], None] = _nothing
    """Done to a new file system: the client's own patience is cut down, for ours knows the deadline."""
    writing: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `pipe_file`."""
    upload: Callable[[Any, str, memoryview], Coroutine[Any, Any, None]] | None = None
    """Writes a large object to a path, better than `pipe_file`."""
    begun: Callable[[Any, str], Coroutine[Any, Any, list[str]]] | None = None
    """Which uploads below a path were begun; none for a client that does not show them."""
    abort: Callable[[Any, str], Coroutine[Any, Any, None]] | None = None
    """Gives up the uploads below a path."""
    agrees: Callable[[Mapping[str, Any], memoryview], bool] = _is_right
    """Whether what the server says of an object fits these bytes, size aside."""
    close: Callable[[Any], Awaitable[None]] = _close_nothing
    """Closes the connections of a file system, on its loop."""


def client_of(protocol: str) -> Client:
    """The entry for a protocol, such as ``"s3"``; one that is not in the table is used with care."""
    return _CLIENTS.get(protocol, _UNKNOWN)


def forget_finalizers(fs: Any) -> None:
    """Take back what a client has arranged for the end of `fs`.

    They wait for the loop, which is gone then, or keep the file system alive until the process ends. We close
    it ourselves.
    """
    registry = getattr(weakref.finalize, "_registry", {})
    for one in list(registry):
        found = one.peek()
        if found is not None and found[0] is fs:
            one.detach()


class _Reader(io.RawIOBase):
    """Memory as a file that hands out `bytes`: a copy of one piece at a time instead of the whole."""

    def __init__(self, data: memoryview) -> None:
        super().__init__()
        self._data = data
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = len(self._data) if size is None or size < 0 else self._at + size
        piece = bytes(self._data[self._at : end])
        self._at += len(piece)
        return piece


# -- S3 by s3fs


def _prepare_s3(fs: Any) -> None:
    fs.retries = 1  # its own loop around botocore's, whose tries are set in the options


async def _close_s3(fs: Any) -> None:
    creator = getattr(fs, "_s3creator", None)
    if creator is not None:
        await creator.__aexit__(None, None, None)


# -- Google by gcsfs


def _prepare_google(fs: Any) -> None:
    plain = getattr(type(fs)._request, "__wrapped__", None)  # noqa: SLF001 - the only way past its six tries
    if inspect.iscoroutinefunction(plain):
        fs._request = plain.__get__(fs)  # noqa: SLF001 - see above


def _google_agrees(info: Mapping[str, Any], data: memoryview) -> bool:
    """Google's requests carry no checksum, but its listings do: of what arrived."""
    try:
        from google_crc32c import extend  # noqa: PLC0415 - comes with the client, in most versions
    except ImportError:
        return True
    told, mine = info.get("crc32c"), 0
    if told is None:
        return True
    for start in range(0, len(data), _PIECE):
        mine = extend(mine, bytes(data[start : start + _PIECE]))
    return bool(told == b64encode(mine.to_bytes(4, "big")).decode())


async def _close_google(fs: Any) -> None:
    session = getattr(fs, "_session", None)
    if session is not None and not session.closed:
        await session.close()


# -- Azure by adlfs


def _prepare_azure(fs: Any) -> None:
    policy = getattr(getattr(fs.service_client, "_config", None), "retry_policy", None)
    if policy is not None:
        policy.total_retries = 0  # three, the first after fifteen seconds


async def _close_azure(fs: Any) -> None:
    await fs.service_client.close()
    for name in ("credential", "sync_credential"):
        close = getattr(getattr(fs, name, None), "close", None)
        if close is not None:
            done = close()
            if inspect.isawaitable(done):
                await done


_UNKNOWN = Client(folders=True)
_MEMORY = Client(creates=True, folders=True, body=lambda data: data)
_S3 = Client(
    extra="s3",
    creates=True,
    options={
        "config_kwargs": {
            "connect_timeout": _CONNECT_S,
            "read_timeout": _READ_S,
            "retries": {"mode": "standard", "total_max_attempts": 1},
        }
    },
    prepare=_prepare_s3,
    upload=uploads.upload,
    begun=uploads.begun,
    abort=uploads.abort,
    close=_close_s3,
)
_GOOGLE = Client(
    extra="gcs",
    creates=True,
    body=lambda data: data,
    prepare=_prepare_google,
    agrees=_google_agrees,
    close=_close_google,
)
_AZURE = Client(
    extra="azure",
    creates=True,
    new={"overwrite": False},  # it knows "mode" too, but its signature does not tell since when
    over={"overwrite": True},
    refused="?\\",
    body=_Reader,
    options={"connection_timeout": _CONNECT_S, "read_timeout": _READ_S},
    prepare=_prepare_azure,
    writing={"max_concurrency": 4, "validate_content": True},
    close=_close_azure,
)
_CLIENTS: dict[str, Client] = {
    "memory": _MEMORY,
    **dict.fromkeys(("s3", "s3a"), _S3),
    **dict.fromkeys(("gs", "gcs"), _GOOGLE),
    **dict.fromkeys(("az", "abfs", "abfss"), _AZURE),
    "adl": Client(extra="azure", folders=True),
}
