"""How far the copy of a save has come, told by the thread that copies to those that write what is there already."""

from __future__ import annotations

import time
from collections.abc import Callable

_LOOK_EVERY_S = 0.002
_SERIAL, _END, _STATE, _WRITTEN = range(4)
_COPYING, _COMPLETE, _FAILED = range(3)

BYTES = 32
"""Of memory that two processes need to share one `Staging`: four words of 64 bits."""


def place_of(memory: memoryview, place: int) -> memoryview:
    """The words of one of the copies that share memory, by the number of its place in it."""
    return memory[place * BYTES : (place + 1) * BYTES]


class CopyFailed(Exception):
    """The copy was given up: what lies in the arena is no state. Whoever copied knows why, and tells."""


class Staging:
    """The progress of one copy into an arena, from its first byte to its last.

    One thread tells, any number wait, in this process or in another one that shares the words. There is no lock in it:
    Ctrl-C in the thread that copies could leave one held, and the writer waiting for ever. A copy takes seconds at
    most, so to look every other millisecond costs nothing.

    INVARIANT: `wait` returns only when the bytes asked for are there and will not change until the save is written, or,
    of a save that is streamed through a slot, until the writer says by `written` that it needs them no more.

    Args:
        memory: `BYTES` bytes that hold the words; its own if None. An earlier copy that used them is over.
        serial: which of the copies that use the same words this is.
        place: number of these words, where several copies share memory.
        gone: in another process: whether the one that copies has ended. What is not there by then never will be.
    """

    def __init__(
        self,
        memory: memoryview | None = None,
        *,
        serial: int = 0,
        place: int = 0,
        gone: Callable[[], bool] | None = None,
    ) -> None:
        own = memoryview(bytearray(BYTES)) if memory is None else memory
        self._words = own[:BYTES].cast("Q")
        self._gone = gone
        self.serial, self.place = serial, place

    def begin(self) -> None:
        """Nothing is there yet."""
        self._words[_STATE] = _COPYING
        self._words[_END] = self._words[_WRITTEN] = 0
        self._words[_SERIAL] = self.serial

    def reached(self, end: int) -> None:
        """Everything before `end`, an offset in the arena in bytes, has its value."""
        self._words[_END] = max(self._words[_END], end)

    def finish(self) -> None:
        """Everything has its value."""
        self._words[_STATE] = _COMPLETE

    def fail(self) -> None:
        """It never will, unless it has already."""
        if self._words[_STATE] != _COMPLETE:
            self._words[_STATE] = _FAILED

    def wait(self, end: int | None = None) -> None:
        """Return when everything before `end` is there; None waits for all of it.

        Raises:
            CopyFailed: the copy was given up, or whoever copied has ended before it was complete.
        """
        while not self._is_there(end):
            # Who has ended may have told something right before: so that is asked first, and the words again.
            if self._gone is not None and self._gone() and not self._is_complete():
                raise CopyFailed
            time.sleep(_LOOK_EVERY_S)

    def written(self, end: int) -> None:
        """The writer needs nothing before `end` any more: other bytes may come to lie in its place."""
        self._words[_WRITTEN] = end

    def wait_written(self, end: int, *, lives: Callable[[], bool]) -> bool:
        """Return when nothing before `end` is needed any more; false if the writer has given the save up.

        Args:
            end: offset in the save, in bytes.
            lives: whether the writer still has the save.
        """
        while self._words[_WRITTEN] < end:
            if not lives():
                return False
            time.sleep(_LOOK_EVERY_S)
        return True

    def _is_complete(self) -> bool:
        return self._words[_SERIAL] == self.serial and self._words[_STATE] == _COMPLETE

    def _is_there(self, end: int | None) -> bool:
        if self._words[_SERIAL] != self.serial or self._words[_STATE] == _FAILED:
            raise CopyFailed
        return self._words[_STATE] == _COMPLETE or (end is not None and end <= self._words[_END])
