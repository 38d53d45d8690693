"""A store at any url that fsspec knows.

What fsspec's file systems really do differs from what they say; the choices here follow from that. A file
system of our own, without its cache of listings (they go stale) and on an event loop of its own; one per
process (they do not survive a fork). Whole objects only, never `open("wb")`, which publishes half of an
object when the body fails; never transactions, which change the shared instance; never `mv`. Every write is
looked at afterwards, because a cancelled request looks like success.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import split_protocol
from fsspec.spec import AbstractFileSystem

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageExpired,
    StorageNotFound,
    StorageShort,
    StorageUnavailable,
)
from spotsafe.storage.client_failures import class_of_client_error
from spotsafe.storage.clients import Client, client_of
from spotsafe.storage.connection import Connection
from spotsafe.storage.failures import storage_error, too_large
from spotsafe.storage.paths import check_folder, check_path, is_temporary
from spotsafe.storage.store import Entry
from spotsafe.storage.writing import flat, window

T = TypeVar("T")

# The memory file system looks and then writes, so writers of one process have to take turns.
_MEMORY_LOCK = threading.Lock()
# Bytes of one ranged read, and how many are under way at a time: what a read needs besides its buffer.
_PIECE = 16 * 1024 * 1024
_AT_ONCE = 4
# From so many bytes on an object is written in parts, where the client has a way of its own for that.
_LARGE = 2 * _PIECE
# How often `create` tries when the store says "exists" and then shows nothing (409 of S3).
_CREATE_TRIES = 5


class FsspecStore:
    """Objects below a url.

    On backends whose conditional writes are known (memory, S3, Google, Azure) `create` is atomic, if the server
    keeps its word. On all others fsspec looks and then writes: `create` reads back and is true only if its own
    bytes are there, but a second writer at the same instant may replace them (rule 12 of the design), and a
    large object may be seen growing.

    Args:
        url: any fsspec url, such as ``"memory://run"`` or ``"s3://bucket/run"``.
        **storage_options: handed to the file system.

    Raises:
        ValueError: no such protocol is known, or it cannot keep such a path.
        StorageError: the package for the protocol is missing or too old.
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        self._url = url.rstrip("/") if not url.endswith("://") else url
        self._protocol = split_protocol(url)[0] or "file"
        self._client = client_of(self._protocol)
        self._class = _file_system_class(self._protocol, url, self._client)
        self._check_characters(self._url)
        self._exclusive = self._client.creates and _knows(self._class, self._client.new)
        self._connection = Connection(
            self._url, client=self._client, kind=self._class, options=storage_options
        )

    def __repr__(self) -> str:
        return f"FsspecStore({self._url!r})"

    @property
    def url(self) -> str:
        """The url, without the options."""
        return self._url

    @property
    def exclusive(self) -> bool | None:
        """False where fsspec looks and then writes. Elsewhere it is the server's to honour the condition."""
        return None if self._exclusive else False

    def close(self) -> None:
        """Close this process's connections. Nobody may be using the store; the next use opens new ones."""
        self._connection.close()

    # -- writing

    def put(self, path: str, data: bytes) -> None:
        """Write a small object under a new name.

        The same bytes again are no error: a client that repeats a request whose answer was lost finds its own
        object in the way.

        Raises:
            StorageExists: the name is taken by other bytes; they were left as they are.
            StorageError: see `spotsafe.storage.failures`.
        """
        self._put(path, data, memoryview(data))

    def put_large(self, path: str, data: memoryview) -> None:
        """Write an object of any size under a new name; see `put`."""
        data = flat(data)
        self._put(path, data, data)

    def create(self, path: str, data: bytes) -> bool:
        """Create a small object if there is none; true if the object there now is this one.

        What the client says is only a hint: the object is always read back and compared.

        Raises:
            StorageUnavailable: the store said that there is an object, and then showed none, again and again.
            StorageError: see `spotsafe.storage.failures`.
        """
        for _ in range(_CREATE_TRIES):
            failure: StorageError | None = None
            try:
                self._write_new(path, data)
            except StorageError as error:
                failure = error
            with suppress(StorageNotFound):
                return self._holds(path, memoryview(data))
            if failure is not None and not isinstance(failure, StorageExists):
                raise failure
        raise StorageUnavailable(f"cannot create {self._full(path)}: it keeps vanishing", path=path)

    def replace(self, path: str, data: bytes) -> None:
        """Write a small object, over an older one if there is one."""
        self._pipe(path, data, new=False)
        self._confirm(path, memoryview(data))

    def delete(self, path: str) -> None:
        """Delete an object; one that is not there is no error."""
        key = self._key(check_path(path))
        with suppress(StorageNotFound):
            self._ask("delete", path, lambda: self._connection.call("rm_file", key))

    def begun(self, folder: str) -> list[str]:
        """Paths below `folder` of uploads that were begun and never completed; none where no client shows them."""
        check_folder(folder)
        begun = self._client.begun
        found = self._about_uploads("list", folder, begun) if begun else []
        return sorted({name for path in found if (name := self._relative(path, ""))})

    def abort_uploads(self, folder: str) -> None:
        """Give up the uploads below `folder`, and no others. Where no client shows them, the store forgets them.

        Google and Azure forget an upload after a week.
        """
        check_folder(folder)
        abort = self._client.abort
        if abort is not None:
            self._about_uploads("clean up", folder, abort)

    # -- reading

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """The whole object.

        Raises:
            StorageNotFound: there is none.
            StorageError: it is larger than `max_bytes`, or could not be read.
        """
        size = self.size(path)
        data = b""
        if size <= max_bytes:
            key = self._key(path)
            data = bytes(self._ask("read", path, lambda: self._connection.call("cat_file", key, moves=size)))
            if len(data) < size == self.size(path):
                raise StorageUnavailable(
                    f"{self._full(path)} came with {len(data)} bytes of {size}", path=path
                )
            size = len(data)
        if size > max_bytes:
            raise too_large(self._full(path), path=path, max_bytes=max_bytes)
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset` (bytes) on.

        Some pieces are under way at a time; no more memory is needed than for these.

        Raises:
            StorageNotFound: there is none.
            StorageShort: it ends before the buffer is full.
        """
        view = window(offset, buffer)
        if not len(view):
            self.size(path)
            return
        key = self._key(check_path(path))

        def take(piece: memoryview, start: int) -> Callable[[bytes], None]:
            def fill(data: bytes) -> None:
                self._check_length(path, len(data), start, len(piece))
                piece[:] = data

            return fill

        def read() -> None:
            calls = (
                (
                    {"path": key, "start": offset + at, "end": offset + at + len(piece)},
                    take(piece, offset + at),
                )
                for at in range(0, len(view), _PIECE)
                if (piece := view[at : at + _PIECE])
            )
            self._connection.call_each("cat_file", calls, at_once=_AT_ONCE, moves=len(view))

        try:
            self._ask("read", path, read)
        except (StorageNotFound, StorageUnavailable, StorageShort):
            raise
        except StorageError as error:
            # Many servers answer a range behind the end with an error of their own.
            if self.size(path) < offset + len(view):
                raise self._short(path, offset, len(view)) from error
            raise

    def size(self, path: str) -> int:
        """Size of an object in bytes.

        Raises:
            StorageNotFound: there is none.
        """
        return int(self._info(path)["size"])

    def names(self, folder: str) -> list[str]:
        """Base names of what lies directly in a folder, sorted; empty if there is no such folder."""
        key = self._key(check_folder(folder))
        found: list[str] = []
        with suppress(StorageNotFound):
            found = self._ask("list", folder, lambda: self._connection.call("ls", key, detail=False))
        below = (self._relative(name, folder) for name in found)
        return sorted({name.partition("/")[0] for name in below if name and not is_temporary(name)})

    def list(self, folder: str) -> list[Entry]:
        """All objects below a folder, sorted by path; empty if there is no such folder."""
        key = self._key(check_folder(folder))
        found: list[dict[str, Any]] = []
        with suppress(StorageNotFound):
            found = self._ask("list", folder, lambda: list(self._below(key)))
        prefix = f"{folder}/" if folder else ""
        return sorted(
            Entry(prefix + name, int(info["size"]))
            for info in found
            if info.get("type") == "file" and (name := self._relative(info["name"], folder))
        )

    # -- inside

    def _key(self, path: str) -> str:
        self._check_characters(path)
        root = self._ask("open", "", lambda: self._connection.root)
        return f"{root}/{path}" if root and path else root or path

    def _check_characters(self, path: str) -> None:
        lost = sorted(set(self._client.refused).intersection(path))
        if lost:
            raise ValueError(
                f"a path at {self._protocol}:// must not hold {' or '.join(lost)}: {path!r}; listings lose it"
            )

    def _full(self, path: str) -> str:
        return f"{self._url}/{path}" if path else self._url

    def _relative(self, name: str, folder: str) -> str:
        """The part of a listed name below `folder`; empty if it does not lie below."""
        prefix = self._key(folder).lstrip("/")
        name = name.lstrip("/").rstrip("/")
        if not prefix:
            return name
        return name[len(prefix) + 1 :] if name.startswith(prefix + "/") else ""

    def _put(self, path: str, value: bytes | memoryview, data: memoryview) -> None:
        try:
            self._write_new(path, value)
        except StorageExists:
            if not self._holds(path, data):
                raise
        self._confirm(path, data)

    def _write_new(self, path: str, value: bytes | memoryview) -> None:
        if not self._exclusive:
            with suppress(StorageNotFound):
                self.size(path)
                raise StorageExists(f"{self._full(path)} exists already and was left as it is", path=path)
        upload = self._client.upload
        if upload is None or len(value) < _LARGE or not self._connection.is_asynchronous:
            self._pipe(path, value, new=self._exclusive)
            return
        key = self._key(check_path(path))
        self._writing(
            path,
            lambda: self._connection.run(lambda fs: upload(fs, key, memoryview(value)), moves=len(value)),
        )

    def _pipe(self, path: str, value: bytes | memoryview, *, new: bool) -> None:
        key = self._key(check_path(path))
        body = value if isinstance(value, bytes) else self._client.body(value)
        words = self._client.new if new else self._client.over
        options = {**self._client.writing, **(words if _knows(self._class, words) else {})}

        def pipe() -> None:
            with _MEMORY_LOCK if self._protocol == "memory" else nullcontext():
                self._connection.call("pipe_file", key, body, moves=len(value), **options)

        try:
            self._writing(path, pipe, missing=StorageNotFound if self._client.folders else StorageError)
        except StorageNotFound:
            self._writing(
                path, lambda: self._connection.call("makedirs", key.rpartition("/")[0], exist_ok=True)
            )
            self._writing(path, pipe)

    def _confirm(self, path: str, data: memoryview) -> None:
        """A client that gives up under us may look like success, and a server may keep something else; so look."""
        try:
            info = self._info(path)
        except StorageNotFound as error:
            raise StorageUnavailable(f"{self._full(path)} was written but is not there", path=path) from error
        if info["size"] != len(data):
            raise StorageUnavailable(
                f"{self._full(path)} has {info['size']} bytes after {len(data)} were written", path=path
            )
        if not self._client.agrees(info, data):
            raise StorageUnavailable(
                f"{self._full(path)} arrived with another checksum than it was sent with", path=path
            )

    def _info(self, path: str) -> dict[str, Any]:
        key = self._key(check_path(path))
        info: dict[str, Any] = self._ask("look at", path, lambda: self._connection.call("info", key))
        if info["type"] != "file":
            raise StorageNotFound(f"{self._full(path)} is a folder, not an object", path=path)
        if info["size"] is None:
            raise StorageError(f"the store does not say how large {self._full(path)} is", path=path)
        return info

    def _below(self, key: str) -> Iterator[dict[str, Any]]:
        """Everything below a folder. What vanishes while we look is not there; every other error counts."""
        if _finds(self._class):
            found = self._connection.call("find", key, detail=True)
            if isinstance(found, dict):  # adlfs answers with a list where the folder is an object
                yield from found.values()
            return
        folders, seen = [key], set[str]()
        while folders:
            folder = folders.pop()
            if folder in seen:
                continue
            seen.add(folder)
            try:
                found = self._connection.call("ls", folder, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                continue
            folders += [info["name"] for info in found if info["type"] == "directory"]
            yield from (info for info in found if info["type"] != "directory")

    def _about_uploads(
        self, doing: str, folder: str, what: Callable[[Any, str], Coroutine[Any, Any, T]]
    ) -> T:
        key = self._key(folder)
        found: T = self._ask(doing, folder, lambda: self._connection.run(lambda fs: what(fs, key)))
        return found

    def _check_length(self, path: str, found: int, start: int, length: int) -> None:
        if found < length:
            raise self._short(path, start, length)
        if found > length:
            raise StorageError(
                f"the store ignores ranges; cannot read parts of {self._full(path)}", path=path
            )

    def _short(self, path: str, start: int, length: int) -> StorageShort:
        return StorageShort(
            f"{self._full(path)} ends before the {length} bytes from {start} on that were asked for",
            path=path,
        )

    def _holds(self, path: str, data: memoryview) -> bool:
        """Whether the object is these bytes.

        Raises:
            StorageNotFound: there is none.
        """
        if self.size(path) != len(data):
            return False
        buffer = memoryview(bytearray(min(_PIECE, len(data))))
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            self.read_into(path, start, buffer[: len(piece)])
            if buffer[: len(piece)] != piece:
                return False
        return True

    def _writing(
        self, path: str, call: Callable[[], object], missing: type[StorageError] = StorageError
    ) -> None:
        self._ask("write", path, call, missing=missing)

    def _ask(
        self,
        doing: str,
        path: str,
        call: Callable[[], T],
        missing: type[StorageError] = StorageNotFound,
    ) -> T:
        """Do `call`; with fresh credentials once more if they have expired.

        Whatever a client raises is turned into our tree. A lack of memory is not the store's.
        """
        for renewed in (False, True):
            try:
                return call()
            except (StorageError, MemoryError):
                raise
            except Exception as cause:
                kind = class_of_client_error(cause)
                if issubclass(kind, StorageExpired) and not renewed:
                    self._connection.renew()
                    continue
                kind = missing if kind is StorageNotFound else kind
                raise storage_error(
                    cause, doing=doing, path=path, where=self._full(path), kind=kind
                ) from cause
        raise AssertionError("unreachable")


def _file_system_class(protocol: str, url: str, client: Client) -> type[AbstractFileSystem]:
    try:
        found: type[AbstractFileSystem] = fsspec.get_filesystem_class(protocol)
    except ImportError as cause:
        todo = f"pip install 'spotsafe[{client.extra}]'" if client.extra else str(cause)
        raise StorageError(f"{url}: the package for {protocol}:// is missing; {todo}", path=url) from cause
    except ValueError as cause:
        raise ValueError(
            f"{url}: unknown protocol {protocol!r}; give a path, or a url such as s3://, gs:// or abfs:// "
            "(extras s3, gcs and azure)"
        ) from cause
    if not _knows(AbstractFileSystem, {"mode"}):
        raise StorageError(
            f"{url}: fsspec {fsspec.__version__} cannot create objects exclusively; pip install -U fsspec",
            path=url,
        )
    return found


def _knows(kind: type[AbstractFileSystem], words: Iterable[str]) -> bool:
    """Whether `pipe_file` of this class knows these keywords. Older ones swallow `mode` and overwrite."""
    method = kind._pipe_file if issubclass(kind, AsyncFileSystem) else kind.pipe_file  # noqa: SLF001 - no other way
    return set(words) <= set(inspect.signature(method).parameters)


def _finds(kind: type[AbstractFileSystem]) -> bool:
    """Whether this class has a `find` of its own. The inherited one leaves out folders that it could not list."""
    if issubclass(kind, AsyncFileSystem):
        return kind._find is not AsyncFileSystem._find  # noqa: SLF001 - the one that is overridden
    return kind.find is not AbstractFileSystem.find
