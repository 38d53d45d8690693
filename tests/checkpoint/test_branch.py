"""Rollbacks as pure values: what counts, what is set aside, and how one undoes another."""

from __future__ import annotations

import pytest

from spotsafe.checkpoint.branch import Rollback, gone_back_to, is_set_aside, on_branch, rolled_back, until
from spotsafe.checkpoint.layout import CheckpointName


def name(attempt: int, step: int) -> CheckpointName:
    return CheckpointName(attempt, step, step, "00000000")


OLD = [name(1, step) for step in (1, 2, 3, 4)]
TO_TWO = rolled_back((), to=OLD[1], attempt=2)
NEW = [name(3, step) for step in (3, 4, 5)]


def test_without_a_rollback_everything_counts() -> None:
    """The empty branch sets nothing aside, and nobody chose a checkpoint."""
    assert on_branch(OLD, ()) == tuple(OLD)
    assert gone_back_to(()) is None


def test_between_checkpoint_and_decision_is_set_aside() -> None:
    """The checkpoint itself, older ones and what later attempts publish count; the rest does not."""
    assert on_branch([*OLD, *NEW], TO_TWO) == (*OLD[:2], *NEW)
    assert gone_back_to(TO_TWO) == str(OLD[1])


def test_what_an_older_attempt_publishes_late_is_set_aside() -> None:
    """An attempt that was alive at the rollback publishes once more: not on the branch, whatever its step."""
    assert is_set_aside(name(1, 5000), TO_TWO)
    assert not is_set_aside(name(1, 1), TO_TWO)


def test_second_rollback_on_the_new_branch_keeps_the_first() -> None:
    """What the first set aside does not come back by going back once more on the new branch."""
    branch = rolled_back(TO_TWO, to=NEW[0], attempt=4)
    assert on_branch([*OLD, *NEW, name(5, 4)], branch) == (*OLD[:2], NEW[0], name(5, 4))


def test_rollback_to_what_was_set_aside_undoes_that_rollback() -> None:
    """The history of a checkpoint is that of the attempt which made it: nothing was set aside for attempt 1."""
    branch = rolled_back(until(TO_TWO, 1), to=OLD[3], attempt=4)
    assert branch == (Rollback(to=str(OLD[3]), attempt=4),)
    assert on_branch([*OLD, *NEW, name(5, 6)], branch) == (*OLD, name(5, 6))


def test_until_is_what_an_attempt_can_have_known() -> None:
    """Only decisions before it."""
    branch = rolled_back(TO_TWO, to=NEW[0], attempt=4)
    assert until(branch, 3) == TO_TWO
    assert until(branch, 2) == ()
    assert until(branch, 5) == branch


@pytest.mark.parametrize("text", ["", "4000", "../x", "a1-s1-1-00000000"])
def test_a_name_that_is_none_is_refused(text: str) -> None:
    """A record from outside may say anything."""
    with pytest.raises(ValueError, match="name of a checkpoint"):
        _ = Rollback(to=text, attempt=2).name
