"""A store at any url that fsspec knows.

What fsspec's file systems really do differs from what they say; the choices here follow from that. A file
system of our own, without its cache of listings (they go stale) and on an event loop of its own; one per
process (they do not survive a fork). Whole objects only, never `open("wb")`, which publishes half of an
object when the body fails; never transactions, which change the shared instance; never `mv`. Every write is
looked at afterwards, because a cancelled request looks like success.
"""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.core import split_protocol, url_to_fs
from fsspec.spec import AbstractFileSystem

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageNotFound,
    StorageShort,
    StorageUnavailable,
)
from spotsafe.storage.eventloop import private_loop
from spotsafe.storage.failures import class_of_client_error, storage_error
from spotsafe.storage.paths import check_folder, check_path, is_temporary
from spotsafe.storage.store import Entry
from spotsafe.storage.writing import flat

# Where `pipe_file(mode="create")` is one conditional request. Everywhere else fsspec looks and then writes.
_EXCLUSIVE = frozenset({"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"})
# Which clients take a memoryview as it is; the others need `bytes`, a copy.
_TAKES_VIEWS = frozenset({"memory", "gs", "gcs"})
_EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "adl": "azure",
}
# The memory file system looks and then writes, so writers of one process have to take turns.
_MEMORY_LOCK = threading.Lock()
# Bytes of one ranged read.
_PIECE = 64 * 1024 * 1024
# How often `create` tries when the store says "exists" and then shows nothing (409 of S3).
_CREATE_TRIES = 5


class _Open(NamedTuple):
    fs: Any
    root: str


class FsspecStore:
    """Objects below a url.

    On backends whose conditional writes are known (memory, S3, Google, Azure) `create` is atomic. On all
    others fsspec looks and then writes: `create` reads back and is true only if its own bytes are there, but
    a second writer at the same instant may replace them (rule 12 of the design), and a large object may be
    seen growing.

    Args:
        url: any fsspec url, such as ``"memory://run"`` or ``"s3://bucket/run"``.
        **storage_options: handed to the file system.

    Raises:
        ValueError: no such protocol is known.
        StorageError: the package for the protocol is missing or too old.
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        self._url = url.rstrip("/") if not url.endswith("://") else url
        self._protocol = split_protocol(url)[0] or "file"
        self._class = _file_system_class(self._protocol, url)
        self._options = dict(storage_options)
        self._exclusive = self._protocol in _EXCLUSIVE and _knows_create(self._class)
        self._by_process: dict[int, _Open] = {}

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
        self._put(path, data if self._protocol in _TAKES_VIEWS else bytes(data), data)

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
        self._pipe(path, data, mode="overwrite")
        self._confirm(path, len(data))

    def delete(self, path: str) -> None:
        """Delete an object; one that is not there is no error."""
        key = self._key(check_path(path))
        with suppress(StorageNotFound), self._translated("delete", path):
            self._open().fs.rm_file(key)

    def begun(self, folder: str) -> list[str]:
        """None: fsspec shows no uploads that were begun."""
        check_folder(folder)
        return []

    def abort_uploads(self, folder: str) -> None:
        """Nothing: fsspec shows no uploads that were begun. A life-cycle rule of the bucket removes them."""
        check_folder(folder)

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
            with self._translated("read", path):
                data = bytes(self._open().fs.cat_file(self._key(path)))
            size = len(data)
        if size > max_bytes:
            raise StorageError(
                f"{self._full(path)} is larger than the {max_bytes} bytes it may have; "
                "it is no file of this run's format",
                path=path,
            )
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset` (bytes) on.

        Raises:
            StorageNotFound: there is none.
            StorageShort: it ends before the buffer is full.
        """
        if offset < 0:
            raise ValueError(f"offset must not be negative: {offset}")
        view = flat(buffer)
        if not len(view):
            self.size(path)
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            piece[:] = self._range(path, offset + start, len(piece))

    def size(self, path: str) -> int:
        """Size of an object in bytes.

        Raises:
            StorageNotFound: there is none.
        """
        key = self._key(check_path(path))
        with self._translated("look at", path):
            info = self._open().fs.info(key)
        if info["type"] != "file":
            raise StorageNotFound(f"{self._full(path)} is a folder, not an object", path=path)
        if info["size"] is None:
            raise StorageError(f"the store does not say how large {self._full(path)} is", path=path)
        return int(info["size"])

    def names(self, folder: str) -> list[str]:
        """Base names of what lies directly in a folder, sorted; empty if there is no such folder."""
        key = self._key(check_folder(folder))
        found: list[str] = []
        with suppress(StorageNotFound), self._translated("list", folder):
            found = self._open().fs.ls(key, detail=False)
        below = (self._relative(name, folder) for name in found)
        return sorted({name.partition("/")[0] for name in below if name and not is_temporary(name)})

    def list(self, folder: str) -> list[Entry]:
        """All objects below a folder, sorted by path; empty if there is no such folder."""
        key = self._key(check_folder(folder))
        found: list[dict[str, Any]] = []
        with suppress(StorageNotFound), self._translated("list", folder):
            fs = self._open().fs
            found = list(fs.find(key, detail=True).values() if _finds(self._class) else _walk(fs, key))
        prefix = f"{folder}/" if folder else ""
        return sorted(
            Entry(prefix + name, int(info["size"]))
            for info in found
            if info.get("type") == "file" and (name := self._relative(info["name"], folder))
        )

    # -- inside

    def _open(self) -> _Open:
        """The file system of this process. Two threads that come first at once may make two; one is kept."""
        pid = os.getpid()
        if pid not in self._by_process:
            options = {**self._options, "skip_instance_cache": True, "use_listings_cache": False}
            if issubclass(self._class, AsyncFileSystem):
                options.setdefault("loop", private_loop(self))
            with self._translated("open", ""):
                fs, root = url_to_fs(self._url, **options)
            self._by_process.setdefault(pid, _Open(fs, root.rstrip("/")))
        return self._by_process[pid]

    def _key(self, path: str) -> str:
        root = self._open().root
        return f"{root}/{path}" if root and path else root or path

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
        self._confirm(path, len(data))

    def _write_new(self, path: str, value: bytes | memoryview) -> None:
        if not self._exclusive:
            with suppress(StorageNotFound):
                self.size(path)
                raise StorageExists(f"{self._full(path)} exists already and was left as it is", path=path)
        self._pipe(path, value, mode="create" if self._exclusive else "overwrite")

    def _pipe(self, path: str, value: bytes | memoryview, *, mode: str) -> None:
        key = self._key(check_path(path))
        fs = self._open().fs
        with self._translated("write", path, missing=StorageError):
            if not self._exclusive:
                fs.makedirs(key.rpartition("/")[0], exist_ok=True)
            with _MEMORY_LOCK if self._protocol == "memory" else nullcontext():
                fs.pipe_file(key, value, mode=mode)

    def _confirm(self, path: str, size: int) -> None:
        """A request that was cancelled under us looks like success; so look."""
        try:
            found = self.size(path)
        except StorageNotFound as error:
            raise StorageUnavailable(f"{self._full(path)} was written but is not there", path=path) from error
        if found != size:
            raise StorageUnavailable(
                f"{self._full(path)} has {found} bytes after {size} were written", path=path
            )

    def _range(self, path: str, start: int, length: int) -> bytes:
        key = self._key(check_path(path))
        try:
            with self._translated("read", path):
                data = bytes(self._open().fs.cat_file(key, start=start, end=start + length))
        except (StorageNotFound, StorageUnavailable):
            raise
        except StorageError as error:
            # Many servers answer a range behind the end with an error of their own.
            if self.size(path) < start + length:
                raise self._short(path, start, length) from error
            raise
        if len(data) < length:
            raise self._short(path, start, length)
        if len(data) > length:
            raise StorageError(
                f"the store ignores ranges; cannot read parts of {self._full(path)}", path=path
            )
        return data

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
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            if self._range(path, start, len(piece)) != piece:
                return False
        return True

    @contextmanager
    def _translated(
        self, doing: str, path: str, missing: type[StorageError] = StorageNotFound
    ) -> Iterator[None]:
        """Turn whatever a client raises into our tree. A lack of memory is not the store's."""
        try:
            yield
        except (StorageError, MemoryError):
            raise
        except Exception as cause:
            kind = class_of_client_error(cause)
            kind = missing if kind is StorageNotFound else kind
            where = self._full(path)
            raise storage_error(cause, doing=doing, path=path, where=where, kind=kind) from cause


