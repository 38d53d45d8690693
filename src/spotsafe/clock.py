"""Time as something that can be handed in, so that no test has to wait for it."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """What spotsafe asks of time. `spotsafe.testing.clock.ManualClock` is the one for tests."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never goes back. For every duration and deadline."""
        ...

    def wall(self) -> float:
        """Seconds since 1970-01-01 UTC. For people to read; never for an order or a deadline."""
        ...

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Block until `event` is set or `timeout` seconds passed; true if it is set."""
        ...


class SystemClock:
    """The clock of the machine."""

    def monotonic(self) -> float:
        """Seconds of `time.monotonic`."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds of `time.time`."""
        return time.time()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait for the event itself; no polling."""
        return event.wait(timeout)
