"""Where loops stand, and when a body that was left in the middle counts."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from spotsafe.errors import RunError, StateMismatch
from spotsafe.positions import CommitRule, Position, Positions

counts = st.integers(0, 10**9)
positions = st.builds(
    Position,
    done=counts,
    passes=counts,
    within=st.none() | counts,
    stopped=st.booleans(),
    stopped_under=st.none() | counts,
    feed=st.none() | st.dictionaries(st.text(), counts),
)


@given(positions)
def test_a_position_survives_its_own_state(position: Position) -> None:
    """What is saved is what is restored."""
    assert Position.from_state(position.to_state()) == position


@given(st.dictionaries(st.text(min_size=1), positions, min_size=1), counts)
def test_positions_survive_their_own_state(loops: dict[str, Position], total: int) -> None:
    """All loops come back, and the resume point is the loop of the last safe point."""
    where = min(loops)
    saved = Positions(total=total, where=where, loops=loops).to_state()

    restored = Positions.from_state(saved)

    assert restored.to_state() == saved
    assert restored.resume_at == where


def test_a_saved_state_does_not_change_with_the_loops() -> None:
    """A checkpoint holds the positions of its moment."""
    live = Positions()
    _, position = live.claim("steps", None)
    saved = live.to_state()
    position.done += 1
    live.total += 1

    assert saved["total"] == 0
    assert saved["loops"]["steps0"]["done"] == 0


@pytest.mark.parametrize(
    "state", [{}, {"total": 1, "where": "a", "loops": 3}, {"total": "x", "where": "", "loops": {}}, None]
)
def test_positions_of_another_shape_are_refused(state: object) -> None:
    """Garbage is named as such and never taken for a fresh start."""
    with pytest.raises(StateMismatch):
        Positions.from_state(state)  # type: ignore[arg-type] # garbage on purpose


def test_names_are_the_same_in_every_epoch() -> None:
    """A loop inside an epoch's body has one name, whatever epoch it is."""
    live = Positions()
    epochs, _ = live.claim("epochs", None)
    names = []
    for _ in range(2):
        live.enter(epochs)
        names.append([live.claim("steps", None)[0], live.claim("steps", None)[0], live.claim("x", "eval")[0]])
        live.leave()

    assert names[0] == names[1] == ["epochs0/steps0", "epochs0/steps1", "epochs0/eval"]


def test_two_loops_of_one_name_are_refused() -> None:
    """A position belongs to one loop."""
    live = Positions()
    live.claim("steps", "train")
    with pytest.raises(RunError, match="two loops"):
        live.claim("steps", "train")


def test_loops_before_the_resume_point_are_passed() -> None:
    """The program had left them; the loop that holds the resume point is not one of them."""
    first, outer, inner = Position(done=3), Position(done=1), Position(done=7)
    saved = Positions(
        where="epochs1/steps0", loops={"steps0": first, "epochs1": outer, "epochs1/steps0": inner}
    )

    live = Positions.from_state(saved.to_state())

    assert live.passed("steps0")
    assert not live.passed("epochs1")
    assert not live.passed("epochs1/steps0")
    assert not live.reached("epochs1")
    assert live.reached("epochs1/steps0")
    assert not live.passed("steps0")


def test_a_loop_that_the_checkpoint_does_not_know_is_refused_before_the_resume_point() -> None:
    """Changed loops must not silently start over."""
    saved = Positions(where="steps0", loops={"steps0": Position(done=3)}).to_state()
    live = Positions.from_state(saved)

    with pytest.raises(StateMismatch, match="taken in loop 'steps0'"):
        live.claim("range", None)

    live.claim("steps", "steps0")
    live.reached("steps0")
    live.claim("range", "later")


@pytest.mark.parametrize(
    ("stopped", "under", "limit", "ended"),
    [
        (False, None, 10, False),
        (True, 10, 10, True),
        (True, 10, 9, True),
        (True, 10, 11, False),
        (True, None, None, True),
        (True, 10, None, True),
    ],
)
def test_only_a_larger_limit_continues_a_stopped_loop(
    stopped: bool, under: int | None, limit: int | None, ended: bool
) -> None:
    """Early stopping holds for the same command; asking for more goes on."""
    assert Position(stopped=stopped, stopped_under=under).ended_by_stop(limit) is ended


@pytest.mark.parametrize(
    ("before", "stepped", "counts"),
    [
        (None, {1}, True),
        (None, set(), False),
        ({1}, {1}, True),
        ({1}, set(), False),
        ({1, 2}, {1}, False),
        ({1, 2}, {1, 2, 3}, True),
    ],
)
def test_a_body_left_in_the_middle_counts_if_all_updates_were_made(
    before: set[int] | None, stepped: set[int], counts: bool
) -> None:
    """Exactly if every optimizer that stepped in the body before has stepped in this one."""
    rule = CommitRule() if before is None else CommitRule().after(frozenset(before))

    assert rule.closed_early(frozenset(stepped)) is counts


def test_a_committed_body_without_an_update_leaves_the_rule_as_it_was() -> None:
    """A skipped GradScaler step does not teach that steps happen without updates."""
    rule = CommitRule().after(frozenset({1})).after(frozenset())

    assert not rule.closed_early(frozenset())
    assert rule.closed_early(frozenset({1}))
