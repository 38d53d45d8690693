"""The saves that a writer was given and has not ended: the one being written, and at most one behind it."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Generic, TypeVar

from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.clock import Clock
from spotsafe.writer.job import SaveResult

MOST_IN_FLIGHT = 2
"""More would only be older when they are written; and each needs memory of its own."""
_LONG_S = 3600.0

T = TypeVar("T")


class InFlight(Generic[T]):
    """Saves in the order in which they were given, each with what the writer keeps of it, and how they ended.

    One thread adds, waits and polls; any may end. There is no lock in it: Ctrl-C in the training thread could leave one
    held, and the writer waiting for ever.
    """

    def __init__(self) -> None:
        self._saves: dict[CheckpointName, T] = {}  # taken out by whoever tells how it ended
        self._open: dict[CheckpointName, None] = {}  # until that is told
        self._results: deque[SaveResult] = deque()
        self._changed = threading.Event()

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, name: CheckpointName) -> bool:
        return name in self._open

    def require_room(self, name: CheckpointName) -> None:
        """See that another save may be given.

        Raises:
            RuntimeError: too many are in flight: a mistake of the caller.
        """
        if len(self) >= MOST_IN_FLIGHT:
            raise RuntimeError(f"save {name} given while {len(self)} others are in flight")

    def add(self, name: CheckpointName, what: T) -> None:
        """A save is given to the writer, for which there is room."""
        self._saves[name] = what
        self._open[name] = None

    def end(self, result: SaveResult) -> bool:
        """Tell how a save ended; false if somebody has told it before. It is in flight until its result is there."""
        if self._saves.pop(result.name, None) is None:
            return False
        self._results.append(result)
        self._open.pop(result.name, None)  # `add` may have been interrupted
        self._changed.set()
        return True

    def forget(self, name: CheckpointName) -> None:
        """A save was not given after all, at whatever point of `add` that was found out. It has no result."""
        self._saves.pop(name, None)
        self._open.pop(name, None)
        self._changed.set()

    def kept(self) -> list[T]:
        """What is kept of each, in order."""
        return list(self._saves.values())

    def poll(self) -> list[SaveResult]:
        """The results of the saves that have ended since the last call, in their order."""
        results = []
        with contextlib.suppress(IndexError):
            while True:
                results.append(self._results.popleft())
        return results

    def wait(self, clock: Clock, *, timeout_s: float | None, left: int = 0) -> bool:
        """Wait until at most `left` saves are in flight.

        Args:
            clock: waits.
            timeout_s: seconds to wait at most; None waits as long as it takes.
            left: how many may be.

        Returns:
            False if it took longer.
        """
        end = None if timeout_s is None else clock.monotonic() + max(timeout_s, 0.0)
        while True:
            self._changed.clear()  # before the look: whoever ends one after it is heard
            if len(self) <= left:
                return True
            rest = _LONG_S if end is None else end - clock.monotonic()
            if rest <= 0:
                return False
            clock.wait(self._changed, rest)
