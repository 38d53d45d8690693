"""From a checkpoint's typed JSON and tensors back to values, in memory of their own.

What an object gets here it may keep, change or empty: nothing is shared with another object, nor with the files'
memory, which is freed as soon as the restore is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spotsafe.checkpoint import typed
from spotsafe.errors import StateMismatch
from spotsafe.tensors.tree import COMPRESSED, PLAIN, WORDS, Json, as_bytes, clone


class Source:
    """Rebuilds the values of a saved state, for one object.

    What `decode` and `tensor` return is a copy that the object may keep and change; aliases inside it stay aliases.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, on_cpu: bool = False) -> None:
        self._tensors, self._on_cpu = tensors, on_cpu
        self._copies: dict[tuple[str, torch.device], torch.Tensor] = {}

    def decode(self, node: Json, live: object = typed.MISSING) -> Any:
        """The value of a typed tree. `live` is the object's value now: devices and classes follow it."""
        if isinstance(node, Mapping) and node.get("$") == "tensor":
            return self._leaf(node, live)
        return typed.decode(node, leaf=self._leaf, live=live)

    def on_cpu(self) -> Source:
        """The same, but every tensor stays on the CPU whatever it was on."""
        return Source(self._tensors, on_cpu=True)

    def view(self, name: str) -> torch.Tensor:
        """The saved tensor itself, only to be copied from.

        Raises:
            StateMismatch: the checkpoint has no tensor of this name.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise StateMismatch(f"the checkpoint refers to a tensor {name!r} that it does not hold") from None

    def _tensor(self, node: Mapping[str, Json], live: object) -> torch.Tensor:
        name, device = node["name"], torch.device("cpu") if self._on_cpu else _device(node, live)
        copy = self._copies.get((name, device))
        if copy is None:
            copy = clone(self.view(name)).to(device)
            self._copies[name, device] = copy
        return copy

    def _leaf(self, node: Mapping[str, Json], live: object = typed.MISSING, path: str = "") -> Any:
        tag = node["$"]
        if tag == "tensor":
            value = self._tensor(node, live)
            kind = type(live)
            # A subclass that has memory of its own was saved as plain values; the live object says which class.
            plain = not isinstance(live, torch.Tensor) or kind in PLAIN or is_traceable_wrapper_subclass(live)
            return value if plain else value.as_subclass(kind)
        if tag == "ndarray":
            return self._array(node)
        if tag == "torch.wrapper":
            return self._wrapper(node, live, path)
        if tag == "torch.sparse_coo":
            return self._sparse(node)
        if tag == "torch.device":
            return torch.device(node["value"])
        if tag == "torch.Size":
            return torch.Size(node["value"])
        if tag in WORDS:
            word = getattr(torch, node["value"], None)
            if isinstance(word, WORDS[tag]):
                return word
        for layout, names in COMPRESSED.items():
            if tag == str(layout):
                parts = [self.decode(node[name]) for name in (*names, "values")]
                return torch.sparse_compressed_tensor(
                    *parts, node["shape"], layout=layout, check_invariants=True
                )
        return NotImplemented

    def _sparse(self, node: Mapping[str, Json]) -> torch.Tensor:
        return torch.sparse_coo_tensor(
            self.decode(node["indices"]),
            self.decode(node["values"]),
            node["shape"],
            is_coalesced=node["coalesced"],
            check_invariants=True,
        )

    def _array(self, node: Mapping[str, Json]) -> np.ndarray[Any, Any]:
        values = self.view(node["values"]["name"])
        dtype, shape = np.dtype(node["dtype"]), tuple(node["shape"])
        if dtype.hasobject or values.numel() * values.element_size() != math.prod(shape) * dtype.itemsize:
            raise StateMismatch(f"the checkpoint holds no array of {dtype} and shape {shape}")
        array = np.empty(shape, dtype=dtype)
        array.reshape(-1).view(np.uint8)[...] = as_bytes(values).numpy()
        return array

    def _wrapper(self, node: Mapping[str, Json], live: object, path: str) -> Any:
        if not (isinstance(live, torch.Tensor) and is_traceable_wrapper_subclass(live)):
            raise StateMismatch(
                f"{path}: the checkpoint holds a tensor subclass, which is rebuilt only in the place of a live one; "
                f"found {type(live).__name__} there"
            )
        inner = {name: self.decode(part, getattr(live, name, typed.MISSING)) for name, part in node["inner"]}
        context = self.decode(node["context"], live.__tensor_flatten__()[1])
        size, stride = torch.Size(node["shape"]), tuple(node["stride"])
        unflatten: Callable[..., Any] = type(live).__tensor_unflatten__
        return unflatten(inner, context, size, stride)


def _device(node: Mapping[str, Json], live: object) -> torch.device:
    if isinstance(live, torch.Tensor) and not live.is_meta:
        return live.device
    if node.get("device") == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
