"""Numbers of parameters get names only where the file, or a person, says which is which."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from spotsafe.exchange.parameter_order import (
    UnknownOrder,
    is_optimizer_state,
    parameter_names,
    strip_names,
)

Make = Callable[[Any], torch.optim.Optimizer]


def two_layers() -> nn.Module:
    """Four parameters of four shapes."""
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5))


def saved(model: nn.Module, parameters: Iterable[Any], make: Make = torch.optim.AdamW) -> dict[str, Any]:
    """State of an optimizer that has made a step."""
    optimizer = make(parameters)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    return optimizer.state_dict()


def names(state: dict[str, Any], model: nn.Module, *, like: str | None = "model") -> list[list[str]]:
    return parameter_names(state, {"model": model.state_dict()}, like=like)


def test_numbers_alone_are_not_guessed():
    """Not even where all shapes differ: who asks for nothing gets no guess."""
    model = two_layers()

    with pytest.raises(UnknownOrder, match="does not say which parameter is which"):
        names(saved(model, model.parameters()), model, like=None)


def test_a_persons_word_names_them():
    """One group in the order of the module."""
    model = two_layers()

    assert names(saved(model, model.parameters()), model) == [
        ["model.0.weight", "model.0.bias", "model.1.weight", "model.1.bias"]
    ]


def test_groups_that_shapes_tell_apart():
    """Matrices decay, vectors do not: each group in the module's order, as nanoGPT and many others have it."""
    model = two_layers()
    groups = [
        {"params": [one for one in model.parameters() if one.dim() > 1]},
        {"params": [one for one in model.parameters() if one.dim() == 1]},
    ]

    assert names(saved(model, groups), model) == [
        ["model.0.weight", "model.1.weight"],
        ["model.0.bias", "model.1.bias"],
    ]


def test_groups_that_shapes_do_not_tell_apart():
    """Two layers of one size in two groups: which is which is not known."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{"params": list(layer.parameters())} for layer in model]

    with pytest.raises(UnknownOrder, match=r"model\.0\.weight fits into 2 of its parameter groups"):
        names(saved(model, groups), model)


def test_another_order_is_noticed_by_shapes():
    """The word is compared with what can be seen."""
    model = two_layers()

    with pytest.raises(UnknownOrder, match=r"shape of model\.0\.weight, \[3, 2\]"):
        names(saved(model, reversed(list(model.parameters()))), model)


def test_buffers_are_not_told_from_parameters():
    """More tensors than parameters: it is not guessed which ones are left out."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    with pytest.raises(UnknownOrder, match="it has 4 parameters, and model 7 tensors"):
        names(saved(model, model.parameters()), model)


def test_tied_parameters_count_once():
    """As in `named_parameters`, the first name is the name."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight

    assert names(saved(model, model.parameters()), model) == [
        ["model.0.weight", "model.0.bias", "model.1.bias"]
    ]


def test_parameters_without_state():
    """Nothing contradicts a frozen parameter, or an optimizer without moments."""
    model = two_layers()
    plain = saved(model, model.parameters(), lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    assert len(names(plain, model)[0]) == 4


def test_a_module_that_is_not_there():
    """The word names a module of the file."""
    model = two_layers()

    with pytest.raises(UnknownOrder, match="no module 'net' in the file"):
        names(saved(model, model.parameters()), model, like="net")


def keyed(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """As torch.distributed.checkpoint's `get_optimizer_state_dict` has it."""
    known = dict(enumerate(name for name, _ in model.named_parameters()))
    return {
        "state": {known[key]: value for key, value in state["state"].items()},
        "param_groups": [
            {**one, "params": [known[key] for key in one["params"]]} for one in state["param_groups"]
        ],
    }


def beside(state: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """As newer optimizers have it that were made of `named_parameters()`."""
    known = [name for name, _ in model.named_parameters()]
    return {
        **state,
        "param_groups": [
            {**one, "param_names": [known[key] for key in one["params"]]} for one in state["param_groups"]
        ],
    }


@pytest.mark.parametrize("form", [keyed, beside])
def test_names_in_the_file_need_nobodys_word(form):
    """In whatever order they are, and with buffers in the module."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    state = form(saved(model, model.parameters()), model)
    for group in state["param_groups"]:
        group["params"].reverse()
        group.get("param_names", []).reverse()

    assert names(state, model, like=None) == [
        ["model.1.bias", "model.1.weight", "model.0.bias", "model.0.weight"]
    ]


@pytest.mark.parametrize("form", [keyed, beside])
def test_names_with_something_in_front(form):
    """What is stripped from the module's names is stripped from these."""
    model = two_layers()
    wrapped = nn.ModuleDict({"module": model})
    state = form(saved(model, model.parameters()), wrapped)

    assert names(strip_names(state, "module."), model, like=None)[0][0] == "model.0.weight"


def test_names_that_may_be_those_of_two_modules():
    """A model and its average have the same; then a word decides."""
    model = two_layers()
    state = keyed(saved(model, model.parameters()), model)
    modules = {"model": model.state_dict(), "ema": model.state_dict()}

    with pytest.raises(UnknownOrder, match="may be those of model or ema"):
        parameter_names(state, modules, like=None)
    assert parameter_names(state, modules, like="ema")[0][0] == "ema.0.weight"


def test_names_that_contradict_the_module():
    """Unknown ones, ones that stand there twice, and state of another shape."""
    model, other = two_layers(), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 6))
    state = keyed(saved(model, model.parameters()), model)

    with pytest.raises(UnknownOrder, match=r"such as '0.weight', that no module"):
        names(state, nn.Linear(1, 1), like=None)
    with pytest.raises(UnknownOrder, match=r"state of 1.weight has not the shape \[6, 3\]"):
        names(state, other, like=None)
    state["param_groups"].append(state["param_groups"][0])
    with pytest.raises(UnknownOrder, match="names a parameter twice"):
        names(state, model, like=None)


def test_numbers_that_became_text():
    """torch.distributed.checkpoint makes text of the keys of a dict, but not of what is in a list."""
    model = two_layers()
    state = saved(model, reversed(list(model.parameters())))
    state["state"] = {str(key): value for key, value in state["state"].items()}

    with pytest.raises(UnknownOrder, match="no state that would be next has the shape"):
        names(state, model)


@pytest.mark.parametrize(
    "value",
    [None, {}, {"state": {}}, {"state": {}, "param_groups": []}, {"state": [], "param_groups": [{"params": []}]},
     {"state": {}, "param_groups": [{"lr": 1}]}, {"state": {0: 7}, "param_groups": [{"params": [0]}]}],
)  # fmt: skip
def test_what_is_no_state_of_an_optimizer(value):
    """Whatever lacks the form that torch documents."""
    assert not is_optimizer_state(value)
