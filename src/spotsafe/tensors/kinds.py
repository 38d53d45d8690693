"""What can be state, and how each kind of object is saved, compared and restored.

Every kind is a small class with the same four methods. `kind_of` finds the one for an object, or says what is wrong
with it. A saved object is ``{"kind": <name of its kind>, ...}``.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from spotsafe.checkpoint import typed
from spotsafe.errors import StateMismatch, UnsupportedState
from spotsafe.tensors import rng
from spotsafe.tensors.context import Restoring
from spotsafe.tensors.modules import (
    capture_module,
    module_problems,
    named_parameters,
    restore_module,
    tensor_problems,
)
from spotsafe.tensors.optimizers import (
    capture_optimizer,
    is_optimizer,
    optimizer_problems,
    restore_optimizer,
)
from spotsafe.tensors.tree import Collector, Json, overlaps_itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Capturing:
    """What every kind is given while its object is captured."""

    collector: Collector
    names: Mapping[int, str]
    """`id` of each parameter that a tracked object holds -> its name."""
    warn: Callable[[str], None]


class Kind(Protocol):
    """One kind of state. `path` is where the object is: its tracked name, and the way inside it."""

    name: str

    def capture(self, obj: Any, path: str, capturing: Capturing) -> dict[str, Json]:
        """The object's typed tree, without the member ``kind``."""
        ...

    def problems(self, obj: Any, saved: Json, path: str, restoring: Restoring) -> list[str]:
        """Everything in which a saved object does not fit the live one; changes nothing."""
        ...

    def restore(self, obj: Any, saved: Json, path: str, restoring: Restoring) -> None:
        """Restore the object in place."""
        ...

    def parts(self, obj: Any, path: str) -> Iterator[tuple[str, Any]]:
        """The objects inside, with their paths; the object itself if it has none."""
        ...


class _Leaf:
    """A kind whose objects have no objects inside."""

    def parts(self, obj: Any, path: str) -> Iterator[tuple[str, Any]]:
        """The object itself."""
        yield path, obj

    def problems(self, obj: Any, saved: Json, path: str, restoring: Restoring) -> list[str]:
        """Nothing can be told before it is loaded."""
        del obj, saved, path, restoring
        return []


class _Module(_Leaf):
    name = "module"

    def capture(self, obj: nn.Module, path: str, capturing: Capturing) -> dict[str, Json]:
        return capture_module(obj, path, capturing.collector)

    def problems(self, obj: nn.Module, saved: Json, path: str, restoring: Restoring) -> list[str]:
        return module_problems(obj, saved, path, restoring)

    def restore(self, obj: nn.Module, saved: Json, path: str, restoring: Restoring) -> None:
        restore_module(obj, saved, path, restoring)


class _Optimizer(_Leaf):
    name = "optimizer"

    def capture(self, obj: Any, path: str, capturing: Capturing) -> dict[str, Json]:
        return capture_optimizer(obj, path, capturing.collector, capturing.names, capturing.warn)

    def problems(self, obj: Any, saved: Json, path: str, restoring: Restoring) -> list[str]:
        return optimizer_problems(obj, saved, path, restoring)

    def restore(self, obj: Any, saved: Json, path: str, restoring: Restoring) -> None:
        restore_optimizer(obj, saved, path, restoring)


class _Tensor(_Leaf):
    name = "tensor"

    def capture(self, obj: torch.Tensor, path: str, capturing: Capturing) -> dict[str, Json]:
        role = "parameter" if obj.requires_grad else "buffer"
        value = capturing.collector.tensor(obj.detach(), path, role=role)
        return {"value": value, "requires_grad": obj.requires_grad}

    def problems(self, obj: torch.Tensor, saved: Json, path: str, restoring: Restoring) -> list[str]:
        return tensor_problems(obj, saved["value"], path, restoring)

    def restore(self, obj: torch.Tensor, saved: Json, path: str, restoring: Restoring) -> None:
        value = restoring.source.decode(saved["value"], obj.detach())
        with torch.no_grad():
            obj.copy_(value)
        if obj.requires_grad is not saved["requires_grad"]:
            restoring.warn(
                f"{path} was saved with requires_grad={saved['requires_grad']}, and has the other now"
            )


