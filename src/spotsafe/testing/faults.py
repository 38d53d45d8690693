"""Stores that go wrong on purpose, around any store: what proves that a run survives its storage.

All of them are stores themselves and can be put around each other. None of them sleeps.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Collection
from typing import Literal, TypeVar

from spotsafe.errors import StorageUnavailable
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import WRITES, Operation, WrappingStore

T = TypeVar("T")


def kill_process() -> None:
    """End the process at once, as a power cut does: no `finally`, no flush. Exit code 9."""
    os._exit(9)


def flip_bit(data: memoryview) -> None:
    """Flip the lowest bit of the byte in the middle."""
    if len(data):
        data[len(data) // 2] ^= 1


class CountingStore(WrappingStore):
    """Remembers every operation, in the order in which they began, also those that fail.

    Attributes:
        operations: what was asked for so far.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.operations: list[Operation] = []

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Record, then do."""
        self.operations.append(operation)
        return call()

    def count(self, name: str) -> int:
        """How often the method `name` was called."""
        return sum(operation.name == name for operation in self.operations)


class CrashingStore(WrappingStore):
    """Crashes before or after the operation number `at`. Every method call is one operation.

    Args:
        inner: the store that does the work.
        at: which operation, counted from 1 over all threads.
        when: ``"before"``: it never happened; ``"after"``: it happened, and nobody learned of it.
        crash: what a crash is. The default ends the process without any clean-up. One that returns lets the
            operation go on, so it should raise.

    Attributes:
        count: operations begun so far.
    """

    def __init__(
        self,
        inner: Store,
        *,
        at: int,
        when: Literal["before", "after"] = "before",
        crash: Callable[[], object] = kill_process,
    ) -> None:
        super().__init__(inner)
        if at < 1:
            raise ValueError(f"operations are counted from 1: at={at}")
        if when not in {"before", "after"}:
            raise ValueError(f"when must be 'before' or 'after': {when!r}")
        self.count = 0
        self._at = at
        self._when = when
        self._crash = crash
        self._lock = threading.Lock()

    def around(self, operation: Operation, call: Callable[[], T]) -> T:  # noqa: ARG002 - any will do
        """Count, and crash if it is this one."""
        with self._lock:
            self.count += 1
            number = self.count
        if number == self._at and self._when == "before":
            self._crash()
        try:
            return call()
        finally:  # also after one that failed: to have looked for what is not there is an operation like any other
            if number == self._at and self._when == "after":
                self._crash()


class FailingStore(WrappingStore):
    """Raises what `fail` returns instead of doing the operation.

    Args:
        inner: the store that does the work.
        fail: called with the method's name, the path and the operation's number, counted from 1; the error to
            raise, or None to let it pass.
    """

    def __init__(self, inner: Store, *, fail: Callable[[str, str, int], Exception | None]) -> None:
        super().__init__(inner)
        self._fail = fail
        self._numbers = itertools.count(1)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Ask `fail`, then do."""
        error = self._fail(operation.name, operation.path, next(self._numbers))
        if error is not None:
            raise error
        return call()


class LostResponseStore(WrappingStore):
    """Does the operation, and then says that the store did not answer.

    Args:
        inner: the store that does the work.
        times: how many answers are lost before all arrive.
        operations: names of the methods whose answers are lost; by default those that write.
    """

    def __init__(self, inner: Store, *, times: int = 1, operations: Collection[str] = WRITES) -> None:
        super().__init__(inner)
        self._budget = _Budget(times)
        self._operations = frozenset(operations)

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Do, then lose the answer."""
        result = call()
        if operation.name in self._operations and self._budget.take():
            raise StorageUnavailable(
                f"the answer to {operation.name} {operation.path} was lost", path=operation.path
            )
        return result


class TearingStore(WrappingStore):
    """Reads return wrong bytes for a while, as a bad cable, a bad disk or a bad cache makes them.

    What is stored stays as it is.

    Args:
        inner: the store that does the work.
        reads: how many calls of `read` and `read_into` return wrong bytes before all are right.
        matches: which paths are hit; by default all.
        damage: changes the bytes in place; by default one bit.
    """

    def __init__(
        self,
        inner: Store,
        *,
        reads: int = 1,
        matches: Callable[[str], bool] = lambda _path: True,
        damage: Callable[[memoryview], None] = flip_bit,
    ) -> None:
        super().__init__(inner)
        self._budget = _Budget(reads)
        self._matches = matches
        self._damage = damage

    def read(self, path: str, *, max_bytes: int) -> bytes:
        """See `Store.read`; wrong bytes while the budget lasts."""
        data = bytearray(super().read(path, max_bytes=max_bytes))
        self._tear(path, memoryview(data))
        return bytes(data)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`; wrong bytes while the budget lasts."""
        super().read_into(path, offset, buffer)
        self._tear(path, buffer.cast("B"))

    def _tear(self, path: str, data: memoryview) -> None:
        if self._matches(path) and self._budget.take():
            self._damage(data)


class _Budget:
    """Something that may happen so many times, over all threads."""

    def __init__(self, times: int) -> None:
        self._left = times
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0
