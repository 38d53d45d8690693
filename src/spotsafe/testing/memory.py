"""A store in memory: fast, strict, and gone with the process."""

from __future__ import annotations

import builtins
import threading

from spotsafe.errors import StorageError, StorageExists, StorageNotFound, StorageShort
from spotsafe.storage.store import Entry


class MemoryStore:
    """Keeps objects in a dictionary, with the strict answers that `Store` asks for.

    Args:
        url: what it calls itself.

    Attributes:
        objects: what is stored, by path. A test may change it, as a faulty disk would.
        exclusive: see `spotsafe.storage.store.creates_exclusively`.
    """

    exclusive: bool | None = True

    def __init__(self, url: str = "memory://run") -> None:
        self.objects: dict[str, bytes] = {}
        self._url = url
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """Where it is, for people."""
        return self._url

    def copy(self) -> MemoryStore:
        """A store of its own that holds the same objects."""
        other = MemoryStore(self._url)
        with self._lock:
            other.objects.update(self.objects)
        return other

    def put(self, path: str, data: bytes) -> None:
        """See `Store.put`."""
        with self._lock:
            if path in self.objects:
                raise StorageExists(f"{path} exists already", path=path)
            self.objects[path] = bytes(data)

    def put_large(self, path: str, data: memoryview) -> None:
        """See `Store.put_large`."""
        self.put(path, bytes(data))

    def create(self, path: str, data: bytes) -> bool:
        """See `Store.create`."""
        with self._lock:
            return self.objects.setdefault(path, bytes(data)) == data

    def replace(self, path: str, data: bytes) -> None:
        """See `Store.replace`."""
        with self._lock:
            self.objects[path] = bytes(data)

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """See `Store.read`."""
        data = self._get(path)
        if len(data) > max_bytes:
            raise StorageError(f"{path} has {len(data)} bytes, more than {max_bytes}", path=path)
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        data = self._get(path)[offset : offset + len(buffer)]
        if len(data) < len(buffer):
            raise StorageShort(f"{path} ends before byte {offset + len(buffer)}", path=path)
        buffer[:] = data

    def size(self, path: str) -> int:
        """See `Store.size`."""
        return len(self._get(path))

    def names(self, folder: str) -> builtins.list[str]:
        """See `Store.names`."""
        start = len(folder) + 1 if folder else 0
        return sorted({entry.path[start:].partition("/")[0] for entry in self.list(folder)})

    def delete(self, path: str) -> None:
        """See `Store.delete`."""
        with self._lock:
            self.objects.pop(path, None)

    def begun(self, folder: str) -> builtins.list[str]:  # noqa: ARG002 - it is the protocol's
        """See `Store.begun`; nothing is ever half written here."""
        return []

    def abort_uploads(self, folder: str) -> None:
        """See `Store.abort_uploads`; nothing is ever half written here."""

    def list(self, folder: str) -> builtins.list[Entry]:
        """See `Store.list`."""
        prefix = f"{folder}/" if folder else ""
        with self._lock:
            found = [Entry(path, len(data)) for path, data in self.objects.items() if path.startswith(prefix)]
        return sorted(found)

    def _get(self, path: str) -> bytes:
        with self._lock:
            data = self.objects.get(path)
        if data is None:
            raise StorageNotFound(f"{path} does not exist", path=path)
        return data
