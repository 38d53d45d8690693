"""What a save costs, against the formulas' sources and by numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from spotsafe.policy.cost import SaveCost, best_interval_s, waste, young_interval_s

costs = st.builds(SaveCost, blocking_s=st.floats(0.01, 60), write_s=st.floats(0, 300))


def test_young_on_paper() -> None:
    """C = 2 s and one interruption an hour: the square root of 2 x 2 x 3600 is 120 s."""
    assert young_interval_s(2.0, interruptions_per_hour=1.0) == pytest.approx(120.0)


def test_young_at_the_default_rate() -> None:
    """C = 1 s at 0.1 interruptions per hour: a little over four minutes."""
    assert young_interval_s(1.0, interruptions_per_hour=0.1) == pytest.approx(268.3, abs=0.1)


def test_without_interruptions_there_is_no_need_to_save() -> None:
    """Rate zero, or every interruption saved by its notice: the interval is infinite."""
    cost = SaveCost(blocking_s=1, write_s=10)

    assert young_interval_s(1.0, interruptions_per_hour=0.0) == math.inf
    assert best_interval_s(cost, interruptions_per_hour=1.0, saved_by_notice=1.0) == math.inf


def test_a_notice_that_saves_makes_the_interval_longer() -> None:
    """With nine of ten reclaims saved the interval grows by the square root of ten."""
    cost = SaveCost(blocking_s=20, write_s=0)

    longer = best_interval_s(cost, interruptions_per_hour=0.5, saved_by_notice=0.9)

    assert longer == pytest.approx(math.sqrt(10) * young_interval_s(20, interruptions_per_hour=0.5))


def test_a_save_never_begins_before_the_last_is_written() -> None:
    """The write time is the least interval: one save is in flight at a time."""
    cost = SaveCost(blocking_s=0.01, write_s=600)

    assert best_interval_s(cost, interruptions_per_hour=5.0) == 600


@given(
    costs,
    st.floats(0.01, 2),
    st.floats(0, 0.95),
    st.floats(0, 0.3),
    st.floats(0.2, 5),
)
def test_no_other_interval_wastes_less(
    cost: SaveCost, rate: float, saved: float, slowdown: float, factor: float
) -> None:
    """The formula is the minimum of `waste` over the intervals that are possible."""
    tau = best_interval_s(cost, interruptions_per_hour=rate, saved_by_notice=saved, slowdown=slowdown)

    def wasted(interval_s: float) -> float:
        return waste(
            interval_s,
            cost,
            interruptions_per_hour=rate,
            saved_by_notice=saved,
            slowdown=slowdown,
            restart_s=90,
        )

    assert wasted(tau) <= wasted(max(cost.write_s, tau * factor)) + 1e-12


@pytest.mark.parametrize("blocking_s", [1.0, 20.0, 60.0, 120.0])
def test_the_first_order_is_good_enough(blocking_s: float) -> None:
    """Against the exact optimum for exponential failures Young loses under 0.1 % while C <= mtbf / 30."""
    mtbf_s = 3600.0

    def exact(tau: float) -> float:
        return mtbf_s * math.expm1((tau + blocking_s) / mtbf_s) / tau

    optimum = min(exact(tau) for tau in range(10, 3600))

    assert exact(young_interval_s(blocking_s, interruptions_per_hour=1.0)) / optimum < 1.001


def test_waste_on_paper() -> None:
    """Interval 1000 s, C 10 s, one interruption in 10,000 s, restart 100 s: 1 % + 5 % + 1 %."""
    cost = SaveCost(blocking_s=10, write_s=0)

    assert waste(1000, cost, interruptions_per_hour=0.36, restart_s=100) == pytest.approx(0.07)


def test_busy_is_the_longer_of_the_two() -> None:
    """A save that blocks while it writes is not counted twice."""
    assert SaveCost(blocking_s=5, write_s=3).busy_s == 5
    assert SaveCost(blocking_s=1, write_s=3).busy_s == 3
