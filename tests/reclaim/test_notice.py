"""A notice is a value; its deadline never leaves what a source can promise."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, strategies as st

from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice, deadline_after, is_more_urgent, most_urgent


def notice(
    *,
    deadline: float | None = None,
    received: float = 0.0,
    kind: NoticeKind = NoticeKind.RECLAIM,
    source: str = "a",
) -> ReclaimNotice:
    return ReclaimNotice(source=source, kind=kind, action="terminate", deadline=deadline, received=received)


def test_seconds_left_counts_down_to_zero_and_stays_there():
    """Time left shrinks with the clock and is never negative."""
    one = notice(deadline=130.0, received=10.0)
    assert one.seconds_left(10.0) == 120.0
    assert one.seconds_left(100.0) == 30.0
    assert one.seconds_left(131.0) == 0.0


def test_an_unknown_deadline_has_no_seconds_left():
    """Unknown is None, not zero and not forever."""
    assert notice().seconds_left(5.0) is None


def test_a_notice_cannot_be_changed():
    """What was announced is read by several threads, so it is frozen."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        notice().deadline = 1.0  # type: ignore[misc]  # the point of the test


def test_ending_by_only_shortens():
    """A limit shortens a deadline, gives an unknown one an end, and never lengthens."""
    assert notice(deadline=100.0).ending_by(50.0).deadline == 50.0
    assert notice(deadline=100.0).ending_by(200.0).deadline == 100.0
    assert notice(deadline=100.0).ending_by(None).deadline == 100.0
    assert notice().ending_by(50.0).deadline == 50.0
    assert notice().ending_by(None).deadline is None


@given(
    seconds=st.floats(allow_nan=True, allow_infinity=True),
    now=st.floats(min_value=0, max_value=1e9),
    at_most=st.floats(min_value=0, max_value=3600),
)
def test_a_deadline_is_clamped_whatever_the_wall_clock_says(seconds: float, now: float, at_most: float):
    """Any skew, infinite or not a number, gives a deadline between now and the longest promise."""
    deadline = deadline_after(seconds, now=now, at_most=at_most)
    assert now <= deadline <= now + at_most
    assert not math.isnan(deadline)


def test_the_most_urgent_ends_first_and_known_goes_before_unknown():
    """Among notices of the kind asked for, the earliest known deadline wins."""
    late, soon, unknown = notice(deadline=90.0), notice(deadline=30.0), notice()
    risk = notice(deadline=1.0, kind=NoticeKind.RISK)
    assert most_urgent([late, unknown, soon, risk], NoticeKind.RECLAIM) is soon
    assert most_urgent([unknown, late], NoticeKind.RECLAIM) is late
    assert most_urgent([late, risk], NoticeKind.RISK) is risk
    assert most_urgent([risk], NoticeKind.RECLAIM) is None
    assert most_urgent([], NoticeKind.RISK) is None


def test_of_two_unknown_deadlines_the_older_notice_is_more_urgent():
    """Two sources that do not know keep their order of arrival."""
    first, second = notice(received=1.0), notice(received=2.0)
    assert most_urgent([second, first], NoticeKind.RECLAIM) is first
    assert is_more_urgent(first, second)
    assert not is_more_urgent(second, first)
    assert not is_more_urgent(first, first)
    assert is_more_urgent(second, None)
