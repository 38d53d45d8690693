"""Both clocks keep the same contract; the manual one moves only by hand."""

from __future__ import annotations

import threading

import pytest

from spotsafe.clock import Clock, SystemClock
from spotsafe.testing.clock import ClockConformance, ManualClock


class TestSystemClock(ClockConformance):
    """The machine's clock."""

    def make_clock(self) -> Clock:
        return SystemClock()


class TestManualClock(ClockConformance):
    """The clock for tests."""

    def make_clock(self) -> Clock:
        return ManualClock()

    def let_pass(self, clock: Clock, seconds: float) -> None:
        assert isinstance(clock, ManualClock)
        clock.advance(seconds)


class TestABrokenClock:
    """The suite finds the faults that it is there for."""

    @pytest.mark.parametrize("name", ["test_monotonic_never_goes_back", "test_wall_is_unix_time"])
    def test_a_clock_in_milliseconds_that_goes_back_fails(self, name: str) -> None:
        """A wall clock in milliseconds and a monotonic one that goes back are found."""

        class Wrong(ManualClock):
            def monotonic(self) -> float:
                self.now = getattr(self, "now", 0.0) - 1
                return self.now

            def wall(self) -> float:
                return 1_700_000_000_000.0

        class Suite(ClockConformance):
            def make_clock(self) -> Clock:
                return Wrong()

        with pytest.raises(AssertionError):
            getattr(Suite(), name)()


def in_thread(
    clock: ManualClock, event: threading.Event, timeout: float
) -> tuple[threading.Thread, list[bool]]:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(clock.wait(event, timeout)))
    thread.start()
    return thread, answers


def test_time_stands_still() -> None:
    """Without `advance` both clocks show the same for ever."""
    clock = ManualClock(monotonic=5.0, wall=1_600_000_000.0)

    assert [clock.monotonic() for _ in range(3)] == [5.0] * 3
    assert clock.wall() == 1_600_000_000.0


def test_advance_moves_both_clocks() -> None:
    """Time passes alike on the monotonic and on the wall clock."""
    clock = ManualClock(monotonic=5.0, wall=100.0)

    clock.advance(2.5)

    assert (clock.monotonic(), clock.wall()) == (7.5, 102.5)


def test_the_wall_clock_can_jump_alone() -> None:
    """Somebody sets the clock: durations must not care."""
    clock = ManualClock(monotonic=5.0, wall=100.0)

    clock.set_wall(50.0)

    assert (clock.monotonic(), clock.wall()) == (5.0, 50.0)


def test_time_does_not_go_back() -> None:
    """A test that tries has a mistake."""
    with pytest.raises(ValueError, match="back"):
        ManualClock().advance(-1)


def test_a_waiter_wakes_when_its_time_has_come_and_not_before() -> None:
    """Of two steps that add up to the timeout only the second ends the wait."""
    clock = ManualClock()
    thread, answers = in_thread(clock, threading.Event(), 10.0)
    clock.await_waiters()

    clock.advance(9.0)
    assert clock.waiters == 1

    clock.advance(1.0)
    thread.join(30)
    assert answers == [False]


def test_one_step_wakes_all_whose_time_has_come() -> None:
    """An hour wakes whoever waits for minutes and leaves whoever waits for a day."""
    clock, last = ManualClock(), threading.Event()
    short = [in_thread(clock, threading.Event(), 60.0 * n) for n in range(1, 4)]
    long, answers = in_thread(clock, last, 86_400.0)
    clock.await_waiters(4)

    clock.advance(3600.0)

    for thread, _ in short:
        thread.join(30)
    assert [answer for _, answer in short] == [[False]] * 3
    assert clock.waiters == 1
    last.set()
    long.join(30)
    assert answers == [True]


def test_awaiting_waiters_in_vain_says_how_many_came() -> None:
    """A test that waits for a thread which never waits ends with a reason."""
    with pytest.raises(TimeoutError, match="0 of 2"):
        ManualClock().await_waiters(2, patience_s=0.01)
