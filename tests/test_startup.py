"""The parts of a start add up to all of it."""

from __future__ import annotations

from spotsafe.startup import BEFORE, CLAIMED, READ, STEPPED, Startup
from spotsafe.testing.clock import ManualClock


def test_parts_add_up() -> None:
    """Each is what passed since the one before, and the first what the program did before the session."""
    clock = ManualClock()
    startup = Startup(clock, before_s=4.0)
    clock.advance(1.0)
    startup.done(CLAIMED)
    clock.advance(0.5)
    startup.done(READ)
    assert dict(startup.parts) == {BEFORE: 4.0, CLAIMED: 1.0, READ: 0.5}
    clock.advance(2.0)
    assert startup.seconds == 1.5
    startup.done(STEPPED)
    assert list(dict(startup.parts)) == [BEFORE, CLAIMED, READ, STEPPED]
    assert startup.seconds == 3.5
    assert sum(dict(startup.parts).values()) == 4.0 + startup.seconds


def test_the_system_tells_when_the_process_began() -> None:
    """And what it said stays what it was when the session was entered."""
    parts = Startup(ManualClock()).parts
    assert dict(parts).get(BEFORE, 1.0) > 0
