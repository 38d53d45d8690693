"""Which tracked object owns which parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from spotsafe.errors import UnsupportedState
from spotsafe.tensors.owners import find_names, track_line


def test_every_parameter_has_the_name_of_its_first_owner() -> None:
    """Modules, bare tensors and containers give names; tied parameters have several, one of which is first."""
    model, alpha = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Parameter(torch.ones(1))
    model[1].weight = model[0].weight
    names = find_names({"model": model, "alpha": alpha, "again": [model], "other": torch.Generator()})
    assert names.of[id(model[0].weight)] == "model.0.weight"
    assert names.of[id(alpha)] == "alpha"
    assert names.aliases["model.1.weight"] == "model.0.weight"
    assert names.aliases["again[0].1.bias"] == "model.1.bias"


def test_wrappers_change_no_name() -> None:
    """A compiled or parallel model's parameters have the plain model's names."""
    model = nn.Sequential(nn.Linear(1, 1))
    plain = find_names({"model": model}).of
    assert find_names({"model": nn.DataParallel(model)}).of == plain
    assert find_names({"model": torch.compile(model, backend="eager")}).of == plain


def test_one_name_for_two_parameters_is_refused() -> None:
    """Moments could not be told apart."""
    with pytest.raises(UnsupportedState, match=r"two parameters are called a\.weight"):
        find_names({"a": nn.Linear(1, 1), "a.weight": torch.ones(2)})


def test_the_line_to_write() -> None:
    """It names the largest module that holds what is lost, in a free name, and shows a few shapes."""

    class BigNet2D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])

    big = BigNet2D()
    lost = [("opt.a", one) for one in big.parameters()]
    line = track_line(lost, taken={"big_net2_d"})
    assert line.startswith("opt.a: 6 parameters (of shapes [1, 1], [1], [1, 1], [1], ...)")
    assert line.endswith("Write: run.track(big_net2_d_2=<the BigNet2D>)")


def test_the_line_for_a_tensor_of_no_module() -> None:
    """Then the parameter itself is tracked."""
    assert track_line([("o", torch.ones(3))], taken=()).endswith(
        "Write: run.track(parameter=<the parameter>)"
    )
