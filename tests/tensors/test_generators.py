"""Random number generators that a user tracks."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from spotsafe.errors import StateMismatch, UnsupportedState
from spotsafe.tensors.tree import SavedState
from spotsafe.testing.states import through_checkpoint
from spotsafe.tracking import Tracker

GENERATORS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "torch": (
        lambda seed: torch.Generator().manual_seed(seed),
        lambda generator: torch.rand(3, generator=generator).tolist(),
    ),
    "numpy": (np.random.default_rng, lambda generator: [generator.random(), generator.standard_normal()]),
    "MT19937": (
        lambda seed: np.random.Generator(np.random.MT19937(seed)),
        lambda generator: generator.integers(0, 1 << 30, 3).tolist(),
    ),
    "Philox": (
        lambda seed: np.random.Generator(np.random.Philox(seed)),
        lambda generator: generator.integers(0, 1 << 30, 3).tolist(),
    ),
    "RandomState": (np.random.RandomState, lambda generator: [generator.rand(), generator.randn()]),
    "random": (random.Random, lambda generator: [generator.random(), generator.gauss(0, 1)]),
}


def tracked(obj: Any) -> Tracker:
    tracker = Tracker(warn=print)
    tracker.add("g", obj)
    return tracker


def changed(saved: SavedState, **members: Any) -> SavedState:
    return SavedState(state={"g": {**saved.state["g"], **members}}, tensors=saved.tensors)


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_goes_on_where_it_was(name: str) -> None:
    """The numbers after a restore are those that would have come, cached deviates too."""
    make, draw = GENERATORS[name]
    one, other = make(1), make(2)
    draw(one)
    saved = through_checkpoint(tracked(one).capture())
    expected = [draw(one) for _ in range(3)]
    tracked(other).restore(saved)
    assert [draw(other) for _ in range(3)] == expected


@pytest.mark.parametrize("name", GENERATORS)
def test_a_state_that_is_none_is_refused(name: str) -> None:
    """A damaged state is an error that names the generator."""
    make, _ = GENERATORS[name]
    saved = through_checkpoint(tracked(make(1)).capture())
    for wrong in ("AAAA", {"bit_generator": "MT19937", "state": {}}, {"version": 3}):
        with pytest.raises(StateMismatch, match="g"):
            tracked(make(2)).restore(changed(saved, state=wrong))


def test_another_bit_generator_is_a_mismatch() -> None:
    """A generator of another class cannot take the state."""
    saved = through_checkpoint(tracked(np.random.default_rng(1)).capture())
    with pytest.raises(StateMismatch, match="g: saved generator PCG64, program has MT19937"):
        tracked(np.random.Generator(np.random.MT19937(1))).restore(saved)


def test_a_generator_of_another_device_is_a_mismatch() -> None:
    """States of CUDA generators mean nothing to one of the CPU."""
    saved = through_checkpoint(tracked(torch.Generator()).capture())
    with pytest.raises(StateMismatch, match="g: saved generator of cuda, program has one of cpu"):
        tracked(torch.Generator()).restore(changed(saved, device="cuda"))


def test_the_operating_systems_generator_has_no_state() -> None:
    """SystemRandom is refused when it is tracked."""
    with pytest.raises(UnsupportedState, match="operating system"):
        tracked(random.SystemRandom())
