"""A clock that only moves when a test says so, and what every clock has to do."""

from __future__ import annotations

import threading
import time

from spotsafe.clock import Clock

_LOOK_S = 0.01
"""How soon a waiter sees an event that somebody set: an event cannot tell two conditions."""


class ManualClock:
    """Time for tests: stands still until `advance`, which wakes all waiters whose time has come.

    Whoever waits blocks on a condition. No wait ends because time passed on the machine.

    Args:
        monotonic: where the monotonic clock begins, in seconds.
        wall: where the wall clock begins, in Unix seconds.
    """

    def __init__(self, *, monotonic: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._changed = threading.Condition()
        self._monotonic = monotonic
        self._wall = wall
        self._waiters = 0

    def monotonic(self) -> float:
        """Seconds, as far as `advance` went."""
        with self._changed:
            return self._monotonic

    def wall(self) -> float:
        """Unix seconds, as far as `advance` went or `set_wall` jumped."""
        with self._changed:
            return self._wall

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Block until `event` is set or the clock was advanced by `timeout`; true if it is set."""
        with self._changed:
            end = self._monotonic + timeout
            self._waiters += 1
            self._changed.notify_all()
            try:
                while not event.is_set() and self._monotonic < end:
                    self._changed.wait(_LOOK_S)
            finally:
                self._waiters -= 1
                self._changed.notify_all()
            return event.is_set()

    def advance(self, seconds: float) -> None:
        """Let time pass on both clocks.

        Raises:
            ValueError: a negative number; a monotonic clock never goes back.
        """
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds!r}")
        with self._changed:
            self._monotonic += seconds
            self._wall += seconds
            self._changed.notify_all()

    def set_wall(self, seconds: float) -> None:
        """Let the wall clock jump, as when somebody sets it."""
        with self._changed:
            self._wall = seconds

    @property
    def waiters(self) -> int:
        """Threads that are in `wait` now."""
        with self._changed:
            return self._waiters

    def await_waiters(self, count: int = 1, *, patience_s: float = 10.0) -> None:
        """Block until `count` threads are in `wait`, so that an `advance` after it reaches them.

        Raises:
            TimeoutError: they did not come within `patience_s` seconds of real time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._waiters >= count, patience_s):
                raise TimeoutError(f"{self._waiters} of {count} threads wait on the clock")


class ClockConformance:
    """What every `Clock` does. Derive a test class from it and give it a clock."""

    def make_clock(self) -> Clock:
        """The clock to be tested."""
        raise NotImplementedError

    def let_pass(self, clock: Clock, seconds: float) -> None:
        """Make time pass while another thread waits on the clock; nothing for one that runs by itself."""

    def test_monotonic_never_goes_back(self) -> None:
        """Of two readings the later is not smaller."""
        clock = self.make_clock()
        readings = [clock.monotonic() for _ in range(100)]
        assert readings == sorted(readings)

    def test_wall_is_unix_time(self) -> None:
        """The wall clock counts seconds since 1970, not milliseconds and not since boot."""
        assert 1_500_000_000 < self.make_clock().wall() < 10_000_000_000

    def test_a_set_event_is_seen_at_once(self) -> None:
        """Waiting for what has happened already takes no time."""
        event = threading.Event()
        event.set()
        clock = self.make_clock()
        assert clock.wait(event, 3600) is True
        assert clock.wait(event, 0) is True

    def test_no_time_is_no_wait(self) -> None:
        """A timeout of zero or less returns at once and says that the event is not set."""
        clock = self.make_clock()
        assert clock.wait(threading.Event(), 0) is False
        assert clock.wait(threading.Event(), -1) is False

    def test_an_event_ends_the_wait(self) -> None:
        """Setting the event from another thread ends a wait long before its timeout."""
        clock, event, answers = self.make_clock(), threading.Event(), list[bool]()
        waiter = threading.Thread(target=lambda: answers.append(clock.wait(event, 3600)))
        waiter.start()
        event.set()
        waiter.join(30)
        assert answers == [True]

    def test_time_ends_the_wait(self) -> None:
        """When the time is over the wait ends, not earlier, and says that the event is not set."""
        clock, answers = self.make_clock(), list[tuple[bool, float]]()

        def wait() -> None:
            began = clock.monotonic()
            answers.append((clock.wait(threading.Event(), 0.05), clock.monotonic() - began))

        waiter = threading.Thread(target=wait)
        waiter.start()
        deadline = time.monotonic() + 30
        while waiter.is_alive() and time.monotonic() < deadline:
            self.let_pass(clock, 0.05)
            waiter.join(0.01)
        [(answer, passed)] = answers
        assert answer is False
        assert passed >= 0.049
