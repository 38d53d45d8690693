"""Tensors, arrays, objects with a `state_dict`, and pairs of callables as state.

Each kind is three functions: ``capture``, ``problems`` and ``restore``, as `spotsafe.tensors.kinds.Kind`
says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spotsafe.checkpoint import typed
from spotsafe.errors import StateMismatch
from spotsafe.tensors.arrays import dtype_node
from spotsafe.tensors.context import Capturing, Restoring, describe, tensor_problems
from spotsafe.tensors.inplace import copy_into
from spotsafe.tensors.tree import Json


def no_problems(_obj: Any, _saved: Json, _path: str, _restoring: Restoring) -> list[str]:
    """Nothing can be told before the object is given its state."""
    return []


def capture_tensor(obj: torch.Tensor, path: str, capturing: Capturing) -> dict[str, Json]:
    """The tensor, and whether it is trained."""
    role = "parameter" if obj.requires_grad else "buffer"
    value = capturing.collector.tensor(obj.detach(), path, role=role)
    return {"value": value, "requires_grad": obj.requires_grad}


def problems_of_tensor(obj: torch.Tensor, saved: Json, path: str, restoring: Restoring) -> list[str]:
    """Dtype and shape."""
    return tensor_problems(obj, saved["value"], path, restoring)


def restore_tensor(obj: torch.Tensor, saved: Json, path: str, restoring: Restoring) -> None:
    """Copy into the tensor."""
    value = restoring.source.decode(saved["value"], obj.detach(), path=path)
    try:
        copy_into(obj, value)
    except RuntimeError as error:
        problem = f"{path}: torch cannot restore {describe(obj)} in place: {error}"
        raise StateMismatch(problem, problems=[problem]) from error
    if obj.requires_grad is not saved["requires_grad"]:
        was, now = saved["requires_grad"], obj.requires_grad
        restoring.warn(f"{path} was saved with requires_grad={was}, and has requires_grad={now} now")


def capture_array(obj: np.ndarray[Any, Any], path: str, capturing: Capturing) -> dict[str, Json]:
    """The array."""
    return {"value": capturing.collector.encode(obj, path)}


def problems_of_array(obj: np.ndarray[Any, Any], saved: Json, path: str, _restoring: Restoring) -> list[str]:
    """Dtype and shape."""
    was, now = (saved["value"]["dtype"], saved["value"]["shape"]), (dtype_node(obj.dtype), list(obj.shape))
    return [] if was == now else [f"{path}: saved array {was[0]} {was[1]}, program has {now[0]} {now[1]}"]


def restore_array(obj: np.ndarray[Any, Any], saved: Json, path: str, restoring: Restoring) -> None:
    """Copy into the array."""
    obj[...] = restoring.source.decode(saved["value"], path=path)


def capture_stateful(obj: Any, path: str, capturing: Capturing) -> dict[str, Json]:
    """What its `state_dict` returns."""
    return {"state": capturing.collector.members(obj.state_dict(), path)}


def restore_stateful(obj: Any, saved: Json, path: str, restoring: Restoring) -> None:
    """Hand it to its `load_state_dict`."""
    state = restoring.source.decode(saved["state"], _present(obj.state_dict), path=path)
    try:
        obj.load_state_dict(state)
    except Exception as error:
        problem = f"{path} refused its saved state: {type(error).__name__}: {error}"
        raise StateMismatch(problem, problems=[problem]) from error


def capture_pair(obj: Any, path: str, capturing: Capturing) -> dict[str, Json]:
    """What the first callable returns."""
    return {"state": capturing.collector.members(obj[0](), path)}


def restore_pair(obj: Any, saved: Json, path: str, restoring: Restoring) -> None:
    """Hand it to the second callable."""
    obj[1](restoring.source.decode(saved["state"], _present(obj[0]), path=path))


def _present(get: Callable[[], object]) -> object:
    """The object's state now, which only lends classes and devices; one that has none yet is fine."""
    with contextlib.suppress(Exception):
        return get()
    return typed.MISSING
