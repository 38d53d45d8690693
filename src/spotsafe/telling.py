"""Telling of what takes long: nothing in its first seconds, then every few, and its end if it was told of."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from spotsafe.clock import Clock
from spotsafe.events import Event

FIRST_S = 3.0
"""What is over before that is not worth a word."""
EVERY_S = 5.0


class Telling:
    """One wait, or one long piece of work, from the beginning of a ``with`` block to its end.

    Whoever waits calls `look` whenever it comes by; only that thread.

    Args:
        event: makes the event, of the seconds since the beginning and whether it is over. Whoever got one that is not
            gets one that is, however the block ends.
        emit: is told.
        clock: measures.
        first_s: seconds before the first event.
        every_s: seconds between two of them.
    """

    def __init__(
        self,
        event: Callable[[float, bool], Event],
        *,
        emit: Callable[[Event], object],
        clock: Clock,
        first_s: float = FIRST_S,
        every_s: float = EVERY_S,
    ) -> None:
        self._event, self._emit, self._clock = event, emit, clock
        self._every_s = every_s
        self._told = False
        self._began = clock.monotonic()
        self._due = self._began + first_s

    def __enter__(self) -> Telling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._told:
            self._emit(self._event(self._clock.monotonic() - self._began, True))

    def look(self) -> None:
        """Tell, if it is time to."""
        now = self._clock.monotonic()
        if now >= self._due:
            self._told, self._due = True, now + self._every_s
            self._emit(self._event(now - self._began, False))