class _Array(_Leaf):
    name = "array"

    def capture(self, obj: np.ndarray[Any, Any], path: str, capturing: Capturing) -> dict[str, Json]:
        return {"value": capturing.collector.encode(obj, path)}

    def problems(self, obj: np.ndarray[Any, Any], saved: Json, path: str, restoring: Restoring) -> list[str]:
        del restoring
        was, now = (saved["value"]["dtype"], saved["value"]["shape"]), (obj.dtype.str, list(obj.shape))
        return [] if was == now else [f"{path}: saved array {was[0]} {was[1]}, program has {now[0]} {now[1]}"]

    def restore(self, obj: np.ndarray[Any, Any], saved: Json, path: str, restoring: Restoring) -> None:
        del path
        obj[...] = restoring.source.decode(saved["value"])


class _Stateful(_Leaf):
    name = "stateful"

    def capture(self, obj: Any, path: str, capturing: Capturing) -> dict[str, Json]:
        return {"state": capturing.collector.members(obj.state_dict(), path)}

    def restore(self, obj: Any, saved: Json, path: str, restoring: Restoring) -> None:
        # The object's present state only lends classes and devices; an object that has none yet is fine.
        live: object = typed.MISSING
        with contextlib.suppress(Exception):
            live = obj.state_dict()
        state = restoring.source.decode(saved["state"], live)
        try:
            obj.load_state_dict(state)
        except Exception as error:
            problem = f"{path} refused its saved state: {type(error).__name__}: {error}"
            raise StateMismatch(problem, problems=[problem]) from error


class _Pair(_Leaf):
    name = "pair"

    def capture(self, obj: Any, path: str, capturing: Capturing) -> dict[str, Json]:
        return {"state": capturing.collector.members(obj[0](), path)}

    def restore(self, obj: Any, saved: Json, path: str, restoring: Restoring) -> None:
        del path
        live: object = typed.MISSING
        with contextlib.suppress(Exception):
            live = obj[0]()
        obj[1](restoring.source.decode(saved["state"], live))


class _Generator(_Leaf):
    name = "torch.Generator"

    def capture(self, obj: torch.Generator, path: str, capturing: Capturing) -> dict[str, Json]:
        del path, capturing
        return {"device": obj.device.type, "state": rng.encode_bytes(obj.get_state())}

    def problems(self, obj: torch.Generator, saved: Json, path: str, restoring: Restoring) -> list[str]:
        del restoring
        was, now = saved["device"], obj.device.type
        return [] if was == now else [f"{path}: saved generator of {was}, program has one of {now}"]

    def restore(self, obj: torch.Generator, saved: Json, path: str, restoring: Restoring) -> None:
        del restoring
        with _bits_of(path):
            obj.set_state(rng.decode_bytes(saved["state"], size=obj.get_state().numel()))


class _NumpyGenerator(_Leaf):
    name = "numpy.Generator"

    def capture(self, obj: np.random.Generator, path: str, capturing: Capturing) -> dict[str, Json]:
        del path, capturing
        return {"state": rng.encode_bits(obj.bit_generator.state)}

    def problems(self, obj: np.random.Generator, saved: Json, path: str, restoring: Restoring) -> list[str]:
        del restoring
        was, now = saved["state"].get("bit_generator"), type(obj.bit_generator).__name__
        return [] if was == now else [f"{path}: saved generator {was}, program has {now}"]

    def restore(self, obj: np.random.Generator, saved: Json, path: str, restoring: Restoring) -> None:
        del restoring
        with _bits_of(path):
            obj.bit_generator.state = rng.decode_numpy(saved["state"])


