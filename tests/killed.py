"""A process that dies at a chosen storage operation, as tests that enumerate all of them need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation, WrappingStore

T = TypeVar("T")


class Crash(BaseException):
    """The process is gone."""


class Killed(WrappingStore):
    """Dies before or after operation `at`, and from then on does nothing any more, like the process it is part of."""

    def __init__(self, inner: Store, *, at: int, after: bool) -> None:
        super().__init__(inner)
        self.at, self.after, self.count, self.dead = at, after, 0, False

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count, and die."""
        self.count += 1
        if self.dead or (self.count == self.at and not self.after):
            self.dead = True
            raise Crash
        result = call()
        if self.count == self.at:
            self.dead = True
            raise Crash
        return result
