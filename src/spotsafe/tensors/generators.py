"""Random number generators that a user tracks, as state.

Each kind is three functions: ``capture``, ``problems`` and ``restore``, as `spotsafe.tensors.kinds.Kind`
says.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from spotsafe.errors import StateMismatch
from spotsafe.tensors import rng
from spotsafe.tensors.context import Capturing, Restoring
from spotsafe.tensors.tree import Json


def capture_torch(obj: torch.Generator, _path: str, _capturing: Capturing) -> dict[str, Json]:
    """Its device's type and its state."""
    return {"device": obj.device.type, "state": rng.encode_bytes(obj.get_state())}


def problems_of_torch(obj: torch.Generator, saved: Json, path: str, _restoring: Restoring) -> list[str]:
    """Generators of different devices have different states."""
    was, now = saved["device"], obj.device.type
    return [] if was == now else [f"{path}: saved generator of {was}, program has one of {now}"]


def restore_torch(obj: torch.Generator, saved: Json, path: str, _restoring: Restoring) -> None:
    """Set its state."""
    with _checked(path):
        obj.set_state(rng.decode_bytes(saved["state"], size=obj.get_state().numel()))


def capture_numpy(obj: np.random.Generator, _path: str, _capturing: Capturing) -> dict[str, Json]:
    """The state of its bit generator."""
    return {"state": rng.encode_bits(obj.bit_generator.state)}


def problems_of_numpy(obj: np.random.Generator, saved: Json, path: str, _restoring: Restoring) -> list[str]:
    """Bit generators of different classes have different states."""
    state, now = saved["state"], type(obj.bit_generator).__name__
    was = state.get("bit_generator") if isinstance(state, Mapping) else None
    return [] if was == now else [f"{path}: saved generator {was}, program has {now}"]


def restore_numpy(obj: np.random.Generator, saved: Json, path: str, _restoring: Restoring) -> None:
    """Set the state of its bit generator."""
    with _checked(path):
        obj.bit_generator.state = rng.decode_numpy(saved["state"])


def capture_random_state(obj: np.random.RandomState, _path: str, _capturing: Capturing) -> dict[str, Json]:
    """Its state, the cached normal deviate too."""
    return {"state": rng.encode_bits(obj.get_state(legacy=False))}


def restore_random_state(obj: np.random.RandomState, saved: Json, path: str, _restoring: Restoring) -> None:
    """Set its state."""
    state: dict[str, Any]
    with _checked(path):
        state = dict(rng.decode_numpy(saved["state"]))
        obj.set_state(state)


def capture_python(obj: random.Random, _path: str, _capturing: Capturing) -> dict[str, Json]:
    """Its state, the cached normal deviate too."""
    return {"state": rng.encode_python(obj.getstate())}


def restore_python(obj: random.Random, saved: Json, path: str, _restoring: Restoring) -> None:
    """Set its state."""
    with _checked(path):
        obj.setstate(rng.decode_python(saved["state"]))


@contextlib.contextmanager
def _checked(path: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        problem = f"{path}: not the state of such a generator: {error}"
        raise StateMismatch(problem, problems=[problem]) from error
