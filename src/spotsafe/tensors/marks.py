"""Whether state outside of tensors was touched, told by marks that are cheap enough for every step.

Schedulers, generators, loss scalers and the options of optimizers have one. Of other objects nobody can tell
without asking them for their whole state, which may take long or wait for a GPU: they count as touched.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

LARGE = 1 << 16
"""Bytes. Plain values and arrays above that are not looked at in every step."""


class PlainMark:
    """What some state consists of at one instant. Equal to another mark if surely nothing was touched between."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlainMark):
            return NotImplemented
        return len(self._parts) == len(other._parts) and all(map(_same, self._parts, other._parts))

    __hash__ = None  # type: ignore[assignment] # a mark is compared, never looked up

    def surely_differs(self, other: PlainMark) -> bool:
        """Whether something was touched for certain; what nobody looked at gets the benefit of the doubt."""
        pairs = zip(self._parts, other._parts, strict=False)
        known = [(one, two) for one, two in pairs if one is not _Unknown and two is not _Unknown]
        return len(self._parts) != len(other._parts) or not all(_same(one, two) for one, two in known)


class PlainWatch:
    """Takes marks. What kind of object each part is, is found out once, until `forget`."""

    def __init__(self) -> None:
        self._looks: list[Callable[[], Any]] | None = None
        self._large = False

    def forget(self) -> None:
        """Look at all parts again at the next mark."""
        self._looks = None

    def mark(self, parts: Iterable[object], values: Mapping[str, Any]) -> PlainMark:
        """The mark of `parts` (read only after `forget`; modules and tensors have marks of their own) and values."""
        if self._looks is None:
            self._looks = [_look(part) for part in parts if not isinstance(part, (nn.Module, torch.Tensor))]
        return PlainMark([look() for look in self._looks] + [self._look_at_values(values)])

    def _look_at_values(self, values: Mapping[str, Any]) -> Any:
        if self._large:
            return _Unknown
        try:
            data = pickle.dumps(values, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception:  # noqa: BLE001 - whatever cannot be saved is refused when it is saved
            return _Unknown
        self._large = len(data) > LARGE
        return data


class _Unknown:
    """Stands for what nobody looked at: it is equal to nothing, itself included."""


def _look(part: Any) -> Callable[[], Any]:
    """How to look at an object."""
    if isinstance(part, np.ndarray) and (part.nbytes > LARGE or part.dtype.hasobject):
        return lambda: _Unknown
    look = next((look for kinds, look in _LOOKS if isinstance(part, kinds)), None)
    return (lambda: _Unknown) if look is None else partial(look, part)


def _look_at_numpy(generator: Any) -> Any:
    return pickle.dumps(generator._bit_generator.state)  # noqa: SLF001 - a RandomState has no other way to it


def _look_at_options(optimizer: torch.optim.Optimizer) -> Any:
    return [_seen(value) for group in optimizer.param_groups for value in _options(group)]


def _look_at_attributes(part: Any) -> Any:
    return [_seen(value) for value in vars(part).values()]


def _options(group: Mapping[str, Any]) -> Iterable[Any]:
    return (value for name, value in group.items() if name != "params")


def _seen(value: Any) -> Any:
    """A value that is kept, so that no other one takes its address; a tensor with its version."""
    if isinstance(value, torch.Tensor):
        return value, -1 if value.is_inference() else value._version  # noqa: SLF001 - no public way
    return value


def _same(one: Any, two: Any) -> bool:
    if one is _Unknown or two is _Unknown:
        return False
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(_same, one, two))
    if one is two:
        return True
    return type(one) is type(two) and isinstance(one, (int, float, str, bytes)) and bool(one == two)


_LOOKS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (torch.Generator, lambda generator: generator.get_state().numpy().tobytes()),
    ((np.random.Generator, np.random.RandomState), _look_at_numpy),
    (random.Random, lambda generator: generator.getstate()),
    (torch.optim.Optimizer, _look_at_options),
    (
        (LRScheduler, torch.amp.GradScaler),
        _look_at_attributes,
    ),  # they replace what they change, tensors aside
    (np.ndarray, lambda array: array.tobytes()),
)
