"""When to save: every policy, what it says of itself, and what is refused."""

from __future__ import annotations

import math
import pickle
from datetime import timedelta

import pytest
from hypothesis import given, strategies as st

from spotsafe.policy.cost import SaveCost, young_interval_s
from spotsafe.policy.interval import (
    Auto,
    Progress,
    SavePolicy,
    auto,
    every_epoch,
    every_steps,
    every_time,
    never,
    parse_save_every,
)


def progress(
    *,
    step: int = 100,
    steps: int = 1,
    seconds: float = 0.0,
    saves: int = 1,
    epoch_ended: bool = False,
    blocking_s: float | None = None,
    write_s: float | None = None,
) -> Progress:
    return Progress(
        step=step,
        now_s=5000.0,
        steps_since_save=steps,
        seconds_since_save=seconds,
        saves=saves,
        epoch_ended=epoch_ended,
        blocking_s=blocking_s,
        write_s=write_s,
    )


def saves_of(
    policy: SavePolicy, *, until: int, start: int = 0, step_s: float = 1.0, cost_s: float = 0.5
) -> list[int]:
    """The steps at which a run would save, one safe point a step."""
    due, last = [], start
    for step in range(start + 1, until + 1):
        now = progress(
            step=step,
            steps=step - last,
            seconds=(step - last) * step_s,
            saves=len(due),
            blocking_s=cost_s if due else None,
            write_s=cost_s if due else None,
        )
        if policy.due(now):
            due.append(step)
            last = step
    return due


# -- steps


def test_every_steps_saves_at_multiples() -> None:
    """Every 100 steps means at 100, 200, 300: steps that a person can name."""
    assert saves_of(every_steps(100), until=350) == [100, 200, 300]


def test_after_a_resume_the_multiples_stay() -> None:
    """A run that resumes at step 130 saves at 200, not at 230."""
    assert saves_of(every_steps(100), start=130, until=350) == [200, 300]


def test_a_multiple_that_was_missed_is_made_up_for() -> None:
    """If there was no room for the save at 200, it is due at 201 still."""
    assert every_steps(100).due(progress(step=201, steps=101))
    assert not every_steps(100).due(progress(step=201, steps=1))


@given(st.integers(1, 50), st.integers(0, 200), st.integers(1, 300))
def test_every_multiple_is_saved_once(n: int, start: int, length: int) -> None:
    """For any start and any n, exactly the multiples after the start are saved."""
    expected = [step for step in range(start + 1, start + length + 1) if step % n == 0]

    assert saves_of(every_steps(n), start=start, until=start + length) == expected


# -- time, epochs, never


def test_every_time_waits_for_the_time() -> None:
    """Due when the time is over, not a moment before."""
    policy = every_time(timedelta(minutes=5))

    assert not policy.due(progress(seconds=299.9))
    assert policy.due(progress(seconds=300.0))


def test_time_alone_saves_nothing_twice() -> None:
    """Without a step since the last save there is nothing to save, however long ago it was."""
    assert not every_time(timedelta(seconds=1)).due(progress(steps=0, seconds=1e6))
    assert not auto().due(progress(steps=0, seconds=1e6))


def test_every_epoch_saves_at_its_end() -> None:
    """Due at the end of the epoch, also if its last step was just saved: the tail may have changed state."""
    assert every_epoch().due(progress(epoch_ended=True, steps=0))
    assert not every_epoch().due(progress(steps=1000, seconds=1e6))


def test_never_is_never_due() -> None:
    """Not after a week of steps."""
    assert not never().due(progress(steps=10**6, seconds=1e6, epoch_ended=True))


def test_or_saves_when_either_is_due() -> None:
    """`|` is the union."""
    policy = every_steps(100) | every_epoch()

    assert policy.due(progress(step=100, steps=100))
    assert policy.due(progress(step=150, steps=50, epoch_ended=True))
    assert not policy.due(progress(step=150, steps=50))


# -- auto


def test_auto_saves_first_after_a_minute() -> None:
    """The first save of an attempt shows early whether saving works."""
    assert not auto().due(progress(saves=0, seconds=59.9))
    assert auto().due(progress(saves=0, seconds=60.0))


def test_auto_is_youngs_interval() -> None:
    """After that it is Young's interval for what the last save cost."""
    expected = young_interval_s(1.0, interruptions_per_hour=0.1)

    assert not auto().due(progress(seconds=expected - 0.1, blocking_s=1.0, write_s=2.0))
    assert auto().due(progress(seconds=expected + 0.1, blocking_s=1.0, write_s=2.0))


def test_auto_does_not_save_more_than_every_minute() -> None:
    """A save that costs nothing is still made once a minute only."""
    assert Auto().interval_s(SaveCost(blocking_s=0.0, write_s=0.0)) == 60


def test_auto_saves_every_half_hour_at_least() -> None:
    """A save that blocks for minutes is made every half hour still."""
    assert Auto().interval_s(SaveCost(blocking_s=240.0, write_s=0.0)) == 1800


def test_auto_writes_a_fifth_of_the_time_at_most() -> None:
    """A write of ten minutes is begun every fifty minutes: that bound is the last word."""
    assert Auto().interval_s(SaveCost(blocking_s=0.1, write_s=600.0)) == 3000


