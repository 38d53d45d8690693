"""Which parameter the state of a foreign optimizer belongs to.

torch numbers parameters in the order in which the optimizer was given them, which only the program knows. Some files
have names beside the numbers. Without them nothing is guessed: shapes alone do not tell two layers of one size apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

Modules = Mapping[str, Mapping[str, torch.Tensor]]
"""The state_dicts of a file, by name."""


class UnknownOrder(ValueError):
    """Why it is not known which parameter a number means."""


def is_optimizer_state(value: object) -> bool:
    """Whether a value looks like what `torch.optim.Optimizer.state_dict()` returns."""
    if not isinstance(value, Mapping) or not isinstance(value.get("state"), Mapping):
        return False
    groups = value.get("param_groups")
    if not isinstance(groups, list) or not groups:
        return False
    if not all(isinstance(one, Mapping) and isinstance(one.get("params"), list) for one in groups):
        return False
    keys = {key for one in numbers_of(value) for key in one}
    return all(isinstance(one, Mapping) for key, one in value["state"].items() if str(key) in keys)


def parameter_names(saved: Mapping[str, Any], modules: Modules, *, like: str | None) -> list[list[str]]:
    """The names of an optimizer's parameters, for each of its groups.

    They are known if the file has them: as keys, which is what torch.distributed.checkpoint makes of an optimizer,
    or as ``param_names``, of an optimizer that was made of `named_parameters()`.

    Args:
        saved: what its `state_dict()` returned.
        modules: the modules that may own the parameters.
        like: somebody's word that each group has its parameters in the order of this module's state_dict, which has
            no buffers. It is refused where a shape or the number of tensors contradicts it, and where shapes do not
            tell which of several groups a tensor is in.

    Raises:
        UnknownOrder: it is not known, with the reason.
    """
    names = _named(saved["param_groups"])
    if names is not None:
        return _owned(names, saved, modules, like=like)
    if like is None:
        raise UnknownOrder(
            "it has numbers for parameters, and the file does not say which parameter is which"
        )
    if like not in modules:
        raise UnknownOrder(f"there is no module {like!r} in the file")
    return _in_order(saved, {like: modules[like]})


def strip_names(saved: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The same state with `prefix` left out at the beginning of every name of a parameter in it."""

    def short(key: Any) -> Any:
        return key.removeprefix(prefix) if isinstance(key, str) else key

    groups = [
        {
            key: list(map(short, one)) if key in {"params", "param_names"} and one else one
            for key, one in group.items()
        }
        for group in saved["param_groups"]
    ]
    return {
        **saved,
        "state": {short(key): one for key, one in saved["state"].items()},
        "param_groups": groups,
    }


def numbers_of(saved: Mapping[str, Any]) -> list[list[str]]:
    """The keys under which each group's parameters have their state, as text: some tools make text of numbers."""
    return [[str(key) for key in group["params"]] for group in saved["param_groups"]]


def _named(groups: Sequence[Mapping[str, Any]]) -> list[list[str]] | None:
    keys = [group["params"] for group in groups]
    if all(isinstance(key, str) for one in keys for key in one):
        return [list(one) for one in keys]
    names = [group.get("param_names") for group in groups]
    for one, beside in zip(names, keys, strict=True):
        if not isinstance(one, list) or len(one) != len(beside):
            return None
        if not all(isinstance(name, str) for name in one):
            return None
    return [list(one) for one in names if one is not None]


def _owned(
    names: list[list[str]], saved: Mapping[str, Any], modules: Modules, *, like: str | None
) -> list[list[str]]:
    flat = [name for one in names for name in one]
    if len(set(flat)) != len(flat):
        raise UnknownOrder("it names a parameter twice")
    owners = [name for name, tensors in modules.items() if all(one in tensors for one in flat)]
    owners = [like] if like in owners else owners
    if not owners:
        lost = next((one for one in flat if not any(one in tensors for tensors in modules.values())), flat[0])
        raise UnknownOrder(f"it names parameters, such as {lost!r}, that no module of the file has")
    if len(owners) > 1:
        raise UnknownOrder(f"its parameters may be those of {' or '.join(owners)}")
    shapes, tensors = _shapes(saved), modules[owners[0]]
    for group, keys in zip(names, numbers_of(saved), strict=True):
        for name, key in zip(group, keys, strict=True):
            if not _fits(shapes.get(key), tensors[name]):
                raise UnknownOrder(f"its state of {name} has not the shape {list(tensors[name].shape)}")
    return [[f"{owners[0]}.{name}" for name in one] for one in names]


def _in_order(saved: Mapping[str, Any], module: Modules) -> list[list[str]]:
    """Deal the module's tensors to the groups in their order; each goes to the one group whose next it fits."""
    ((owner, state_dict),) = module.items()
    tensors, keys, shapes = _distinct(state_dict), numbers_of(saved), _shapes(saved)
    count = sum(map(len, keys))
    if count != len(tensors):
        raise UnknownOrder(
            f"it has {count} parameters, and {owner} {len(tensors)} tensors; a file does not tell buffers from "
            "parameters"
        )
    names: list[list[str]] = [[] for _ in keys]
    for name, tensor in tensors.items():
        free = [at for at, one in enumerate(keys) if len(names[at]) < len(one)]
        fitting = [at for at in free if _fits(shapes.get(keys[at][len(names[at])]), tensor)]
        if not fitting:
            raise UnknownOrder(
                f"no state that would be next has the shape of {owner}.{name}, {list(tensor.shape)}"
            )
        if len(fitting) > 1:
            raise UnknownOrder(f"{owner}.{name} fits into {len(fitting)} of its parameter groups")
        names[fitting[0]].append(f"{owner}.{name}")
    return names


def _shapes(saved: Mapping[str, Any]) -> dict[str, set[torch.Size]]:
    """Key of each parameter -> shapes of its state, counters aside; empty if there is nothing to go by."""
    return {
        str(key): {one.shape for one in value.values() if isinstance(one, torch.Tensor) and one.dim()}
        for key, value in saved["state"].items()
        if isinstance(value, Mapping)
    }


def _fits(shapes: set[torch.Size] | None, tensor: torch.Tensor) -> bool:
    return not shapes or tensor.shape in shapes


def _distinct(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the further names of tied tensors, which are one parameter."""
    found: dict[object, tuple[str, torch.Tensor]] = {}
    for name, tensor in state_dict.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name
        found.setdefault(place, (name, tensor))
    return dict(found.values())
