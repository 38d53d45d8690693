"""How far the copy of a save has come, told by the thread that copies to those that write what is there already."""

from __future__ import annotations

import threading


class CopyFailed(Exception):
    """The copy was given up: what lies in the arena is no state. Whoever copied knows why, and tells."""


class Staging:
    """The progress of one copy into an arena, from its first byte to its last.

    INVARIANT: `wait` returns only when the bytes asked for are there and will not change until the save is written.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._end = 0
        self._complete = self._failed = False

    def reached(self, end: int) -> None:
        """Everything before `end`, an offset in the arena in bytes, has its value."""
        with self._changed:
            self._end = max(self._end, end)
            self._changed.notify_all()

    def finish(self) -> None:
        """Everything has its value."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def fail(self) -> None:
        """It never will."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()

    def wait(self, end: int | None = None) -> None:
        """Return when everything before `end` is there; None waits for all of it.

        Raises:
            CopyFailed: the copy was given up.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._failed or self._complete or (end is not None and end <= self._end)
            )
            if self._failed:
                raise CopyFailed