def test_auto_does_not_wait_for_a_measurement_that_never_comes() -> None:
    """If the first save failed there is no cost; the next is tried after a minute."""
    assert auto().due(progress(saves=1, seconds=60.0))
    assert not auto().due(progress(saves=1, seconds=59.0))


@given(st.floats(0, 1000), st.floats(0, 5000), st.floats(0, 3), st.floats(0, 1))
def test_auto_keeps_its_bounds(blocking_s: float, write_s: float, rate: float, saved: float) -> None:
    """For any cost: at least a minute, four fifths of the time without writing, else half an hour at most."""
    policy = Auto(interruptions_per_hour=rate, saved_by_notice=saved)
    cost = SaveCost(blocking_s=blocking_s, write_s=write_s)

    interval = policy.interval_s(cost)

    assert math.isfinite(interval)
    assert interval >= 60
    assert cost.busy_s <= interval * policy.write_share * (1 + 1e-9)
    assert interval <= max(1800, cost.busy_s / policy.write_share)


def test_auto_in_a_run() -> None:
    """A run of one-second steps with saves of half a second: at one minute, then every 190 seconds."""
    assert saves_of(auto(), until=600) == [60, 250, 440]


# -- words


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (every_steps(1), "every step"),
        (every_steps(1000), "every 1,000 steps"),
        (every_time(timedelta(minutes=5)), "every 5 min"),
        (every_epoch(), "at the end of every epoch"),
        (never(), "only when asked, at a notice and at the end"),
        (every_steps(100) | every_epoch(), "every 100 steps and at the end of every epoch"),
        (auto(), "first after 1 min, then every 1 min to 30 min (auto: by what a save costs)"),
    ],
)
def test_policies_say_what_they_do(policy: SavePolicy, text: str) -> None:
    """The words for the second line of the console."""
    assert policy.describe() == text


def test_auto_says_why_once_it_knows() -> None:
    """With a measured cost the interval has a number and its reason."""
    text = auto().describe(SaveCost(blocking_s=1.25, write_s=12.0))

    assert text == (
        "every 5 min (auto: a save stops training for 1.2 s and is written in 12 s; "
        "0.1 interruptions per hour)"
    )


# -- values and options


def test_policies_are_values() -> None:
    """Equal by content, hashable, the same after pickling."""
    one = every_steps(3) | every_time(timedelta(hours=1)) | every_epoch() | auto()
    same = every_steps(3) | (every_time(timedelta(hours=1)) | every_epoch() | auto() | every_steps(3))

    assert one == same
    assert hash(one) == hash(same)
    assert pickle.loads(pickle.dumps(one)) == one
    assert repr(every_steps(3) | every_epoch() | never()) == "every_steps(3) | every_epoch() | never()"
    assert repr(every_time(timedelta(minutes=1))) == "every_time(timedelta(seconds=60))"


@pytest.mark.parametrize(
    ("value", "policy"),
    [
        ("auto", auto()),
        ("epoch", every_epoch()),
        (100, every_steps(100)),
        (timedelta(minutes=2), every_time(timedelta(minutes=2))),
        (None, never()),
        (every_steps(3) | every_epoch(), every_steps(3) | every_epoch()),
    ],
)
def test_parse_save_every(value: object, policy: SavePolicy) -> None:
    """Every spelling of the option means its policy."""
    assert parse_save_every(value) == policy  # type: ignore[arg-type]  # parametrized


@pytest.mark.parametrize(
    "value", [0, -5, True, False, timedelta(0), timedelta(seconds=-1), "Auto", "epochs", "100", ""]
)
def test_values_that_mean_nothing_are_refused(value: object) -> None:
    """Zero, negative, truth values and unknown words are mistakes of the user."""
    with pytest.raises(ValueError, match=r"more than no time|save_every=.* means nothing; write .* or None"):
        parse_save_every(value)  # type: ignore[arg-type]  # the mistake is the test


@pytest.mark.parametrize("value", [1.5, [100], object])
def test_types_that_mean_nothing_are_refused_with_a_hint(value: object) -> None:
    """The error shows what to write."""
    with pytest.raises(TypeError, match='"auto"'):
        parse_save_every(value)  # type: ignore[arg-type]  # the mistake is the test


@pytest.mark.parametrize(
    "options",
    [
        {"interruptions_per_hour": -1.0},
        {"interruptions_per_hour": math.nan},
        {"saved_by_notice": 1.1},
        {"slowdown": -0.1},
        {"write_share": 0.0},
        {"write_share": 1.5},
        {"first": timedelta(0)},
        {"shortest": timedelta(0)},
        {"shortest": timedelta(hours=1)},
    ],
)
def test_auto_refuses_numbers_that_mean_nothing(options: dict[str, object]) -> None:
    """Shares are shares, rates are not negative, the shortest is not longer than the longest."""
    with pytest.raises(ValueError, match=r"must be|share|needs"):
        auto(**options)  # type: ignore[arg-type]  # the mistake is the test


def test_or_with_something_else_is_a_type_error() -> None:
    """`every_steps(2) | 3` is no policy."""
    with pytest.raises(TypeError):
        every_steps(2) | 3  # type: ignore[operator]  # the mistake is the test
