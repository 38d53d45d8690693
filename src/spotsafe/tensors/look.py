"""What the tensors of an object look like from outside: all that its capture depends on, but no value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch

from spotsafe.tensors.memory import CPU
from spotsafe.tensors.tree import PLAIN, STORABLE, Json, NamedTensor

PLAIN_TYPES = frozenset(PLAIN)
_STRIDED = frozenset({torch.strided})
# Calls of these cost half of what a loop in Python does, and a model has fifty thousand tensors.
_IS_NESTED, _LAYOUT = attrgetter("is_nested"), attrgetter("layout")
_DTYPE, _SHAPE, _DEVICE = attrgetter("dtype"), attrgetter("shape"), attrgetter("device")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Look:
    """All that the capture of a module depends on, and its plan; lists of one item for each part or entry.

    Of an optimizer: of its state, whose parts are what it keeps of each parameter.
    """

    prefixes: list[str]
    kinds: list[type]
    versions: list[int]
    keys: list[str]
    """As `state_dict` has them."""
    roles: list[str]
    tensors: list[torch.Tensor]
    addresses: list[int]
    dtypes: list[torch.dtype]
    shapes: list[torch.Size]
    devices: list[torch.device]

    def same_as(self, other: Look) -> bool:
        """Whether captures of the two are the same."""
        return (
            all_are(self.kinds, other.kinds)
            and all_are(self.tensors, other.tensors)
            and self.prefixes == other.prefixes
            and self.versions == other.versions
            and self.keys == other.keys
            and self.roles == other.roles
            and self.addresses == other.addresses
            and self.dtypes == other.dtypes
            and self.shapes == other.shapes
            and self.devices == other.devices
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured:
    """The capture of one module, or of the state of an optimizer."""

    look: Look
    tree: Any
    tensors: list[NamedTensor]
    names: frozenset[str]
    """Theirs."""
    places: Mapping[int, int]
    """Address -> place in `tensors`."""


def look_at_tensors(tensors: list[Any], *, types: frozenset[type], **entries: Any) -> Look | None:
    """A look at what holds these tensors; None if one of them is unusual, and needs the care of a full capture.

    Args:
        tensors: what is held, and may be anything.
        types: classes that are usual there.
        **entries: the rest of the `Look`.
    """
    # Before anything is asked of a tensor: a subclass may do what it likes.
    if not types.issuperset(map(type, tensors)) or any(map(_IS_NESTED, tensors)):
        return None
    if not _STRIDED.issuperset(map(_LAYOUT, tensors)):
        return None
    addresses, dtypes = [one.data_ptr() for one in tensors], list(map(_DTYPE, tensors))
    if 0 in addresses or not STORABLE.issuperset(dtypes):
        return None
    shapes, devices = list(map(_SHAPE, tensors)), list(map(_DEVICE, tensors))
    return Look(
        tensors=tensors, addresses=addresses, dtypes=dtypes, shapes=shapes, devices=devices, **entries
    )


def nodes_of(keys: Sequence[str], labels: Sequence[str], devices: Sequence[torch.device]) -> dict[str, Json]:
    """Key -> node of the tensor that has this label as its name."""
    nodes: dict[str, Json] = {
        key: {"$": "tensor", "name": label} for key, label in zip(keys, labels, strict=True)
    }
    if devices.count(CPU) < len(devices):
        for key, device in zip(keys, devices, strict=True):
            if device != CPU:
                nodes[key]["device"] = device.type
    return nodes


def all_are(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether two sequences hold the same objects."""
    return len(some) == len(others) and all(map(is_, some, others))
