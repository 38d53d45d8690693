"""What every kind of state is given while it is captured, compared with a checkpoint, and restored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from spotsafe.tensors.source import Source
from spotsafe.tensors.tree import Collector, Json, Spec, dtype_name, spec_of


class Known(Protocol):
    """What need not be captured in full. Each answers the tree, whose tensors the collector then has; else None."""

    def module(self, module: nn.Module, path: str, collector: Collector) -> Json | None:
        """Of a module."""

    def moments(self, entries: Sequence[tuple[str, object]], path: str, collector: Collector) -> Json | None:
        """Of what an optimizer keeps of its parameters, by their names."""


class NothingKnown:
    """Everything is captured in full."""

    def module(self, module: nn.Module, path: str, collector: Collector) -> None:
        """Not known."""

    def moments(self, entries: Sequence[tuple[str, object]], path: str, collector: Collector) -> None:
        """Not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capturing:
    """What a kind is given while an object is captured."""

    collector: Collector
    names: Mapping[int, str]
    """`id` of each parameter that a tracked object holds -> its name."""
    warn: Callable[[str], None]
    known: Known = field(default_factory=NothingKnown)


@dataclass(slots=True, kw_only=True)
class Restoring:
    """One object's restore, or its comparison only (then `source` has no tensors)."""

    source: Source
    specs: Mapping[str, Spec]
    """Dtype and shape of every saved tensor."""
    strict: bool
    names: Mapping[int, str]
    """`id` of each live parameter that a tracked object holds -> its name."""
    aliases: Mapping[str, str]
    """Every name of such a parameter (tied ones have several) -> the one in `names`."""
    warn: Callable[[str], None]
    skipped: list[str] = field(default_factory=list)
    """What did not fit and was left as it is; only without `strict`."""

    def skip(self, text: str) -> None:
        """Note something that is left as it is."""
        self.skipped.append(text)

    def describe(self, node: Json) -> str:
        """A saved value in words."""
        spec = node_spec(node, self.specs)
        if spec is not None:
            return words(*spec)
        return (
            f"a value of kind {node['$']}" if isinstance(node, Mapping) and "$" in node else "a plain value"
        )


def node_spec(node: Json, specs: Mapping[str, Spec]) -> Spec | None:
    """Dtype and shape of the tensor that a node stands for; None if it stands for something else.

    The dtype of composed tensors (sparse, subclasses) is not looked for, and empty.
    """
    if not isinstance(node, Mapping):
        return None
    if node.get("$") == "tensor":
        return specs.get(node["name"])
    if isinstance(node.get("$"), str) and node["$"].startswith(("torch.sparse", "torch.wrapper")):
        return "", tuple(node["shape"])
    return None


def words(dtype: str, shape: tuple[int, ...]) -> str:
    """Dtype and shape for people."""
    return f"{dtype or 'tensor'} {list(shape)}"


def describe(value: object) -> str:
    """A live value in words."""
    if isinstance(value, torch.Tensor):
        if torch.nn.parameter.is_lazy(value):
            return "a parameter that is not initialised yet"
        return words(dtype_name(value.dtype), tuple(value.shape))
    return f"a {type(value).__name__}"


def tensor_problems(live: object, node: Json, path: str, restoring: Restoring) -> list[str]:
    """How a live value and a saved one differ, if either is a tensor."""
    if not isinstance(live, torch.Tensor) or torch.nn.parameter.is_lazy(live):
        return []
    found = node_spec(node, restoring.specs)
    if found is None:
        return [f"{path}: {describe(live)} in the program, {restoring.describe(node)} in the checkpoint"]
    dtype, shape = spec_of(live)
    if shape == found[1] and (dtype == found[0] or found[0] == "" or not restoring.strict):
        return []
    return [f"{path}: saved {restoring.describe(node)}, program has {describe(live)}"]
