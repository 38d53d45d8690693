"""Whether tensors were touched, and whether they hold bad values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from spotsafe.tensors.tree import NamedTensor
from spotsafe.tensors.versions import VersionWatch, not_finite


def test_a_mark_equals_itself_until_something_is_written() -> None:
    """Buffers, parameters and bare tensors are seen; reading is not."""
    module, bare = nn.Sequential(nn.BatchNorm1d(2)), torch.zeros(2)
    watch = VersionWatch()
    parts = [module, bare, object()]
    mark = watch.mark(parts)
    module.eval()(torch.ones(2, 2))
    bare.sum()
    assert watch.mark(parts) == mark
    module.train()(torch.ones(2, 2))
    moved = watch.mark(parts)
    assert moved != mark
    bare.add_(1)
    assert watch.mark(parts) != moved
    with torch.no_grad():
        module[0].weight.mul_(2)
    assert watch.mark(parts) != moved


def test_a_replaced_tensor_is_seen() -> None:
    """An assignment makes another tensor, though its version may be the same; `forget` looks for it."""
    module = nn.BatchNorm1d(2)
    watch = VersionWatch()
    mark = watch.mark([module])
    for _ in range(50):
        module.running_mean = torch.zeros(2)
        watch.forget()
        assert watch.mark([module]) != mark


def test_modules_added_later_are_seen_after_forget() -> None:
    """The walk over submodules is repeated when told so."""
    module = nn.Sequential(nn.Linear(1, 1))
    watch = VersionWatch()
    mark = watch.mark([module])
    module.append(nn.Linear(1, 1))
    assert watch.mark([module]) == mark
    watch.forget()
    assert watch.mark([module]) != mark


def test_marks_of_inference_tensors() -> None:
    """Tensors without a version are marked all the same."""
    with torch.inference_mode():
        tensor = torch.ones(2)
    watch = VersionWatch()
    assert watch.mark([tensor]) == watch.mark([tensor])
    assert watch.mark([tensor]) != 3


@pytest.mark.parametrize(
    ("tensor", "finite"),
    [
        (torch.ones(3), True),
        (torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([1.0, float("inf")]).bfloat16(), False),
        (torch.tensor([1 + 1j, complex(0, float("-inf"))]), False),
        (torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn), False),
        (torch.ones(2).to(torch.float8_e5m2), True),
        (torch.tensor([1 << 62]), True),
        (torch.zeros(0), True),
    ],
)
@pytest.mark.parametrize("role", ["parameter", "moment", "buffer", "other"])
def test_only_trained_values_and_moments_count(tensor: torch.Tensor, finite: bool, role: Any) -> None:
    """NaN and infinity in parameters and moments of any dtype are found; buffers do not count."""
    found = not_finite([NamedTensor(name="t", tensor=tensor, role=role)])
    assert found == (frozenset() if finite or role in {"buffer", "other"} else {"t"})


def test_a_trained_tensor_is_checked_without_autograd() -> None:
    """Looking at a parameter leaves no graph."""
    weight = nn.Parameter(torch.tensor([float("nan")]))
    assert not_finite([NamedTensor(name="w", tensor=weight, role="parameter")]) == {"w"}