class _RandomState(_Leaf):
    name = "numpy.RandomState"

    def capture(self, obj: np.random.RandomState, path: str, capturing: Capturing) -> dict[str, Json]:
        del path, capturing
        return {"state": rng.encode_bits(obj.get_state(legacy=False))}

    def restore(self, obj: np.random.RandomState, saved: Json, path: str, restoring: Restoring) -> None:
        del restoring
        with _bits_of(path):
            obj.set_state(dict(rng.decode_numpy(saved["state"])))  # type: ignore[arg-type] # numpy's own TypedDict


class _PythonRandom(_Leaf):
    name = "random.Random"

    def capture(self, obj: random.Random, path: str, capturing: Capturing) -> dict[str, Json]:
        del path, capturing
        return {"state": rng.encode_python(obj.getstate())}

    def restore(self, obj: random.Random, saved: Json, path: str, restoring: Restoring) -> None:
        del restoring
        with _bits_of(path):
            obj.setstate(rng.decode_python(saved["state"]))


@contextlib.contextmanager
def _bits_of(path: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = f"{path}: not the state of such a generator: {error}"
        raise StateMismatch(problem, problems=[problem]) from error


class _Container:
    """A dict or list of objects that are state; which ones is looked up anew at every save."""

    def __init__(self, name: str) -> None:
        self.name = name

    def parts(self, obj: Any, path: str) -> Iterator[tuple[str, Any]]:
        """What the objects inside yield."""
        for _, inner, at in _members(obj, path):
            yield from kind_of(inner, at).parts(inner, at)

    def capture(self, obj: Any, path: str, capturing: Capturing) -> dict[str, Json]:
        """Each object inside, under its key."""
        return {"items": [[key, capture(inner, at, capturing)] for key, inner, at in _members(obj, path)]}

    def problems(self, obj: Any, saved: Json, path: str, restoring: Restoring) -> list[str]:
        """Of each object inside, and the keys that differ."""
        found, items, here = [], dict(map(tuple, saved["items"])), set()
        for key, inner, at in _members(obj, path):
            here.add(key)
            if key in items:
                found += problems(inner, items[key], at, restoring)
            elif restoring.strict:
                found.append(f"{at}: in the program, not in the checkpoint")
        extra = [key for key in items if key not in here]
        return found + [
            f"{_at(path, key)}: in the checkpoint, not in the program" for key in extra if restoring.strict
        ]

    def restore(self, obj: Any, saved: Json, path: str, restoring: Restoring) -> None:
        """Each object inside that was saved."""
        items = dict(map(tuple, saved["items"]))
        for key, inner, at in _members(obj, path):
            if key in items:
                restore(inner, items.pop(key), at, restoring)
            else:
                restoring.skip(f"{at}: in the program, not in the checkpoint")
        for key in items:
            restoring.skip(f"{_at(path, key)}: in the checkpoint, not in the program")


def _members(obj: Any, path: str) -> Iterator[tuple[str | int, Any, str]]:
    pairs = obj.items() if isinstance(obj, dict) else enumerate(obj)
    for key, inner in pairs:
        if type(key) not in {str, int}:
            raise UnsupportedState(
                f"{path} has a key {key!r}; keys of state must be text or whole numbers", path=path
            )
        yield key, inner, _at(path, key)


def _at(path: str, key: str | int) -> str:
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


_MODULE, _OPTIMIZER, _TENSOR, _ARRAY = _Module(), _Optimizer(), _Tensor(), _Array()
_STATEFUL, _PAIR, _DICT, _LIST = _Stateful(), _Pair(), _Container("dict"), _Container("list")
_GENERATORS: tuple[tuple[type, Kind], ...] = (
    (torch.Generator, _Generator()),
    (np.random.Generator, _NumpyGenerator()),
    (np.random.RandomState, _RandomState()),
    (random.Random, _PythonRandom()),
)


def kind_of(obj: Any, path: str) -> Kind:
    """How an object is saved and restored.

    Raises:
        UnsupportedState: it is no state; says what to do instead.
    """
    if isinstance(obj, type):
        raise _refused(path, f"is the class {obj.__name__}; track an instance of it")
    if isinstance(obj, nn.Module):
        return _MODULE
    if is_optimizer(obj):
        return _OPTIMIZER
    if isinstance(obj, torch.Tensor):
        _check_tensor(obj, path)
        return _TENSOR
    if isinstance(obj, np.ndarray):
        _check_array(obj, path)
        return _ARRAY
    for generator, kind in _GENERATORS:
        if isinstance(obj, generator) and not isinstance(obj, random.SystemRandom):
            return kind
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return _STATEFUL
    if isinstance(obj, tuple) and len(obj) == 2 and all(_is_function(one) for one in obj):
        return _PAIR
    if isinstance(obj, (dict, list, tuple)):
        return _container(obj, path)
    raise _refused(path, _why_not(obj))


def _container(obj: Any, path: str) -> Kind:
    if not obj:
        raise _refused(path, f"is an empty {type(obj).__name__}; keep plain values in run.values")
    for _, inner, at in _members(obj, path):
        kind_of(inner, at)
    return _DICT if isinstance(obj, dict) else _LIST


def _is_function(obj: Any) -> bool:
    return callable(obj) and not isinstance(obj, type) and not hasattr(obj, "load_state_dict")


def _check_tensor(obj: torch.Tensor, path: str) -> None:
    if overlaps_itself(obj):
        raise _refused(
            path, "is an expanded tensor, which cannot be restored in place; track a contiguous() copy"
        )


def _check_array(obj: np.ndarray[Any, Any], path: str) -> None:
    if not obj.flags.writeable:
        raise _refused(path, "is a read-only array, which cannot be restored in place; track a copy")


def _why_not(obj: Any) -> str:
    if obj is None or isinstance(obj, (bool, int, float, complex, str, bytes, np.generic)):
        return f"is a plain value ({type(obj).__name__}); keep it in run.values"
    if callable(obj):
        return "is a function; track a (get, set) pair of callables"
    if isinstance(obj, random.SystemRandom):
        return "draws from the operating system and has no state"
    return (
        f"is a {type(obj).__name__}, which is no state; give it state_dict/load_state_dict, "
        "or track a (get, set) pair of callables"
    )


def _refused(path: str, problem: str) -> UnsupportedState:
    return UnsupportedState(f"{path} {problem}", path=path)


def capture(obj: Any, path: str, capturing: Capturing) -> Json:
    """The typed tree of any object that is state."""
    kind = kind_of(obj, path)
    return {"kind": kind.name, **kind.capture(obj, path, capturing)}


def problems(obj: Any, saved: Json, path: str, restoring: Restoring) -> list[str]:
    """Everything in which a saved object does not fit the live one; changes nothing."""
    kind = kind_of(obj, path)
    was = saved.get("kind") if isinstance(saved, Mapping) else None
    if was != kind.name:
        return [f"{path}: saved as {was}, program has {kind.name}"]
    return kind.problems(obj, saved, path, restoring)


def restore(obj: Any, saved: Json, path: str, restoring: Restoring) -> None:
    """Restore any object in place; `problems` found none."""
    kind_of(obj, path).restore(obj, saved, path, restoring)


def parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The objects that a tracked one consists of, with their paths; mostly itself."""
    return kind_of(obj, path).parts(obj, path)


def saved_parts(obj: Any, saved: Json, path: str) -> Iterator[tuple[str, Any, Json]]:
    """The same with what was saved of each; parts that were not saved are left out."""
    kind = kind_of(obj, path)
    if not isinstance(kind, _Container):
        yield path, obj, saved
        return
    items = dict(map(tuple, saved["items"]))
    for key, inner, at in _members(obj, path):
        if key in items:
            yield from saved_parts(inner, items[key], at)


def parameters(obj: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything in a tracked object that an optimizer can own, under each of its names."""
    for at, part in parts(obj, path):
        if isinstance(part, nn.Module):
            for name, parameter in named_parameters(part):
                yield f"{at}.{name}", parameter
        elif isinstance(part, torch.Tensor):
            yield at, part


__all__ = [
    "Capturing",
    "Kind",
    "capture",
    "kind_of",
    "parameters",
    "parts",
    "problems",
    "restore",
    "saved_parts",
]
