"""What plain values are taken for."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from spotsafe.errors import UnsupportedState
from spotsafe.exchange.trees import capture_values, is_state_dict, tree_of


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"a.b": torch.ones(1)}, "module"),
        (OrderedDict(w=torch.ones(1)), "module"),
        (torch.ones(1), "tensor"),
        ({"w": torch.ones(1), "n": 1}, "stateful"),
        ({1: torch.ones(1)}, "stateful"),
        ({"$": torch.ones(1)}, "stateful"),
        ({}, "stateful"),
        (5, "value"),
        ([torch.ones(1)], "value"),
        ((1, 2), "value"),
        (None, "value"),
    ],
)
def test_kinds(value, kind):
    """A dict of named tensors is a module's; the tree of each says so, and the tensors are collected."""
    capture = capture_values({"x": value})

    assert capture.state["x"]["kind"] == kind
    assert is_state_dict(value) == (kind == "module")


def test_names_of_tensors():
    """A module's are its keys below its name; tied ones are one tensor."""
    shared = torch.ones(2)

    capture = capture_values({"m": {"0.w": shared, "1.w": shared, "b": torch.zeros(1)}})

    assert [one.name for one in capture.tensors] == ["m.0.w", "m.b"]
    assert capture.state["m"]["state"]["1.w"] == {"$": "tensor", "name": "m.0.w"}


def test_what_cannot_be_stored_is_named_by_its_path():
    """However deep."""
    with pytest.raises(UnsupportedState, match=r"x\.a\['b'\]\[0\]"):
        capture_values({"x": {"a": {"b": [object()]}}})
    assert tree_of({"$": "tuple", "items": []}) == {"kind": "value", "value": {"$": "tuple", "items": []}}
