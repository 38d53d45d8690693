"""What a restore hands over instead of copying it."""

from __future__ import annotations

import pytest
import torch

from spotsafe.errors import StateMismatch
from spotsafe.tensors.giving import Giving


def node(name: str) -> dict[str, str]:
    return {"$": "tensor", "name": name}


def test_what_one_place_refers_to_is_given_itself() -> None:
    """And what two refer to is copied for both, in whatever trees they stand."""
    tensor = torch.ones(3)
    giving = Giving([{"a": node("one"), "b": [node("two")]}, [node("two")]])
    assert giving.give("one", tensor) is tensor
    for _ in range(2):
        copy = giving.give("two", tensor)
        assert copy is not tensor
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
        assert torch.equal(copy, tensor)


def test_what_no_tree_refers_to_is_copied() -> None:
    """Nobody has counted who needs it."""
    tensor = torch.ones(3)
    assert Giving([]).give("one", tensor) is not tensor


def test_an_object_that_failed_with_it_does_not_get_it_changed() -> None:
    """A second restore gets the saved values, or an error; never what the first attempt made of them."""
    tensor = torch.ones(3)
    giving = Giving([node("one")])
    given = giving.give("one", tensor)
    again = giving.give("one", tensor)
    assert again is not given
    given.mul_(2)
    with pytest.raises(StateMismatch, match="one: was changed by the object"):
        giving.give("one", tensor)
