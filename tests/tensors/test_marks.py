"""Whether state outside of tensors was touched: seen if it was, and never said to be untouched on a guess."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from spotsafe.tensors.marks import LARGE, PlainWatch


def optimizer(lr: Any = 0.1) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    one = torch.optim.SGD([{"params": [parameter], "name": "first"}], lr=lr)
    one.step()
    return one


def scheduled(make: Callable[[torch.optim.Optimizer], Any]) -> tuple[Any, Callable[[Any], object]]:
    one = optimizer()
    scheduler = make(one)
    one.step()
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
        return scheduler, lambda one: one.step(1.0)
    return scheduler, lambda one: one.step()


def scaler_after_a_step() -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    update(scaler)
    return scaler


def update(scaler: torch.amp.GradScaler) -> None:
    one = optimizer()
    parameter = one.param_groups[0]["params"][0]
    scaler.scale(parameter.sum()).backward()
    scaler.step(one)
    scaler.update()


def chained(one: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(one, 0.9), lr_scheduler.ConstantLR(one, 0.5, 4)]
    )


def sequential(one: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.ConstantLR(one, 0.5, 4), lr_scheduler.ExponentialLR(one, 0.9)]
    return lr_scheduler.SequentialLR(one, parts, milestones=[3])


def set_rate(one: torch.optim.Optimizer) -> None:
    one.param_groups[0]["lr"] *= 0.5


def fill_rate(one: torch.optim.Optimizer) -> None:
    one.param_groups[0]["lr"].mul_(0.5)


CASES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "torch generator": (torch.Generator(), lambda one: torch.rand(1, generator=one)),
    "numpy generator": (np.random.default_rng(1), lambda one: one.random()),
    "twister": (np.random.Generator(np.random.MT19937(1)), lambda one: one.random()),
    "random state": (np.random.RandomState(1), lambda one: one.rand()),
    "python generator": (random.Random(1), lambda one: one.random()),
    "array": (np.zeros(3), lambda one: one.__iadd__(1)),
    "rate": (optimizer(), set_rate),
    "rate in a tensor": (optimizer(torch.tensor(0.1)), fill_rate),
    "scaler": (scaler_after_a_step(), update),
    "exponential": scheduled(lambda one: lr_scheduler.ExponentialLR(one, 0.9)),
    "constant": scheduled(lambda one: lr_scheduler.ConstantLR(one, 1.0, 4)),
    "plateau": scheduled(lr_scheduler.ReduceLROnPlateau),
    "chained": scheduled(chained),
    "sequential": scheduled(sequential),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_is_seen_when_it_changes_and_only_then(case: str) -> None:
    """Two marks of an untouched object are equal, also when other objects changed their sizes in between."""
    part, change = CASES[case]
    watch = PlainWatch()
    mark = watch.mark([part], {})
    assert watch.mark([], {}) == mark
    change(part)
    changed = watch.mark([], {})
    assert changed != mark
    watch.forget()
    assert watch.mark([part], {}) == changed
    assert changed != "another thing"


@pytest.mark.parametrize(
    "part", [object(), (lambda: 1, lambda value: None), np.zeros(LARGE), np.array([[]], dtype=object)]
)
def test_what_cannot_be_looked_at_counts_as_touched(part: object) -> None:
    """Better a step is made again than that half a body is counted."""
    watch = PlainWatch()
    assert watch.mark([part], {}) != watch.mark([part], {})


def test_modules_and_tensors_are_left_to_their_versions() -> None:
    """They have marks of their own."""
    watch = PlainWatch()
    parts = [torch.nn.Linear(2, 2), torch.zeros(1)]
    mark = watch.mark(parts, {})
    parts[1].add_(1)
    assert watch.mark(parts, {}) == mark


def test_values_are_looked_at_in_depth() -> None:
    """A list in a dict that grows is seen; what cannot be pickled, or is large, counts as touched."""
    watch = PlainWatch()
    values: dict[str, Any] = {"best": {"loss": 0.5}, "seen": [1]}
    mark = watch.mark([], values)
    assert watch.mark([], values) == mark
    values["seen"].append(2)
    assert watch.mark([], values) != mark
    assert watch.mark([], {"local": lambda: 1}) != watch.mark([], {"local": lambda: 1})

    large = {"text": "x" * LARGE}
    mark = watch.mark([], large)
    assert watch.mark([], large) != mark
    assert watch.mark([], values) != watch.mark([], values), "it is not looked at again"
