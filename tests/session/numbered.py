"""A run whose step number stands in every element of its tensors: a checkpoint of two steps would show two numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.loading import decode, with_selected
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.sinks import RecordingSink
from tests.session.places import steps_there

SIZE = 1 << 17
"""Items of one tensor: more than what is copied at once."""


class Model(torch.nn.Module):
    """Two tensors large enough to be copied beside training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(SIZE))
        self.second = torch.nn.Parameter(torch.zeros(SIZE // 512, 512))


class Numbering(torch.optim.Optimizer):
    """Each step writes its number into every element of every parameter and of their state."""

    def __init__(self, parameters: Any, *, uncounted: bool = False) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.uncounted = uncounted
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["average"] = torch.zeros_like(parameter.detach())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # no loss here
        """Count on; in two halves, so that a copy in between would show."""
        for parameter in self.param_groups[0]["params"]:
            for tensor in (parameter, self.state[parameter]["average"]):
                flat = (tensor.data if self.uncounted else tensor).view(-1)
                value = flat[0].item() + 1
                flat[: len(flat) // 2] = value
                flat[len(flat) // 2 :] = value


class Numbered:
    """A run that saves at every step, whose step numbers all of its elements."""

    def __init__(self, *, uncounted: bool = False, **options: Any) -> None:
        self.store, self.sink, self.model = MemoryStore(), RecordingSink(), Model()
        self.optimizer: Any = Numbering(self.model.parameters(), uncounted=uncounted)
        self.options = {"save_every": 1, "keep": 100, "events": self.sink, **options}

    def train(
        self,
        steps: int = 6,
        *,
        before: Callable[[spotsafe.Run], object] = lambda _: None,
        after: Callable[[spotsafe.Run], object] = lambda _: None,
        **tracked: Any,
    ) -> None:
        """`before` is called between the safe point and the optimizer's step, `after` behind the step."""
        with spotsafe.session(
            self.store, model=self.model, optimizer=self.optimizer, **tracked, **self.options
        ) as run:
            for _ in run.range(steps):
                before(run)
                self.optimizer.step()
                after(run)
                run.wait()

    @property
    def published(self) -> dict[int, set[float]]:
        """Step -> the numbers that its large tensors hold."""
        return {step: numbers_in(self.store, step) for step in steps_there(self.store)}

    @property
    def discarded(self) -> list[int]:
        """The steps whose copies were thrown away."""
        return [event.step for event in self.sink.of(ev.SaveDiscarded)]

    @property
    def warnings(self) -> str:
        """All of them."""
        return "\n".join(event.message for event in self.sink.of(ev.Warned))


def numbers_in(store: MemoryStore, step: int) -> set[float]:
    """The least and the greatest of each large tensor of a checkpoint."""
    values = with_selected(store, step, lambda opened: decode(opened, dict(opened.contents.values)))
    large = [one for one in values.values() if isinstance(one, torch.Tensor) and one.numel() >= SIZE]
    assert len(large) >= 4
    return {number for one in large for number in (one.min().item(), one.max().item())}


def numbers_of(store: MemoryStore, step: int, name: str) -> set[float]:
    """The same of one tensor."""
    values = with_selected(store, step, lambda opened: decode(opened, dict(opened.contents.values)))
    return {values[name].min().item(), values[name].max().item()}
