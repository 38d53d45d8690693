"""Trying again, in one place: the only layer that waits and repeats."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    wait_random_exponential,
)

from spotsafe.errors import StorageExists, StorageShort, StorageUnavailable
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.storage.writing import flat

T = TypeVar("T")

_log = logging.getLogger(__name__)
# Bytes read back at a time when an object that is in the way may be our own.
_COMPARE = 4 * 1024 * 1024


class RetryingStore(WrappingStore):
    """Repeats what failed with `StorageUnavailable`, and nothing else, with growing random waits.

    A write whose answer was lost and that then finds its own object in the way has succeeded: the bytes are
    read back and compared.

    Args:
        inner: the store that does the work.
        attempts: how often an operation is tried in all.
        max_wait_s: the longest wait between two tries, in seconds.
        deadline: seconds that are left from now on, or None for no limit; asked anew before every wait. A
            wait that would reach it is not begun: the last error is raised at once.
        sleep: waits for so many seconds. Tests hand in their own.
    """

    def __init__(
        self,
        inner: Store,
        *,
        attempts: int = 6,
        max_wait_s: float = 20.0,
        deadline: Callable[[], float | None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1: {attempts}")
        if max_wait_s < 0:
            raise ValueError(f"max_wait_s must not be negative: {max_wait_s}")
        self._attempts = attempts
        self._max_wait_s = max_wait_s
        self._deadline = deadline
        self._sleep = sleep

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Do `call`, again and again while the store is unavailable."""
        return self._retrying(operation)(call)

    def put(self, path: str, data: bytes) -> None:
        """See `Store.put`."""
        self._write_new(Operation("put", path), lambda: self.inner.put(path, data), expected=memoryview(data))

    def put_large(self, path: str, data: memoryview) -> None:
        """See `Store.put_large`."""
        self._write_new(
            Operation("put_large", path), lambda: self.inner.put_large(path, data), expected=flat(data)
        )

    def _write_new(self, operation: Operation, call: Callable[[], None], *, expected: memoryview) -> None:
        in_doubt = False

        def write() -> None:
            nonlocal in_doubt
            try:
                call()
            except StorageUnavailable:
                in_doubt = True
                raise
            except StorageExists:
                if not (in_doubt and self._holds(operation.path, expected)):
                    raise

        self.around(operation, write)

    def _holds(self, path: str, expected: memoryview) -> bool:
        if self.inner.size(path) != len(expected):
            return False
        buffer = memoryview(bytearray(min(_COMPARE, len(expected))))
        try:
            for start in range(0, len(expected), _COMPARE):
                piece = expected[start : start + _COMPARE]
                self.inner.read_into(path, start, buffer[: len(piece)])
                if buffer[: len(piece)] != piece:
                    return False
        except StorageShort:
            return False
        return True

    def _retrying(self, operation: Operation) -> Retrying:
        return Retrying(
            retry=retry_if_exception_type(StorageUnavailable),
            stop=self._is_over,
            wait=wait_random_exponential(multiplier=0.5, max=self._max_wait_s),
            sleep=self._sleep,
            before_sleep=lambda state: _log_retry(operation, state),
            reraise=True,
        )

    def _is_over(self, state: RetryCallState) -> bool:
        if state.attempt_number >= self._attempts:
            return True
        left = None if self._deadline is None else self._deadline()
        return left is not None and state.upcoming_sleep >= left


def _log_retry(operation: Operation, state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome else None
    _log.info(
        "%s %s: try %d failed, next in %.1f s: %s",
        operation.name,
        operation.path,
        state.attempt_number,
        state.upcoming_sleep,
        error,
    )
