"""A notice in a long phase: what changed since the last safe point is not half counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spotsafe
from spotsafe.checkpoint.candidates import candidates, look
from spotsafe.testing.memory import MemoryStore
from tests.session.test_ways_out import Announcer


class Counter:
    """The smallest object that is state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class State:
    """One of each kind of state that no tensor's version tells about."""

    def __init__(self) -> None:
        self.numpy = np.random.default_rng(1)
        self.torch = torch.Generator().manual_seed(2)
        self.counter = Counter()
        self.pair = {"count": 0}
        self.array = np.zeros(2)
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.optimizer = torch.optim.SGD([self.parameter], lr=1.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)

    def tracked(self, *, opaque: bool) -> dict[str, Any]:
        """Everything; only if `opaque` also what cannot be looked at without asking it for its state."""
        both = {"counter": self.counter, "pair": (lambda: dict(self.pair), self.pair.update)}
        rest = {name: one for name, one in vars(self).items() if name not in both}
        return {**rest, **both} if opaque else rest


def change_values(state: State, run: spotsafe.Run) -> object:
    run.values.setdefault("list", []).append(1)
    return len(run.values["list"])


def change_numpy(state: State, run: spotsafe.Run) -> object:
    return state.numpy.random()


def change_torch(state: State, run: spotsafe.Run) -> object:
    return torch.rand((), generator=state.torch).item()


def change_object(state: State, run: spotsafe.Run) -> object:
    state.counter.count += 1
    return state.counter.count


def change_pair(state: State, run: spotsafe.Run) -> object:
    state.pair["count"] += 1
    return state.pair["count"]


def change_array(state: State, run: spotsafe.Run) -> object:
    state.array += 1
    return state.array.tolist()


def change_scheduler(state: State, run: spotsafe.Run) -> object:
    state.scheduler.step()
    return state.scheduler.get_last_lr()


def change_option(state: State, run: spotsafe.Run) -> object:
    state.optimizer.param_groups[0]["lr"] *= 0.5
    return state.optimizer.param_groups[0]["lr"]


CHANGES = [
    change_values,
    change_numpy,
    change_torch,
    change_object,
    change_pair,
    change_array,
    change_scheduler,
    change_option,
]


KEPT = {
    change_values,
    change_numpy,
    change_torch,
    change_array,
    change_scheduler,
    change_option,
}
"""What is put back to how it was when the loop before the tail ended, so that the end of that loop can be saved."""


def saved_steps(store: MemoryStore) -> list[int]:
    return [one.name.step for one in candidates(store, look(store)) if one.manifest is not None]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["tail", "body"])
def test_what_changed_before_an_interruption_is_not_half_counted(
    change: Callable[[State, spotsafe.Run], object], where: str
) -> None:
    """Changed before or in a phase that a notice ends: the phase is repeated, and so is the change; once."""

    def program(store: MemoryStore, *, announce: bool) -> list[object]:
        state, seen = State(), []

        def phase(run: spotsafe.Run, epoch: int) -> None:
            seen.append((epoch, "before", change(state, run)))
            for number in run.interruptible(range(3)):
                seen.append((epoch, number, change(state, run)))
                if announce and (epoch, number) == (1, 1):
                    Announcer(run).notice()

        try:
            with spotsafe.session(
                store, **state.tracked(opaque=change not in KEPT), watch=None, save_every=None
            ) as run:
                for epoch in run.epochs(3):
                    for step in run.range(2 * epoch + 2):
                        if where == "body" and step % 2 == 1:
                            phase(run, epoch)
                        state.parameter.grad = torch.ones(1)
                        state.optimizer.step()
                        seen.append((epoch, "step", step, state.parameter.item()))
                    if where == "tail":
                        phase(run, epoch)
        except spotsafe.Reclaimed:
            pass
        return seen

    whole = program(MemoryStore(), announce=False)
    store = MemoryStore()
    first = program(store, announce=True)
    assert saved_steps(store) == ([4] if where == "tail" and change in KEPT else [])
    second = program(store, announce=False)
    assert first == whole[: len(first)]
    assert second == whole[len(whole) - len(second) :]


class Uncopied(torch.optim.lr_scheduler.StepLR):
    """A scheduler whose state cannot be copied at each end of a loop."""

    copied = True

    def state_dict(self) -> dict[str, Any]:
        if not self.copied:
            raise RuntimeError("not now")
        return super().state_dict()


def test_state_that_cannot_be_kept_does_not_end_the_training() -> None:
    """An interruption behind the loop then finds nothing whole, that is all."""
    state, store = State(), MemoryStore()
    scheduler = Uncopied(state.optimizer, 1)
    tracked = {"parameter": state.parameter, "optimizer": state.optimizer, "scheduler": scheduler}
    with (
        pytest.raises(spotsafe.Reclaimed),
        spotsafe.session(store, **tracked, watch=None, save_every=None) as run,
    ):
        scheduler.copied = False
        for _ in run.epochs(2):
            for _ in run.range(2):
                state.parameter.grad = torch.ones(1)
                state.optimizer.step()
            scheduler.step()
            Announcer(run).notice()
            for _ in run.interruptible(range(2)):
                pytest.fail("not interrupted")
    assert saved_steps(store) == []
