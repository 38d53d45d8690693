"""State outside of tensors, copied at the end of a loop, to be put back for the time of a save.

What stands behind a loop - a scheduler's step, then a long evaluation - is run again after a resume. If it is
interrupted, the end of the loop is saved, where the scheduler had not stepped.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from spotsafe.tensors.marks import PlainMark, PlainWatch

Put = Callable[[], None]
"""Gives an object the state that was copied."""


class KeptState:
    """Copies of some objects' states, and of plain values, as they were at one instant.

    Args:
        parts: the objects; modules and tensors are left out.
        values: the user's plain values.
    """

    def __init__(self, parts: Iterable[object], values: dict[str, Any]) -> None:
        parts = [part for part in parts if not isinstance(part, (nn.Module, torch.Tensor))]
        self._movable = [part for part in parts if _copier(part) is not None]
        self._others = [part for part in parts if _copier(part) is None]
        self._puts = [_copy(part) for part in self._movable]
        self._mark = _mark(self._others)
        self._live = values
        self._values = copy.deepcopy(values)

    @contextmanager
    def in_place(self) -> Iterator[bool]:
        """Put everything back, and give it its state of now afterwards; false if not all could be put back."""
        if self._others and _mark(self._others) != self._mark:
            yield False
            return
        now, values = [_copy(part) for part in self._movable], dict(self._live)
        try:
            self._set(self._puts, self._values)
            yield True
        finally:
            self._set(now, values)

    def _set(self, puts: Iterable[Put], values: dict[str, Any]) -> None:
        self._live.clear()
        self._live.update(values)
        for put in puts:
            put()


def _mark(parts: list[object]) -> PlainMark:
    return PlainWatch().mark(parts, {})


def _copier(part: object) -> Callable[[Any], Put] | None:
    return next((copier for kinds, copier in _COPIERS if isinstance(part, kinds)), None)


def _copy(part: object) -> Put:
    copier = _copier(part)
    assert copier is not None, "only what can be copied is asked for"
    return copier(part)


def _of_torch_generator(generator: torch.Generator) -> Put:
    state = generator.get_state()

    def put() -> None:
        generator.set_state(state)

    return put


def _of_numpy_generator(generator: np.random.Generator) -> Put:
    state = copy.deepcopy(generator.bit_generator.state)

    def put() -> None:
        generator.bit_generator.state = state

    return put


def _of_random_state(generator: np.random.RandomState) -> Put:
    state = generator.get_state(legacy=False)
    return lambda: generator.set_state(state)


def _of_python_generator(generator: random.Random) -> Put:
    state = generator.getstate()
    return lambda: generator.setstate(state)


def _of_scheduler(scheduler: LRScheduler) -> Put:
    state = copy.deepcopy(scheduler.state_dict())
    return lambda: scheduler.load_state_dict(copy.deepcopy(state))


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Put:
    """Its options; what it has learned changes only when it steps."""
    kept = [
        {name: _detached(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]

    def put() -> None:
        for group, options in zip(optimizer.param_groups, kept, strict=True):
            for name, value in options.items():
                if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                    group[name].copy_(value)  # whoever holds it, such as a compiled step, goes on seeing it
                else:
                    group[name] = value

    return put


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _of_array(array: np.ndarray[Any, Any]) -> Put:
    kept = array.copy()

    def put() -> None:
        array[...] = kept

    return put


_COPIERS: tuple[tuple[Any, Callable[[Any], Put]], ...] = (
    (torch.Generator, _of_torch_generator),
    (np.random.Generator, _of_numpy_generator),
    (np.random.RandomState, _of_random_state),
    (random.Random, _of_python_generator),
    (LRScheduler, _of_scheduler),
    (torch.optim.Optimizer, _of_optimizer),
    (np.ndarray, _of_array),
)
