"""Random programs: every optimizer, scheduler and wrapper, deep in dicts and lists, go on as if never stopped."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from spotsafe.testing.states import through_checkpoint
from spotsafe.tracking import Tracker
from tests import proof
from tests.tensors.same import differences
from tests.tensors.test_optimizers import OPTIMIZERS, SCHEDULERS, Program, assert_same

SCHEDULES = sorted(SCHEDULERS.keys() - {"OneCycleLR", "CyclicLR momentum"})
"""Those two change the momentum too, which not every optimizer has."""
NESTS = ("list", "text", "number")
WRAPS = {
    "plain": lambda module: module,
    "compiled": lambda module: torch.compile(module, backend="eager"),
    "parallel": nn.DataParallel,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What a program consists of."""

    optimizer: str
    schedule: str
    saved_as: str
    loaded_as: str
    steps: int
    scale: float
    nest: list[str] = field(default_factory=list)


CHOICES = st.builds(
    Choice,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    schedule=st.sampled_from(SCHEDULES),
    saved_as=st.sampled_from(sorted(WRAPS)),
    loaded_as=st.sampled_from(sorted(WRAPS)),
    steps=st.integers(0, 4),
    scale=st.sampled_from([1.0, 2.0**16, 2.0**40]),
    nest=st.lists(st.sampled_from(NESTS), min_size=5, max_size=8),
)


class Life:
    """A program with an average of its model, a scaler and generators."""

    def __init__(self, choice: Choice, *, seed: int, wrap: str) -> None:
        self.program = Program(OPTIMIZERS[choice.optimizer], seed=seed, schedule=SCHEDULERS[choice.schedule])
        self.average = AveragedModel(self.program.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=choice.scale * seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.objects: Any = {
            "model": WRAPS[wrap](self.program.model),
            "optimizer": self.program.optimizer,
            "rest": [self.program.scheduler, self.average, self.scaler, self.generator],
        }
        for kind in choice.nest:
            self.objects = {"list": [self.objects], "text": {"a.b": self.objects}}.get(
                kind, {7: self.objects}
            )

    def tracker(self) -> Tracker:
        tracker = Tracker(warn=print)
        tracker.add("all", self.objects)
        return tracker

    def train(self, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            self.program.train(step, step + 1)
            self.average.update_parameters(self.program.model)
            torch.rand(1, generator=self.generator)

    def compare(self, other: Life) -> None:
        assert_same(self.program, other.program)
        for one, two in ((self.average, other.average), (self.scaler, other.scaler)):
            assert list(differences(one.state_dict(), two.state_dict())) == []
        assert torch.equal(self.generator.get_state(), other.generator.get_state())


def live(choice: Choice) -> None:
    """Train, save, restore into other objects, compare, train both on, compare."""
    one, other = Life(choice, seed=1, wrap=choice.saved_as), Life(choice, seed=2, wrap=choice.loaded_as)
    one.train(0, choice.steps)
    tracker = other.tracker()
    tracker.restore(through_checkpoint(one.tracker().capture()))
    tracker.judge()
    one.compare(other)
    for life in (one, other):
        life.train(choice.steps, 2)
    one.compare(other)


def run(examples: int) -> Counter[str]:
    """Programs that went on without a difference: how many, and how many with each part."""
    counts: Counter[str] = Counter()

    @settings(max_examples=examples, database=None)
    @given(CHOICES)
    def check(choice: Choice) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # schedulers warn about the order of their first step
            live(choice)
        counts.update({"all", choice.optimizer, choice.schedule, choice.saved_as, choice.loaded_as})

    check()
    return counts


def test_some_programs_go_on() -> None:
    """A few of them."""
    assert run(5)["all"] >= 5


@pytest.mark.slow
def test_a_hundred_programs_go_on() -> None:
    """Each wrapper among them."""
    counts = run(100)
    assert set(WRAPS) <= set(counts)


@pytest.mark.prove
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_programs_go_on(part: int) -> None:
    """Ten times a hundred others."""
    counts = run(100)
    assert counts["all"] >= 100
    parts = {name for name in counts if name in OPTIMIZERS or name in SCHEDULERS}
    proof.record(
        f"random programs through a checkpoint, part {part}", programs=counts["all"], kinds=len(parts)
    )