def _file_system_class(protocol: str, url: str) -> type[AbstractFileSystem]:
    try:
        found: type[AbstractFileSystem] = fsspec.get_filesystem_class(protocol)
    except ImportError as cause:
        extra = _EXTRAS.get(protocol)
        todo = f"pip install 'spotsafe[{extra}]'" if extra else str(cause)
        raise StorageError(f"{url}: the package for {protocol}:// is missing; {todo}", path=url) from cause
    except ValueError as cause:
        raise ValueError(
            f"{url}: unknown protocol {protocol!r}; give a path, or a url such as s3://, gs:// or abfs:// "
            "(extras s3, gcs and azure)"
        ) from cause
    if not _knows_create(AbstractFileSystem):
        raise StorageError(
            f"{url}: fsspec {fsspec.__version__} cannot create objects exclusively; pip install -U fsspec",
            path=url,
        )
    return found


def _knows_create(kind: type[AbstractFileSystem]) -> bool:
    """Whether `pipe_file` of this class knows `mode="create"`. Older ones swallow the word and overwrite."""
    method = kind._pipe_file if issubclass(kind, AsyncFileSystem) else kind.pipe_file  # noqa: SLF001 - no other way
    return "mode" in inspect.signature(method).parameters


def _finds(kind: type[AbstractFileSystem]) -> bool:
    """Whether this class has a `find` of its own. The inherited one leaves out folders that it could not list."""
    if issubclass(kind, AsyncFileSystem):
        return kind._find is not AsyncFileSystem._find  # noqa: SLF001 - the one that is overridden
    return kind.find is not AbstractFileSystem.find


def _walk(fs: AbstractFileSystem, key: str) -> Iterator[dict[str, Any]]:
    """Everything below a folder. What vanishes while we look is not there; every other error counts."""
    folders = [key]
    seen: set[str] = set()
    while folders:
        folder = folders.pop()
        if folder in seen:
            continue
        seen.add(folder)
        try:
            found = fs.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            continue
        folders += [info["name"] for info in found if info["type"] == "directory"]
        yield from (info for info in found if info["type"] != "directory")
