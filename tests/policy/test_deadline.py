"""What to do when the machine is about to go."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, strategies as st

from spotsafe.policy.deadline import MARGIN, Plan, Situation, plan

CALM = Situation(seconds_left=120.0, save_s=20.0)


def now(**changes: object) -> Situation:
    return dataclasses.replace(CALM, **changes)  # type: ignore[arg-type]  # fields of Situation


situations = st.builds(
    Situation,
    seconds_left=st.one_of(st.none(), st.floats(0, 600)),
    save_s=st.one_of(st.none(), st.floats(0, 600)),
    in_flight=st.booleans(),
    finish_in_flight_s=st.one_of(st.none(), st.floats(0, 600)),
    staged_unpublished=st.booleans(),
    unsaved_steps=st.integers(0, 5),
)


def test_with_time_enough_it_saves() -> None:
    """Two minutes for a save of twenty seconds."""
    assert plan(CALM) is Plan.SAVE


def test_without_time_enough_it_starts_nothing() -> None:
    """A save that would not finish is not begun."""
    assert plan(now(seconds_left=10.0)) is Plan.NOTHING


def test_the_measured_time_is_taken_with_a_margin() -> None:
    """Many machines save at once, so a save may take longer than it did."""
    assert plan(now(seconds_left=20.0 * MARGIN)) is Plan.NOTHING
    assert plan(now(seconds_left=20.0 * MARGIN + 0.1)) is Plan.SAVE
    assert plan(now(seconds_left=21.0), margin=1.0) is Plan.SAVE


def test_a_save_in_flight_is_finished_first() -> None:
    """Both must fit: what the one in flight still needs, and the new one."""
    busy = now(in_flight=True, finish_in_flight_s=60.0)

    assert plan(busy) is Plan.SAVE
    assert plan(dataclasses.replace(busy, seconds_left=80.0)) is Plan.FINISH


@pytest.mark.parametrize("begun", [{"in_flight": True}, {"staged_unpublished": True}])
def test_what_is_begun_is_finished_even_without_time(begun: dict[str, bool]) -> None:
    """It costs nothing to go on: the helper may outlive the process."""
    assert plan(now(seconds_left=0.0, finish_in_flight_s=60.0, **begun)) is Plan.FINISH


def test_with_nothing_new_nothing_is_saved() -> None:
    """If a checkpoint holds every step there is nothing to do, with or without a deadline."""
    assert plan(now(unsaved_steps=0)) is Plan.NOTHING
    assert plan(now(unsaved_steps=0, seconds_left=None)) is Plan.NOTHING
    assert plan(now(unsaved_steps=0, in_flight=True)) is Plan.FINISH


def test_an_unknown_deadline_is_met_with_a_save() -> None:
    """A source that does not say when may leave time; a save cut short does no harm."""
    assert plan(now(seconds_left=None)) is Plan.SAVE
    assert plan(now(seconds_left=None, save_s=None, in_flight=True)) is Plan.SAVE


def test_a_save_that_was_never_measured_is_tried() -> None:
    """The first save of an attempt has no measure; while there is time it is made."""
    assert plan(now(save_s=None)) is Plan.SAVE
    assert plan(now(save_s=None, seconds_left=0.0)) is Plan.NOTHING


def test_a_save_that_was_never_measured_waits_for_the_one_in_flight() -> None:
    """What is begun comes first; how long it takes tells whether another fits."""
    assert plan(now(save_s=None, in_flight=True, finish_in_flight_s=1.0)) is Plan.FINISH
    assert plan(now(in_flight=True, finish_in_flight_s=None)) is Plan.FINISH


@given(situations)
def test_what_is_begun_is_never_given_up(situation: Situation) -> None:
    """In no situation with something in flight or staged is the answer to do nothing."""
    if situation.in_flight or situation.staged_unpublished:
        assert plan(situation) is not Plan.NOTHING
    else:
        assert plan(situation) is not Plan.FINISH


@given(situations)
def test_at_zero_seconds_nothing_new_is_begun(situation: Situation) -> None:
    """Everything is safe when there is no time at all."""
    assert plan(dataclasses.replace(situation, seconds_left=0.0)) is not Plan.SAVE


@given(situations, st.floats(0, 600))
def test_more_time_never_means_less(situation: Situation, more: float) -> None:
    """A situation in which a save fits is one with any later deadline too."""
    if situation.seconds_left is not None and plan(situation) is Plan.SAVE:
        later = dataclasses.replace(situation, seconds_left=situation.seconds_left + more)
        assert plan(later) is Plan.SAVE
