"""What the session keeps of its own comes back as it was, and nothing else is taken for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spotsafe.errors import StateMismatch
from spotsafe.positions import Positions
from spotsafe.session_state import SessionState, session_values
from spotsafe.tensors.rng import capture_rng


def written() -> dict[str, Any]:
    """What a session without steps writes."""
    return session_values(
        positions=Positions().to_state(),
        rng=capture_rng(),
        values={"epoch": 3},
        nonfinite=frozenset({"model.b", "model.a"}),
    )


def test_it_comes_back() -> None:
    """Every member."""
    state = SessionState.read(written())

    assert state.values == {"epoch": 3}
    assert state.nonfinite == {"model.a", "model.b"}
    assert state.rng is not None


def test_the_number_of_threads() -> None:
    """What torch had when it was written; of a checkpoint without it nothing is known, and nonsense is refused."""
    state = written()

    assert SessionState.read(state).threads == torch.get_num_threads()
    del state["threads"]
    assert SessionState.read(state).threads is None
    for wrong in ("2", 2.0, True, [2]):
        with pytest.raises(StateMismatch, match="threads"):
            SessionState.read({**state, "threads": wrong})


@pytest.mark.parametrize("member", ["positions", "rng", "values", "nonfinite"])
def test_a_missing_member(member: str) -> None:
    """It names what is missing."""
    state = written()
    del state[member]

    with pytest.raises(StateMismatch, match=member):
        SessionState.read(state)


@pytest.mark.parametrize("wrong", [torch.ones(2), "abc", [1], [torch.ones(1)], None, {"a": 1}])
def test_names_are_a_list_of_text(wrong: object) -> None:
    """A hostile checkpoint fails here, before anything is changed, not later by a raw error."""
    with pytest.raises(StateMismatch, match="nonfinite"):
        SessionState.read({**written(), "nonfinite": wrong})
