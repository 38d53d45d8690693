"""Restart loops: what is one, and what must never be taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from spotsafe.policy.restarts import STOPPED, STORAGE_FAILED, Limits, PastAttempt, restart_loop


def attempts(*ends: str | None, every_s: float = 1000.0) -> list[PastAttempt]:
    """Attempts with these ends, `failed+` one that published first, and the one that is starting."""
    past = [
        PastAttempt(
            attempt=number,
            started_wall=number * every_s,
            end=end.removesuffix("+") if end else None,
            new_published=bool(end and end.endswith("+")),
        )
        for number, end in enumerate(ends, 1)
    ]
    now = len(past) + 1
    starting = PastAttempt(attempt=now, started_wall=now * every_s, end=None, new_published=False)
    return [*past, starting]


def going_back(*parents: str | None, ends: str | None = None) -> list[PastAttempt]:
    """Attempts that passed over unhealthy ones to these parents; the last is starting."""
    return [
        PastAttempt(
            attempt=number,
            started_wall=number * 1000.0,
            end=ends,
            new_published=False,
            passed_over_unhealthy_to=parent,
        )
        for number, parent in enumerate(parents, 1)
    ]


# -- fruitless attempts


def test_three_failures_without_a_checkpoint_are_a_loop() -> None:
    """The fourth start is refused, and the reason names the three."""
    reason = restart_loop(attempts("failed", "failed", "failed"))

    assert reason == "attempts 1 to 3 failed by an error of their own without publishing a checkpoint"


def test_two_failures_are_not() -> None:
    """A third try is allowed."""
    assert restart_loop(attempts("failed", "failed")) is None


@pytest.mark.parametrize(
    "other",
    [
        *["reclaimed", None, "failed+", "finished", "left", "superseded", "interrupted"],
        *[STOPPED, STORAGE_FAILED],
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_anything_else_breaks_the_row(other: str | None, place: int) -> None:
    """A reclaim, an end without a record, a checkpoint: none of them is a fruitless failure."""
    ends: list[str | None] = ["failed", "failed", "failed"]
    ends[place] = other

    assert restart_loop(attempts(*ends)) is None


def test_only_the_last_attempts_matter() -> None:
    """A bad start long ago is forgotten; a good one long ago does not excuse three failures now."""
    assert restart_loop(attempts("failed", "failed", "failed", "failed+")) is None
    assert restart_loop(attempts("failed+", "failed", "failed", "failed")) is not None


def test_after_a_stop_a_person_gets_as_many_tries_again() -> None:
    """The attempt that was stopped is no failure: somebody looked and started the run again."""
    assert restart_loop(attempts("failed", "failed", "failed", STOPPED)) is None
    assert restart_loop(attempts("failed", "failed", "failed", STOPPED, "failed", "failed")) is None
    assert restart_loop(attempts(*["failed"] * 3, STOPPED, *["failed"] * 3)) is not None


def test_reclaims_alone_are_never_a_loop() -> None:
    """A hundred reclaims in a row, minutes apart, are the normal life on such machines."""
    assert restart_loop(attempts(*["reclaimed"] * 100, every_s=600.0)) is None


# -- starts per hour


def test_more_than_twenty_starts_in_an_hour_are_a_loop() -> None:
    """Whatever ended them: nothing useful happens in three minutes."""
    assert restart_loop(attempts(*["reclaimed"] * 19, every_s=100.0)) is None
    reason = restart_loop(attempts(*["reclaimed"] * 20, every_s=100.0))
    assert reason == "21 starts within an hour (more than 20)"


def test_the_hour_slides() -> None:
    """Starts of more than an hour ago do not count."""
    assert restart_loop(attempts(*[None] * 60, every_s=181.0)) is None


def test_a_clock_that_jumped_does_not_stop_a_run() -> None:
    """Starts that a wrong clock put far into the future or past are not within the hour."""
    wrong = [
        PastAttempt(attempt=n, started_wall=9e9 * (n % 2), end=None, new_published=False)
        for n in range(1, 60)
    ]

    assert (
        restart_loop([*wrong, PastAttempt(attempt=60, started_wall=1e9, end=None, new_published=False)])
        is None
    )


# -- the same parent


def test_the_third_return_to_the_same_parent_is_a_loop() -> None:
    """Training goes to NaN after the same checkpoint every time: a person has to change something."""
    reason = restart_loop(going_back("a1", "a1", "a1"))

    assert reason == "3 starts in a row went back to a1 because the values after it were not finite"


@pytest.mark.parametrize(
    "parents", [("a1", "a1"), ("a1", "a2", "a1"), ("a1", None, "a1"), ("a1", "a1", None)]
)
def test_other_returns_are_not(parents: tuple[str | None, ...]) -> None:
    """Fewer, to different parents, or not in a row."""
    assert restart_loop(going_back(*parents)) is None


def test_after_a_stop_the_returns_are_counted_anew() -> None:
    """A person who starts the run again after the stop gets a chance."""
    stopped = going_back("a1", "a1", "a1", ends=STOPPED)

    assert restart_loop(stopped) is None


# -- limits


def test_limits_are_options() -> None:
    """All three numbers can be set."""
    assert restart_loop(attempts("failed"), limits=Limits(fruitless=1)) == (
        "attempt 1 failed by an error of their own without publishing a checkpoint"
    )
    assert restart_loop(attempts(*["failed"] * 4), limits=Limits(fruitless=5)) is None
    assert restart_loop(attempts("reclaimed", "reclaimed"), limits=Limits(starts_per_hour=2)) is not None
    assert restart_loop(going_back("a1", "a1"), limits=Limits(same_parent=2)) is not None


@pytest.mark.parametrize("name", ["starts_per_hour", "fruitless", "same_parent"])
def test_limits_below_one_are_refused(name: str) -> None:
    """A limit of zero would stop every run."""
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})


def test_a_first_start_is_never_a_loop() -> None:
    """Neither without any record nor with its own."""
    assert restart_loop([]) is None
    assert restart_loop(attempts()) is None


@given(st.lists(st.sampled_from(["reclaimed", None, "failed+", "left", "finished"]), max_size=40))
def test_a_run_that_gets_somewhere_is_never_stopped(ends: list[str | None]) -> None:
    """Without a fruitless failure, and with starts ten minutes apart, there is no loop."""
    assert restart_loop(attempts(*ends, every_s=600.0)) is None
