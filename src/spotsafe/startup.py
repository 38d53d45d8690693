"""How long a start takes, part by part: from the beginning of the process to the first step."""

from __future__ import annotations

from spotsafe.clock import Clock
from spotsafe.machine import process_age_s

BEFORE = "before the session"
"""Imports, models, data: all that the program did. Only where the system tells when a process began."""
WAITED, CLAIMED, READ, LOADED, STEPPED = "waited for a writer", "claimed", "read", "loaded", "first step"


class Startup:
    """A stopwatch with one hand.

    Args:
        clock: measures.
        before_s: seconds since the process began; None asks the system.
    """

    def __init__(self, clock: Clock, *, before_s: float | None = None) -> None:
        self._clock = clock
        before = process_age_s() if before_s is None else before_s
        self._parts: dict[str, float] = {} if before is None else {BEFORE: before}
        self._entered_at = self._last = clock.monotonic()

    def done(self, part: str) -> None:
        """Everything since the last part was this one."""
        now = self._clock.monotonic()
        self._parts[part], self._last = now - self._last, now

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        """Name and seconds of each, in order."""
        return tuple(self._parts.items())

    @property
    def seconds(self) -> float:
        """Since the session was entered, up to the last part that was done."""
        return self._last - self._entered_at
