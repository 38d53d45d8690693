"""How far the copy of a save has come, told by the thread that copies to those that write what is there already."""

from __future__ import annotations

import time

_LOOK_EVERY_S = 0.002


class CopyFailed(Exception):
    """The copy was given up: what lies in the arena is no state. Whoever copied knows why, and tells."""


class Staging:
    """The progress of one copy into an arena, from its first byte to its last.

    One thread tells, any number wait. There is no lock in it: Ctrl-C in the thread that copies could leave one held,
    and the writer waiting for ever. A copy takes seconds at most, so to look every other millisecond costs nothing.

    INVARIANT: `wait` returns only when the bytes asked for are there and will not change until the save is written.
    """

    def __init__(self) -> None:
        self._end = 0
        self._complete = self._failed = False

    def reached(self, end: int) -> None:
        """Everything before `end`, an offset in the arena in bytes, has its value."""
        self._end = max(self._end, end)

    def finish(self) -> None:
        """Everything has its value."""
        self._complete = True

    def fail(self) -> None:
        """It never will."""
        self._failed = True

    def wait(self, end: int | None = None) -> None:
        """Return when everything before `end` is there; None waits for all of it.

        Raises:
            CopyFailed: the copy was given up.
        """
        while not (self._failed or self._complete or (end is not None and end <= self._end)):
            time.sleep(_LOOK_EVERY_S)
        if self._failed:
            raise CopyFailed
