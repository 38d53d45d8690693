"""What can be state: finds out how an object is saved, compared and restored, or says what is wrong with it.

A saved object is ``{"kind": <name of its kind>, ...}``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from spotsafe.checkpoint.strict_json import is_text
from spotsafe.checkpoint.typed_values import key_text
from spotsafe.errors import UnsupportedState
from spotsafe.tensors import generators, modules, optimizers, simple
from spotsafe.tensors.context import Capturing, Restoring
from spotsafe.tensors.forms import form_problem
from spotsafe.tensors.optimizers import is_optimizer
from spotsafe.tensors.tree import Json, overlaps_itself

MAX_DEPTH = 32
"""Tracked dicts and lists inside each other; each takes three levels of JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of state. The path of an object is its tracked name, and the way inside it."""

    name: str
    capture: Callable[[Any, str, Capturing], dict[str, Json]]
    """``capture(obj, path, capturing)``: the typed tree, without the member ``kind``."""
    problems: Callable[[Any, Json, str, Restoring], list[str]] = simple.no_problems
    """``problems(obj, saved, path, restoring)``: everything that does not fit; changes nothing."""
    restore: Callable[[Any, Json, str, Restoring], None]
    """``restore(obj, saved, path, restoring)``: in place, after `problems` found none."""


_MODULE = Kind(
    name="module",
    capture=modules.capture_module,
    problems=modules.module_problems,
    restore=modules.restore_module,
)
_OPTIMIZER = Kind(
    name="optimizer",
    capture=optimizers.capture_optimizer,
    problems=optimizers.optimizer_problems,
    restore=optimizers.restore_optimizer,
)
_TENSOR = Kind(
    name="tensor",
    capture=simple.capture_tensor,
    problems=simple.problems_of_tensor,
    restore=simple.restore_tensor,
)
_ARRAY = Kind(
    name="array",
    capture=simple.capture_array,
    problems=simple.problems_of_array,
    restore=simple.restore_array,
)
_STATEFUL = Kind(name="stateful", capture=simple.capture_stateful, restore=simple.restore_stateful)
_PAIR = Kind(name="pair", capture=simple.capture_pair, restore=simple.restore_pair)
_GENERATORS: Mapping[type, Kind] = {
    torch.Generator: Kind(
        name="torch.Generator",
        capture=generators.capture_torch,
        problems=generators.problems_of_torch,
        restore=generators.restore_torch,
    ),
    np.random.Generator: Kind(
        name="numpy.Generator",
        capture=generators.capture_numpy,
        problems=generators.problems_of_numpy,
        restore=generators.restore_numpy,
    ),
    np.random.RandomState: Kind(
        name="numpy.RandomState",
        capture=generators.capture_random_state,
        restore=generators.restore_random_state,
    ),
    random.Random: Kind(
        name="random.Random", capture=generators.capture_python, restore=generators.restore_python
    ),
}

_CLASSES = {nn.Module: _MODULE, torch.Tensor: _TENSOR, np.ndarray: _ARRAY, **_GENERATORS}


def kind_of(obj: Any, path: str, *, depth: int = 0) -> Kind:
    """How an object is saved and restored; `depth` counts the dicts and lists around it.

    Raises:
        UnsupportedState: it is no state; says what to do instead.
    """
    kind = None if isinstance(obj, (type, random.SystemRandom)) else _find(obj)
    problem = _why_not(obj) if kind is None else _flaw(obj)
    if kind is None or problem:
        raise UnsupportedState(f"{path} {problem}", path=path)
    if kind is _DICT or kind is _LIST:
        if depth >= MAX_DEPTH:
            raise UnsupportedState(
                f"{path[:200]} lies in more than {MAX_DEPTH} dicts and lists of state (or in itself); "
                "track what is in them by names",
                path=path,
            )
        for _, inner, at in _members(obj, path):
            kind_of(inner, at, depth=depth + 1)
    return kind


def _find(obj: Any) -> Kind | None:
    for known, kind in _CLASSES.items():
        if isinstance(obj, known):
            return kind
    if is_optimizer(obj):
        return _OPTIMIZER
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return _STATEFUL
    return _find_container(obj)


def _find_container(obj: Any) -> Kind | None:
    if isinstance(obj, tuple) and len(obj) == 2 and all(_is_function(one) for one in obj):
        return _PAIR
    if isinstance(obj, dict):
        return _DICT
    return _LIST if isinstance(obj, (list, tuple)) else None


def _is_function(obj: Any) -> bool:
    return callable(obj) and not isinstance(obj, type) and not hasattr(obj, "load_state_dict")


def _flaw(obj: Any) -> str:
    """Why an object of a right kind cannot be restored in place; empty if it can."""
    if isinstance(obj, torch.Tensor) and overlaps_itself(obj):
        return "is an expanded tensor, which cannot be restored in place; track a contiguous() copy"
    if isinstance(obj, np.ndarray) and not obj.flags.writeable:
        return "is a read-only array, which cannot be restored in place; track a copy"
    if isinstance(obj, (dict, list, tuple)) and not obj:
        return f"is an empty {type(obj).__name__}; keep plain values in run.values"
    return ""


def _why_not(obj: Any) -> str:
    if obj is None:
        return "is None, which is no state; leave it out"
    if isinstance(obj, (bool, int, float, complex, str, bytes, np.generic)):
        return f"is a plain value ({type(obj).__name__}); keep it in run.values"
    if isinstance(obj, type):
        return f"is the class {obj.__name__}; track an instance of it"
    if isinstance(obj, random.SystemRandom):
        return "draws from the operating system and has no state"
    if callable(obj):
        return "is a function; track a (get, set) pair of callables"
    return (
        f"is a {type(obj).__name__}, which is no state; give it state_dict/load_state_dict, "
        "or track a (get, set) pair of callables"
    )


# -- dicts and lists of objects; which ones is looked up anew at every save ----------------------------------------


def _members(obj: Any, path: str) -> Iterator[tuple[str | int, Any, str]]:
    pairs = obj.items() if isinstance(obj, dict) else enumerate(obj)
    for key, inner in pairs:
        if not (type(key) is int and abs(key) < 1 << 63) and not (type(key) is str and is_text(key)):
            raise UnsupportedState(
                f"{path} has a key {key_text(key)[:80]}; keys of state must be text or whole numbers",
                path=path,
            )
        yield key, inner, _at(path, key)


def _at(path: str, key: str | int) -> str:
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


def _capture_items(obj: Any, path: str, capturing: Capturing) -> dict[str, Json]:
    return {"items": [[key, capture(inner, at, capturing)] for key, inner, at in _members(obj, path)]}


def _problems_of_items(obj: Any, saved: Json, path: str, restoring: Restoring) -> list[str]:
    found, items = [], _saved_items(saved)
    for key, inner, at in _members(obj, path):
        if key in items:
            found += problems(inner, items.pop(key), at, restoring)
        elif restoring.strict:
            found.append(f"{at}: in the program, not in the checkpoint")
    if restoring.strict:
        found += [f"{_at(path, key)}: in the checkpoint, not in the program" for key in items]
    return found


def _restore_items(obj: Any, saved: Json, path: str, restoring: Restoring) -> None:
    items = _saved_items(saved)
    for key, inner, at in _members(obj, path):
        if key in items:
            restore(inner, items.pop(key), at, restoring)
        else:
            restoring.skip(f"{at}: in the program, not in the checkpoint")
    for key in items:
        restoring.skip(f"{_at(path, key)}: in the checkpoint, not in the program")


def _saved_items(saved: Json) -> dict[str | int, Json]:
    return dict(map(tuple, saved["items"]))


_DICT = Kind(name="dict", capture=_capture_items, problems=_problems_of_items, restore=_restore_items)
_LIST = Kind(name="list", capture=_capture_items, problems=_problems_of_items, restore=_restore_items)


# -- any object ------------------------------------------------------------------------------------------------


def capture(obj: Any, path: str, capturing: Capturing) -> Json:
    """The typed tree of any object that is state."""
    kind = kind_of(obj, path)
    known = capturing.known.module(obj, path, capturing.collector) if kind is _MODULE else None
    return known if known is not None else {"kind": kind.name, **kind.capture(obj, path, capturing)}


def problems(obj: Any, saved: Json, path: str, restoring: Restoring) -> list[str]:
    """Everything in which a saved object does not fit the live one; changes nothing."""
    kind = kind_of(obj, path)
    was = saved.get("kind") if isinstance(saved, Mapping) else None
    if was != kind.name:
        nameless = (was, kind.name) == (
            "stateful",
            "optimizer",
        )  # or the program had something of its own there
        why = "; was it imported without the names of its parameters?" if nameless else ""
        return [f"{path}: saved as {was}, program has {kind.name}{why}"]
    wrong = form_problem(kind.name, saved)
    if wrong is not None:
        return [f"{path}: the checkpoint holds no proper {kind.name} there: {wrong}"]
    return kind.problems(obj, saved, path, restoring)


def restore(obj: Any, saved: Json, path: str, restoring: Restoring) -> None:
    """Restore any object in place; `problems` found none."""
    kind_of(obj, path).restore(obj, saved, path, restoring)


def parts(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The objects that a tracked one consists of, with their paths; mostly itself."""
    kind = kind_of(obj, path)
    if kind is not _DICT and kind is not _LIST:
        yield path, obj
        return
    for _, inner, at in _members(obj, path):
        yield from parts(inner, at)


def saved_parts(obj: Any, saved: Json, path: str) -> Iterator[tuple[str, Any, Json]]:
    """The same with what was saved of each; parts that were not saved are left out."""
    if kind_of(obj, path) not in {_DICT, _LIST}:
        yield path, obj, saved
        return
    items = _saved_items(saved)
    for key, inner, at in _members(obj, path):
        if key in items:
            yield from saved_parts(inner, items[key], at)


def parameters(obj: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything in a tracked object that an optimizer can own, under each of its names."""
    for at, part in parts(obj, path):
        if isinstance(part, nn.Module):
            for name, parameter in modules.named_parameters(part):
                yield f"{at}.{name}", parameter
        elif isinstance(part, torch.Tensor):
            yield at, part
