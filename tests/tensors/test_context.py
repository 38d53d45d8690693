"""Comparing live values with saved ones, in words."""

from __future__ import annotations

import pytest
import torch

from spotsafe.tensors.context import Restoring, describe, node_spec, tensor_problems
from spotsafe.tensors.source import Source
from spotsafe.tensors.tree import Json

SPECS = {"w": ("float32", (2, 3))}
NODE = {"$": "tensor", "name": "w"}


def restoring(*, strict: bool = True) -> Restoring:
    return Restoring(source=Source({}), specs=SPECS, strict=strict, names={}, aliases={}, warn=print)


@pytest.mark.parametrize(
    ("node", "spec"),
    [
        (NODE, ("float32", (2, 3))),
        ({"$": "tensor", "name": "gone"}, None),
        ({"$": "torch.sparse_coo", "shape": [4, 5]}, ("", (4, 5))),
        ({"$": "torch.wrapper", "shape": []}, ("", ())),
        ({"$": "tuple", "items": []}, None),
        ({"a": 1}, None),
        (3, None),
    ],
)
def test_what_a_node_stands_for(node: Json, spec: object) -> None:
    """Tensors and composed tensors have a shape; everything else has none."""
    assert node_spec(node, SPECS) == spec


@pytest.mark.parametrize(
    ("live", "node", "problem"),
    [
        (torch.ones(2, 3), NODE, None),
        (torch.ones(3, 2), NODE, "x: saved float32 [2, 3], program has float32 [3, 2]"),
        (torch.ones(2, 3).int(), NODE, "x: saved float32 [2, 3], program has int32 [2, 3]"),
        (torch.ones(2, 3), 3, "x: float32 [2, 3] in the program, a plain value in the checkpoint"),
        (
            torch.ones(2),
            {"$": "tuple"},
            "x: float32 [2] in the program, a value of kind tuple in the checkpoint",
        ),
        (torch.ones(4, 5).to_sparse(), {"$": "torch.sparse_coo", "shape": [4, 5]}, None),
        ("text", NODE, None),
        (torch.nn.parameter.UninitializedParameter(), NODE, None),
    ],
)
def test_a_difference_is_one_line(live: object, node: Json, problem: str | None) -> None:
    """Name, what was saved, what the program has."""
    assert tensor_problems(live, node, "x", restoring()) == ([] if problem is None else [problem])


def test_another_dtype_is_cast_without_strict() -> None:
    """Only the shape must agree then."""
    assert tensor_problems(torch.ones(2, 3).int(), NODE, "x", restoring(strict=False)) == []
    assert len(tensor_problems(torch.ones(2).int(), NODE, "x", restoring(strict=False))) == 1


def test_live_values_in_words() -> None:
    """What an error calls a live value."""
    assert describe(torch.ones(2, dtype=torch.bfloat16)) == "bfloat16 [2]"
    assert describe(torch.nn.parameter.UninitializedParameter()) == "a parameter that is not initialised yet"
    assert describe([1]) == "a list"
