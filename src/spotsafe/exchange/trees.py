"""From the nested values of a file of another kind to the trees of a checkpoint (docs/format.md, section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spotsafe.checkpoint.naming import is_tensor
from spotsafe.checkpoint.typed_scalars import TAG
from spotsafe.tensors.tree import Capture, Collector, Json


def capture_values(values: Mapping[str, Any]) -> Capture:
    """The state of a program that tracked `values`: a dict of tensors becomes a module, and so on; see `tree_of`.

    Raises:
        UnsupportedState: something cannot be stored; the message names its path.
    """
    collector = Collector()
    state = {name: tree_of(_encode(collector, name, value)) for name, value in values.items()}
    return Capture(state=state, tensors=collector.tensors)


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


def _encode(collector: Collector, name: str, value: Any) -> Json:
    if is_state_dict(value):
        return {key: collector.encode(tensor.detach(), f"{name}.{key}") for key, tensor in value.items()}
    return collector.members(dict(value) if isinstance(value, Mapping) else value, name)
