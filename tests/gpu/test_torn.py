"""The host runs ahead of a device: what is saved is of one step all the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.events import Event
from spotsafe.loading import decode, with_selected
from spotsafe.storage.local import LocalStore
from spotsafe.storage.store import Store

SIZE = 1 << 17
"""Items of one tensor: more than what is copied at once."""


class Counting(torch.optim.Optimizer):
    """Each step adds one to every element of every parameter and its state, in halves. Never waits for the device."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["average"] = torch.zeros_like(parameter.detach())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override] # no loss here
        """Count on."""
        for parameter in self.param_groups[0]["params"]:
            for tensor in (parameter, self.state[parameter]["average"]):
                flat = tensor.view(-1)
                flat[: len(flat) // 2].add_(1)
                flat[len(flat) // 2 :].add_(1)


class Busy:
    """Work that keeps a device behind the host."""

    def __init__(self, device: torch.device) -> None:
        size = 4096 if device.type == "cuda" else 64
        self._matrix = torch.ones(size, size, device=device)

    def more(self) -> None:
        """Queue some milliseconds of it."""
        for _ in range(4):
            torch.mm(self._matrix, self._matrix)


@dataclasses.dataclass
class Looker:
    """Reads every checkpoint at the moment of its publish."""

    store: Store
    look: Callable[[int, dict[str, Any]], list[str]]
    """What is wrong with the values of a step."""
    seen: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)

    def emit(self, event: Event) -> None:
        if isinstance(event, ev.CheckpointPublished):
            values = with_selected(
                self.store, event.checkpoint, lambda opened: decode(opened, dict(opened.contents.values))
            )
            self.wrong += self.look(event.step, values)
            self.seen += 1


def torn(step: int, values: dict[str, Any]) -> list[str]:
    """The large tensors that hold another number than this one, or two."""
    found = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() >= SIZE:
            found[name] = (value.min().item(), value.max().item())
    assert len(found) == 4
    return [f"{name} of step {step}: {both}" for name, both in found.items() if both != (step, step)]


@pytest.mark.parametrize("writer", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_no_checkpoint_is_torn(device: torch.device, tmp_path: Path, writer: Any, overlap: bool) -> None:
    """Every element of every checkpoint is the step, though steps are still queued when a save begins."""
    model = torch.nn.ParameterList([torch.zeros(SIZE), torch.zeros(512, SIZE // 512)]).to(device)
    optimizer, busy = Counting(model.parameters()), Busy(device)
    looker, steps = Looker(LocalStore(tmp_path), torn), 500 if device.type == "cuda" else 30
    with spotsafe.session(
        str(tmp_path),
        model=model,
        optimizer=optimizer,
        save_every=1,
        watch=None,
        writer=writer,
        overlap=overlap,
        events=looker,
    ) as run:
        for step in run.range(steps):
            busy.more()
            optimizer.step()
            if step % 4 == 3:  # so that many are saved, and some beside the steps
                run.wait()
    assert looker.wrong == []
    assert looker.seen >= steps // 5


ADAMS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}


@pytest.mark.parametrize("options", ADAMS.values(), ids=ADAMS)
def test_the_count_of_adam_is_of_the_same_step(device: torch.device, tmp_path: Path, options: Any) -> None:
    """Its `step` is a number on the CPU, or on the device; copied with the rest, it is never one step late."""
    if options.get("capturable") and device.type == "cpu":
        pytest.skip("capturable=True is for CUDA")
    model = torch.nn.Linear(512, 512).to(device)
    optimizer, busy = torch.optim.Adam(model.parameters(), **options), Busy(device)

    def late(step: int, values: dict[str, Any]) -> list[str]:
        counts = {name: float(value) for name, value in values.items() if name.endswith(".step")}
        assert len(counts) == 2
        return [f"{name} of step {step}: {count}" for name, count in counts.items() if count != step]

    looker = Looker(LocalStore(tmp_path), late)
    with spotsafe.session(
        str(tmp_path),
        model=model,
        optimizer=optimizer,
        save_every=1,
        watch=None,
        writer="thread",
        events=looker,
    ) as run:
        for _ in run.range(12):
            optimizer.zero_grad()
            model(torch.ones(4, 512, device=device)).sum().backward()
            busy.more()
            optimizer.step()
            if run.step > 4:
                run.wait()
    assert looker.wrong == []
    assert looker.seen >= 6
