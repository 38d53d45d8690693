"""What is short is not told, what is long not too often, and what was told of ends."""

from __future__ import annotations

import pytest

from spotsafe.events import WriterAwaited
from spotsafe.telling import Telling
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.sinks import RecordingSink


class Wait:
    """A wait of 60 seconds at most, and what was told of it."""

    def __init__(self) -> None:
        self.clock, self.sink = ManualClock(), RecordingSink()

    def telling(self, **options: float) -> Telling:
        def awaited(waited_s: float, over: bool) -> WriterAwaited:
            return WriterAwaited(waited_s=waited_s, limit_s=60.0, over=over)

        return Telling(awaited, emit=self.sink.emit, clock=self.clock, **options)

    @property
    def told(self) -> list[tuple[float, bool]]:
        return [(event.waited_s, event.over) for event in self.sink.of(WriterAwaited)]


def test_what_is_short_is_not_told() -> None:
    """However often somebody looks; not even its end."""
    wait = Wait()
    with wait.telling() as telling:
        for _ in range(29):
            wait.clock.advance(0.1)
            telling.look()
    assert wait.told == []


def test_what_is_long_is_told_every_few_seconds_and_when_it_is_over() -> None:
    """With the seconds that have passed."""
    wait = Wait()
    with wait.telling() as telling:
        for _ in range(12):
            telling.look()
            wait.clock.advance(1.0)
    assert wait.told == [(3.0, False), (8.0, False), (12.0, True)]


def test_who_looks_late_is_not_told_twice_at_once() -> None:
    """What was missed is not made up for."""
    wait = Wait()
    with wait.telling() as telling:
        wait.clock.advance(30.0)
        telling.look()
        telling.look()
    assert wait.told == [(30.0, False), (30.0, True)]


def test_it_is_over_however_it_ends() -> None:
    """An error or Ctrl-C leaves no wait behind that seems to go on."""
    wait = Wait()
    with pytest.raises(KeyboardInterrupt), wait.telling(first_s=0.0) as telling:
        telling.look()
        raise KeyboardInterrupt
    assert wait.told == [(0.0, False), (0.0, True)]


def test_what_was_never_told_of_has_no_end() -> None:
    """Also if it took long, but nobody looked."""
    wait = Wait()
    with wait.telling():
        wait.clock.advance(100.0)
    assert wait.told == []
