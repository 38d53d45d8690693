"""State of optimizers in the forms in which torch's own tools keep it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spotsafe.tensors.tree import Json

Decode = Callable[[Json], Any]


def is_optimizer_tree(tree: Json) -> bool:
    """Whether a tree of a checkpoint is that of an optimizer, by the names of its parameters."""
    return isinstance(tree, Mapping) and tree.get("kind") == "optimizer" and tree.get("form") == "by name"


def by_position(tree: Mapping[str, Json], decode: Decode, *, modules: Sequence[str]) -> dict[str, Any]:
    """As `torch.optim.Optimizer.state_dict()`: parameters are numbered over all groups."""
    del modules  # numbers know of no names
    numbers = {name: at for at, name in enumerate(name for names in tree["order"] for name in names)}
    groups = []
    for names, options in zip(tree["order"], tree["groups"], strict=True):
        groups.append({**decode(options), "params": [numbers[name] for name in names]})
    state = {numbers[name]: decode(node) for name, node in tree["state"]}
    return {"state": {**state, **decode(tree["shared"])}, "param_groups": groups, **decode(tree["extra"])}


def by_name(tree: Mapping[str, Json], decode: Decode, *, modules: Sequence[str]) -> dict[str, Any]:
    """As `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`: parameters by name in their module."""
    groups = [
        {**decode(options), "params": [in_module(name, modules) for name in names]}
        for names, options in zip(tree["order"], tree["groups"], strict=True)
    ]
    state = {in_module(name, modules): decode(node) for name, node in tree["state"]}
    return {"state": {**state, **decode(tree["shared"])}, "param_groups": groups}


def in_module(name: str, modules: Sequence[str]) -> str:
    """A parameter's name without that of the tracked module that it is in."""
    owner = next((module for module in modules if name.startswith(f"{module}.")), None)
    return name if owner is None else name[len(owner) + 1 :]
