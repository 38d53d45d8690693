"""State of optimizers in the forms in which torch's own tools keep it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spotsafe.tensors.tree import Json


def is_optimizer_tree(tree: Json) -> bool:
    """Whether a tree of a checkpoint is that of an optimizer, by the names of its parameters."""
    return isinstance(tree, Mapping) and tree.get("kind") == "optimizer" and tree.get("form") == "by name"


def parts_of(tree: Mapping[str, Json]) -> dict[str, Json]:
    """The members that hold values, as one node to be decoded at once."""
    return {member: tree[member] for member in ("groups", "state", "shared", "extra")}


def by_position(order: Sequence[Sequence[str]], parts: Mapping[str, Any]) -> dict[str, Any]:
    """As `torch.optim.Optimizer.state_dict()`: parameters are numbered over all groups.

    Args:
        order: the member of the tree.
        parts: what `parts_of` gave, decoded.
    """
    numbers = {name: at for at, name in enumerate(name for names in order for name in names)}
    groups = [
        {**options, "params": [numbers[name] for name in names]}
        for names, options in zip(order, parts["groups"], strict=True)
    ]
    state = {numbers[name]: value for name, value in parts["state"]}
    return {"state": {**state, **parts["shared"]}, "param_groups": groups, **parts["extra"]}


def by_name(
    order: Sequence[Sequence[str]], parts: Mapping[str, Any], *, modules: Sequence[str]
) -> dict[str, Any]:
    """As `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`: parameters by name in their module.

    Args:
        order: the member of the tree.
        parts: what `parts_of` gave, decoded.
        modules: names of the tracked modules.
    """
    groups = [
        {**options, "params": [in_module(name, modules) for name in names]}
        for names, options in zip(order, parts["groups"], strict=True)
    ]
    state = {in_module(name, modules): value for name, value in parts["state"]}
    return {"state": {**state, **parts["shared"]}, "param_groups": groups}


def in_module(name: str, modules: Sequence[str]) -> str:
    """A parameter's name without that of the tracked module that it is in."""
    owner = next((module for module in modules if name.startswith(f"{module}.")), None)
    return name if owner is None else name[len(owner) + 1 :]
