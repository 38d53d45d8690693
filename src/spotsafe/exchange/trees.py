"""From the nested values of a file of another kind to the trees of a checkpoint (docs/format.md, section 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spotsafe.checkpoint.naming import is_tensor
from spotsafe.checkpoint.typed_scalars import TAG
from spotsafe.exchange.parameter_order import numbers_of
from spotsafe.tensors.tree import Capture, Collector, Json

Order = Sequence[Sequence[str]]
"""The names of an optimizer's parameters, for each of its groups."""


def capture_values(values: Mapping[str, Any], *, orders: Mapping[str, Order] | None = None) -> Capture:
    """The state of a program that tracked `values`: a dict of tensors becomes a module, and so on; see `tree_of`.

    Args:
        values: objects by name.
        orders: the names of the parameters of those which are state of an optimizer, where they are known.

    Raises:
        UnsupportedState: something cannot be stored; the message names its path.
    """
    collector, orders = Collector(), orders or {}
    # Optimizers last: a tensor that is also elsewhere is called after its owner.
    state = {
        name: _optimizer(collector, name, values[name], orders[name])
        if name in orders
        else tree_of(_encode(collector, name, values[name]))
        for name in sorted(values, key=lambda name: name in orders)
    }
    return Capture(state={name: state[name] for name in values}, tensors=collector.tensors)


def tree_of(node: Json) -> dict[str, Json]:
    """What kind of object typed JSON was saved of, as far as it tells.

    A dict that holds nothing but tensors is what a module's `state_dict` looks like, one tensor is a tensor, any
    other dict is the state of an object with a `state_dict`, and the rest are plain values.
    """
    if is_tensor(node):
        return {"kind": "tensor", "value": node, "requires_grad": False}
    if type(node) is not dict or (TAG in node and node[TAG] not in {"dict", "ordered_dict"}):
        return {"kind": "value", "value": node}
    if node and TAG not in node and all(map(is_tensor, node.values())):
        return {"kind": "module", "state": node, "frozen": None, "metadata": {}}
    return {"kind": "stateful", "state": node}


def is_state_dict(value: object) -> bool:
    """Whether a value is a dict of named tensors, as a module's `state_dict` is."""
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(isinstance(key, str) and key != TAG for key in value)
        and all(isinstance(one, torch.Tensor) for one in value.values())
    )


def _optimizer(collector: Collector, name: str, saved: Mapping[str, Any], order: Order) -> dict[str, Json]:
    """State of an optimizer under the names of its parameters, as a session stores it; its class is not known."""
    keys = [key for one in numbers_of(saved) for key in one]
    named = dict(zip(keys, (one for names in order for one in names), strict=True))
    own = {str(key): value for key, value in saved["state"].items() if str(key) in named}
    shared = {key: value for key, value in saved["state"].items() if str(key) not in named}
    extra = {key: value for key, value in saved.items() if key not in {"state", "param_groups"}}
    groups = [
        {key: value for key, value in one.items() if key not in {"params", "param_names"}}
        for one in saved["param_groups"]
    ]
    return {
        "kind": "optimizer",
        "class": None,
        "order": [list(names) for names in order],
        "form": "by name",
        "groups": [collector.encode(one, f"{name}.param_groups[{at}]") for at, one in enumerate(groups)],
        "state": [
            [named[key], collector.members(value, f"{name}.{named[key]}", role="moment")]
            for key, value in own.items()
        ],
        "shared": collector.encode(shared, f"{name}.state", role="moment"),
        "extra": collector.encode(extra, name),
        "on_host": [],
    }


def _encode(collector: Collector, name: str, value: Any) -> Json:
    if is_state_dict(value):
        return {key: collector.encode(tensor.detach(), f"{name}.{key}") for key, tensor in value.items()}
    return collector.members(dict(value) if isinstance(value, Mapping) else value, name)
