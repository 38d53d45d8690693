"""State outside of tensors is put back for a while, and then is as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from spotsafe.tensors.kept import KeptState
from spotsafe.tensors.marks import LARGE
from tests.tensors.test_marks import CASES


def state_of(part: Any) -> Any:
    """Everything in which two of a kind could differ, as text."""
    if isinstance(part, torch.optim.Optimizer):
        return repr([(name, value) for group in part.param_groups for name, value in group.items()])
    if isinstance(part, np.random.Generator):
        return repr(part.bit_generator.state)
    for name in ("state_dict", "get_state", "getstate", "tolist"):
        if hasattr(part, name):
            value = getattr(part, name)()
            return repr(value.tolist() if isinstance(value, torch.Tensor) else value)
    raise AssertionError(part)


@pytest.mark.parametrize("case", [name for name in CASES if name != "scaler"])
def test_each_kind_is_put_back_and_forth(case: str) -> None:
    """Inside it is as it was kept, outside as it is now, also after an error inside."""
    part, change = CASES[case]
    kept, before = KeptState([part], {}), state_of(part)
    change(part)
    after = state_of(part)
    assert after != before
    for _ in range(2):
        with kept.in_place() as whole:
            assert whole
            assert state_of(part) == before
        assert state_of(part) == after
    with pytest.raises(KeyError), kept.in_place():
        raise KeyError
    assert state_of(part) == after


def test_a_rate_in_a_tensor_stays_that_tensor() -> None:
    """Whoever holds it goes on seeing it."""
    part, change = CASES["rate in a tensor"]
    rate = part.param_groups[0]["lr"]
    kept = KeptState([part], {})
    change(part)
    with kept.in_place():
        assert part.param_groups[0]["lr"] is rate


def test_values_are_put_back_in_depth() -> None:
    """The objects in them stay the program's own."""
    seen = [1]
    values: dict[str, Any] = {"seen": seen}
    kept = KeptState([], values)
    seen.append(2)
    values["more"] = 3
    with kept.in_place() as whole:
        assert whole
        assert values == {"seen": [1]}
    assert values == {"seen": [1, 2], "more": 3}
    assert values["seen"] is seen


def test_large_arrays_are_kept_too() -> None:
    """They are copied once a loop, not looked at in every step."""
    array = np.zeros(LARGE)
    kept = KeptState([array], {})
    array += 1
    with kept.in_place() as whole:
        assert whole
        assert not array.any()
    assert array.all()


def nothing(part: Any) -> None:
    """Leaves it alone."""


@pytest.mark.parametrize(("change", "whole"), [(nothing, True), (CASES["scaler"][1], False)])
def test_what_can_only_be_looked_at_must_be_untouched(change: Callable[[Any], object], whole: bool) -> None:
    """To set a loss scaler is to wait for a GPU."""
    scaler = CASES["scaler"][0]
    values = {"number": 1}
    kept = KeptState([scaler], values)
    change(scaler)
    values["number"] = 2
    with kept.in_place() as is_whole:
        assert is_whole is whole
        assert values["number"] == (1 if whole else 2)


def test_what_nobody_can_look_at_is_never_whole() -> None:
    """A pair of callables, an object of the user's."""
    kept = KeptState([(lambda: 1, lambda value: None)], {})
    with kept.in_place() as whole:
        assert not whole


def test_modules_and_tensors_are_left_alone() -> None:
    """Their versions are looked at elsewhere."""
    tensor = torch.zeros(1)
    kept = KeptState([tensor, torch.nn.Linear(1, 1)], {})
    tensor.add_(1)
    with kept.in_place() as whole:
        assert whole
        assert tensor.item() == 1
