"""What is in flight: in order, two at most, each told once and not gone before it is told."""

from __future__ import annotations

import threading

import pytest

from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.clock import SystemClock
from spotsafe.testing.clock import ManualClock
from spotsafe.writer.flight import MOST_IN_FLIGHT, InFlight
from spotsafe.writer.job import SaveResult

PATIENCE_S = 30.0


def name(number: int) -> CheckpointName:
    return CheckpointName(1, number, number, "00000000")


def ended(number: int) -> SaveResult:
    return SaveResult(name=name(number), published=True, healthy=True, total_bytes=0, write_s=0.0)


def flights(*numbers: int) -> InFlight[int]:
    flying: InFlight[int] = InFlight()
    for number in numbers:
        flying.add(name(number), number)
    return flying


def test_in_order_and_not_too_many() -> None:
    """One more than may be is a mistake, and changes nothing."""
    flying = flights(1, 2)
    assert MOST_IN_FLIGHT == 2
    with pytest.raises(RuntimeError, match="2 others"):
        flying.require_room(name(3))
    assert (len(flying), flying.kept(), name(3) in flying) == (2, [1, 2], False)


def test_one_that_was_not_given_after_all() -> None:
    """It has no result, and there is room again; whoever waits for that hears of it."""
    flying = flights(1, 2)
    flying.forget(name(2))
    flying.require_room(name(3))
    assert (flying.kept(), name(2) in flying, flying.poll(), flying.end(ended(2))) == ([1], False, [], False)
    flying.forget(name(7))


def test_told_once() -> None:
    """Whoever comes second tells nothing."""
    flying = flights(1, 2)
    assert flying.end(ended(1))
    assert not flying.end(ended(1))
    assert not flying.end(ended(7))
    assert (len(flying), name(1) in flying, name(2) in flying) == (1, False, True)
    assert [one.name for one in flying.poll()] == [name(1)]
    assert flying.poll() == []


def test_waiting() -> None:
    """For one, for all, or until the time is over."""
    flying = flights(1, 2)
    clock = SystemClock()
    assert not flying.wait(clock, timeout_s=0.0)
    assert not flying.wait(clock, timeout_s=-1.0, left=1)
    assert flying.wait(clock, timeout_s=0.0, left=2)
    timers = [threading.Timer(0.01 * number, flying.end, [ended(number)]) for number in (1, 2)]
    for timer in timers:
        timer.start()
    assert flying.wait(clock, timeout_s=PATIENCE_S, left=1)
    assert flying.wait(clock, timeout_s=None)
    assert len(flying.poll()) == 2


def test_an_end_that_does_not_suffice_does_not_prolong_the_wait() -> None:
    """The time is counted from the beginning."""
    flying, clock, answers = flights(1, 2), ManualClock(), list[bool]()
    waiting = threading.Thread(target=lambda: answers.append(flying.wait(clock, timeout_s=60.0)))
    waiting.start()
    clock.await_waiters()
    clock.advance(40.0)
    flying.end(ended(1))
    clock.advance(21.0)
    waiting.join(PATIENCE_S)
    assert answers == [False]
