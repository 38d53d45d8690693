"""Which tracked object owns which parameter: the names that optimizer state is stored under."""

from __future__ import annotations

import gc
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spotsafe.checkpoint.strict_json import is_text
from spotsafe.errors import UnsupportedState
from spotsafe.tensors import kinds
from spotsafe.tensors.context import Capturing
from spotsafe.tensors.optimizers import is_optimizer, parameters_of
from spotsafe.tensors.tree import Collector

_SHOWN = 4


@dataclass(slots=True, kw_only=True)
class Names:
    """The names of all parameters that tracked objects hold, at one instant."""

    of: dict[int, str] = field(default_factory=dict)
    """`id` of a parameter -> the first of its names."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Each of its names -> the first."""


def find_names(objects: Mapping[str, Any]) -> Names:
    """Name every parameter of the tracked objects.

    Raises:
        UnsupportedState: two parameters would have the same name.
    """
    names, holders = Names(), dict[str, int]()
    for tracked, obj in objects.items():
        for name, parameter in kinds.parameters(obj, tracked):
            known = id(parameter)
            names.aliases[name] = names.of.setdefault(known, name)
            if holders.setdefault(name, known) != known:
                raise UnsupportedState(
                    f"two parameters are called {name}; track one object under another name"
                )
    if not is_text("".join(holders)):
        name = next(name for name in holders if not is_text(name))
        raise UnsupportedState(f"a parameter is called {name!r}, which is no text; rename it", path=name)
    _name_by_memory(objects, names)
    return names


def _name_by_memory(objects: Mapping[str, Any], names: Names) -> None:
    """Name parameters that only the `state_dict` of some other object shows, by the memory that they share."""
    parts = [part for name, obj in objects.items() for part in kinds.parts(obj, name)]
    optimizers = [part for _, part in parts if is_optimizer(part)]
    nameless = [p for one in optimizers for p in parameters_of(one) if id(p) not in names.of]
    others = [(at, part) for at, part in parts if kinds.kind_of(part, at).name in {"stateful", "pair"}]
    if not nameless or not others:
        return
    collector = Collector()
    capturing = Capturing(collector=collector, names={}, warn=lambda _: None)
    for at, part in others:
        kinds.capture(part, at, capturing)
    for parameter in nameless:
        name = collector.name_of(parameter.detach())
        if name is not None:
            names.of[id(parameter)] = name
            names.aliases[name] = name


def track_line(lost: Sequence[tuple[str, torch.Tensor]], *, taken: Container[str]) -> str:
    """What to write so that these parameters, each with its optimizer's path, have an owner."""
    optimizers = ", ".join(dict.fromkeys(path for path, _ in lost))
    shapes = ", ".join(str(list(parameter.shape)) for _, parameter in lost[:_SHOWN])
    more = ", ..." if len(lost) > _SHOWN else ""
    return (
        f"{optimizers}: {len(lost)} parameters (of shapes {shapes}{more}) are in no tracked object, "
        f"so a resume would lose them. Write: {_call([parameter for _, parameter in lost], taken)}"
    )


def _call(lost: Sequence[torch.Tensor], taken: Container[str]) -> str:
    owner = _largest_owner(lost)
    if owner is None:
        base, value = "parameter", "<the parameter>"
    else:
        kind = type(owner).__name__
        base, value = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower(), f"<the {kind}>"
    name, number = base, 1
    while name in taken or not name.isidentifier():
        number += 1
        name = f"{base if base.isidentifier() else 'module'}_{number}"
    return f"run.track({name}={value})"


def _largest_owner(lost: Sequence[torch.Tensor]) -> nn.Module | None:
    """The module of this process that holds the first of them and most parameters beside it."""
    wanted, best, most = id(lost[0]), None, 0
    for obj in gc.get_objects():
        if issubclass(type(obj), nn.Module) and "_parameters" in getattr(obj, "__dict__", {}):
            held = [id(parameter) for parameter in obj.parameters()]
            if wanted in held and len(held) > most:
                best, most = obj, len(held)
    return best
