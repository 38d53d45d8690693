"""Numbers as people read them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, strategies as st

from spotsafe import human


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (1234, "1.2 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (2_500_000_000, "2.5 GB"),
        (140_000_000_000, "140 GB"),
        (3e18, "3 EB"),
    ],
)
def test_size(nbytes: float, text: str) -> None:
    """Decimal units, three digits at most, never 1000 of a unit."""
    assert human.size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (0.0004, "0 s"),
        (0.003, "3 ms"),
        (0.0994, "99 ms"),
        (0.0995, "0.1 s"),
        (0.25, "0.2 s"),
        (1, "1 s"),
        (9.94, "9.9 s"),
        (9.95, "10 s"),
        (59.4, "59 s"),
        (59.5, "1 min"),
        (61, "1 min 1 s"),
        (119.7, "2 min"),
        (605, "10 min"),
        (3599, "1 h"),
        (4800, "1 h 20 min"),
        (86_400, "24 h"),
        (2 * 86_400, "2 d"),
        (10 * 86_400 + 5 * 3600, "10 d 5 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    """The two largest units that matter, rounded so that none reaches the next."""
    assert human.duration(seconds) == text


@given(st.floats(0, 10**8))
def test_a_duration_is_near_the_truth(seconds: float) -> None:
    """What is shown differs from the truth by at most the rounding of its smallest unit."""
    units = {"ms": 0.001, "s": 1, "min": 60, "h": 3600, "d": 86_400}

    shown = re.findall(r"([\d.]+) (\w+)", human.duration(seconds))

    total = sum(float(number) * units[unit] for number, unit in shown)
    assert abs(total - seconds) <= max(0.051, 0.051 * seconds)


@given(st.floats(0, 10**8), st.floats(0, 10**8))
def test_units_never_overflow(one: float, other: float) -> None:
    """No "60 s" and no "1 h 60 min", and two parts at most."""
    for seconds in (one, other):
        text = human.duration(seconds)
        assert not re.search(r"\b60 (s|min)", text)
        assert len(re.findall(r"[a-z]+", text)) <= 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(300, "5 min ago"), (0.5, "just now"), (-3600, "just now"), (1, "1 s ago"), (7200, "2 h ago")],
)
def test_age(seconds: float, text: str) -> None:
    """A clock that is behind the other machine's does not make the past the future."""
    assert human.age(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (12_345, "12,345 steps")]
)
def test_count(number: int, text: str) -> None:
    """A number with its noun in the right form."""
    assert human.count(number, "step") == text
