"""A store around a store: the base of retrying, counting, and every injected fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from spotsafe.storage.store import Entry, Store, creates_exclusively, reads_in_place

T = TypeVar("T")

WRITES = frozenset({"put", "put_large", "create", "replace", "delete", "abort_uploads"})
"""Names of the operations that change something."""
READS = frozenset({"read", "read_into", "size", "list", "names", "begun"})
"""Names of the operations that only look."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of a store's method."""

    name: str
    """The method, like ``"put_large"``."""
    path: str
    """The object's or folder's path inside the run."""


class WrappingStore:
    """Hands every operation to `inner`, through one method, `around`, that a subclass overrides.

    Args:
        inner: the store that does the work.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def around(self, operation: Operation, call: Callable[[], T]) -> T:  # noqa: ARG002 - for subclasses
        """Do `call`, which is `operation`, and whatever the subclass is for."""
        return call()

    @property
    def url(self) -> str:
        """Where the inner store is."""
        return self.inner.url

    @property
    def exclusive(self) -> bool | None:
        """What the inner store says of its `create`."""
        return creates_exclusively(self.inner)

    @property
    def in_place(self) -> bool:
        """What the inner store says of its `read_into`."""
        return reads_in_place(self.inner)

    def put(self, path: str, data: bytes) -> None:
        """See `Store.put`."""
        self.around(Operation("put", path), lambda: self.inner.put(path, data))

    def put_large(self, path: str, data: memoryview) -> None:
        """See `Store.put_large`."""
        self.around(Operation("put_large", path), lambda: self.inner.put_large(path, data))

    def create(self, path: str, data: bytes) -> bool:
        """See `Store.create`."""
        return self.around(Operation("create", path), lambda: self.inner.create(path, data))

    def replace(self, path: str, data: bytes) -> None:
        """See `Store.replace`."""
        self.around(Operation("replace", path), lambda: self.inner.replace(path, data))

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """See `Store.read`."""
        return self.around(Operation("read", path), lambda: self.inner.read(path, max_bytes=max_bytes))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        self.around(Operation("read_into", path), lambda: self.inner.read_into(path, offset, buffer))

    def size(self, path: str) -> int:
        """See `Store.size`."""
        return self.around(Operation("size", path), lambda: self.inner.size(path))

    def names(self, folder: str) -> list[str]:
        """See `Store.names`."""
        return self.around(Operation("names", folder), lambda: self.inner.names(folder))

    def delete(self, path: str) -> None:
        """See `Store.delete`."""
        self.around(Operation("delete", path), lambda: self.inner.delete(path))

    def begun(self, folder: str) -> list[str]:
        """See `Store.begun`."""
        return self.around(Operation("begun", folder), lambda: self.inner.begun(folder))

    def abort_uploads(self, folder: str) -> None:
        """See `Store.abort_uploads`."""
        self.around(Operation("abort_uploads", folder), lambda: self.inner.abort_uploads(folder))

    def list(self, folder: str) -> list[Entry]:
        """See `Store.list`."""
        return self.around(Operation("list", folder), lambda: self.inner.list(folder))
