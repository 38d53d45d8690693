"""What a capture says of the state that an optimizer keeps of its parameters, kept for the next one.

Such state is mostly plain tensors under plain words, and the same ones from save to save. As long as they look the same
(`Look`), so does their part of the capture. Options of groups are no part of it: schedulers change them at every step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spotsafe.checkpoint.strict_json import is_text
from spotsafe.tensors.look import Captured, Look, look_at_tensors, nodes_of
from spotsafe.tensors.tree import Collector, Json, NamedTensor

_TYPES = frozenset({torch.Tensor})


class KeptMoments:
    """The state of each optimizer in the last capture, as far as the next one may be the same."""

    def __init__(self) -> None:
        self._last: dict[str, Captured] = {}
        self._now: dict[str, Captured] = {}

    def begin(self) -> None:
        """A new capture begins: let go of what the last one did not meet."""
        self._last, self._now = self._now, {}

    def tree(self, entries: Sequence[tuple[str, object]], path: str, collector: Collector) -> Json | None:
        """The typed tree, whose tensors the collector then has; None if it must be captured in full.

        Args:
            entries: name of each parameter, and what is kept of it.
            path: of the optimizer.
            collector: of this capture.
        """
        look = _look_at(entries)
        if look is None:
            return None
        captured = self._last.get(path)
        if captured is None or not look.same_as(captured.look):
            captured = _capture(look, path)
        if captured is None or not collector.adopt(captured.tensors, captured.names, captured.places):
            return None
        self._now[path] = captured
        return captured.tree


def _look_at(entries: Sequence[tuple[str, object]]) -> Look | None:
    """What there is to see; None if something in it is no plain tensor of its own."""
    names, keys, tensors = [name for name, _ in entries], list[str](), list[Any]()
    plain: set[tuple[object, ...]] = set()
    for name, held in entries:
        if type(held) is not dict:
            return None
        words = tuple(held)
        if words not in plain:  # mostly the same ones of every parameter
            if not all(type(key) is str and key.isidentifier() for key in words):
                return None
            plain.add(words)
        keys += [f"{name}.{key}" for key in held]
        tensors += held.values()
    look = look_at_tensors(
        tensors, types=_TYPES, prefixes=names, kinds=[], versions=[], keys=keys, roles=["moment"] * len(keys)
    )
    return None if look is None or any(one.requires_grad for one in tensors) else look


def _capture(look: Look, path: str) -> Captured | None:
    """The capture of a look; None if its names need the care of a full one."""
    if not is_text("".join(look.keys)):
        return None
    if len(set(look.keys)) != len(look.keys) or len(set(look.addresses)) != len(look.keys):
        return None  # whether two are aliases is for the collector to say
    labels = [f"{path}.{key}" for key in look.keys]
    nodes = nodes_of(look.keys, labels, look.devices)
    return Captured(
        look=look,
        tree=_by_parameter(look, nodes),
        tensors=list(map(NamedTensor, labels, look.tensors, look.roles)),
        names=frozenset(labels),
        places={address: at for at, address in enumerate(look.addresses)},
    )


def _by_parameter(look: Look, nodes: Mapping[str, Json]) -> list[list[Json]]:
    found: dict[str, dict[str, Json]] = {name: {} for name in look.prefixes}
    for key in look.keys:
        name, _, word = key.rpartition(".")
        found[name][word] = nodes[key]
    return [[name, held] for name, held in found.items()]
