"""From a checkpoint's typed JSON and tensors back to values, in memory of their own.

What an object gets here it may keep, change or empty: nothing is shared with another object, nor with the
files' memory, which is freed as soon as the restore is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from spotsafe.checkpoint import typed
from spotsafe.errors import StateMismatch
from spotsafe.tensors.tree import COMPRESSED, PLAIN, WORDS, Json, as_bytes, clone, is_wrapper

_Word = TypeVar("_Word")


class Source:
    """Rebuilds the values of a saved state, for one object.

    What `decode` and `tensor` return is a copy that the object may keep and change; aliases inside it stay
    aliases.

    Args:
        tensors: what the checkpoint holds, by name.
        on_cpu: leave every tensor on the CPU, whatever it was on.
        copy: whether the values get memory of their own; not needed for tensors that nobody else has.
        lenient: give an `Unbound` for an Enum or a dataclass without a live counterpart instead of an error.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        on_cpu: bool = False,
        copy: bool = True,
        lenient: bool = False,
    ) -> None:
        self._tensors, self._on_cpu, self._lenient, self._copy = tensors, on_cpu, lenient, copy
        self._copies: dict[tuple[str, torch.device], torch.Tensor] = {}

    def decode(self, node: Json, live: object = typed.MISSING) -> Any:
        """The value of a typed tree. `live` is the object's value now: devices and classes follow it."""
        if isinstance(node, Mapping) and node.get("$") == "tensor":
            return self._leaf(node, live)
        return typed.decode(node, leaf=self._leaf, live=live, lenient=self._lenient)

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
            copy = (clone(self.view(name)) if self._copy else self.view(name)).to(device)
            self._copies[name, device] = copy
        return copy

    def _leaf(self, node: Mapping[str, Json], live: object = typed.MISSING, path: str = "") -> Any:
        tag = node["$"]
        if tag == "tensor":
            return _in_class(self._tensor(node, live), live)
        if tag == "torch.wrapper":
            return self._wrapper(node, live, path)
        build = _BUILDERS.get(tag)
        return NotImplemented if build is None else build(self, node)

    def sparse_coo(self, node: Mapping[str, Json]) -> torch.Tensor:
        """A sparse tensor in coordinate form, coalesced or not as it was."""
        return torch.sparse_coo_tensor(
            self.decode(node["indices"]),
            self.decode(node["values"]),
            node["shape"],
            is_coalesced=node["coalesced"],
            check_invariants=True,
        )

    def sparse_compressed(self, node: Mapping[str, Json]) -> torch.Tensor:
        """A sparse tensor of a compressed layout."""
        layout = _word(node["$"].removeprefix("torch."), torch.layout)
        first, second, values = (self.decode(node[name]) for name in (*COMPRESSED[layout], "values"))
        return torch.sparse_compressed_tensor(
            first, second, values, size=node["shape"], layout=layout, check_invariants=True
        )

    def array(self, node: Mapping[str, Json]) -> np.ndarray[Any, Any]:
        """A numpy array."""
        values = self.view(node["values"]["name"])
        dtype, shape = np.dtype(node["dtype"]), tuple(node["shape"])
        if dtype.hasobject or values.numel() * values.element_size() != math.prod(shape) * dtype.itemsize:
            raise StateMismatch(f"the checkpoint holds no array of {dtype} and shape {shape}")
        array = np.empty(shape, dtype=dtype)
        array.reshape(-1).view(np.uint8)[...] = as_bytes(values).numpy()
        return array

    def _wrapper(self, node: Mapping[str, Json], live: Any, path: str) -> Any:
        if not (is_wrapper(live)):
            raise StateMismatch(
                f"{path}: the checkpoint holds a tensor subclass, which is rebuilt only in the place of a live one; "
                f"found {type(live).__name__} there"
            )
        inner = {name: self.decode(part, getattr(live, name, typed.MISSING)) for name, part in node["inner"]}
        context = self.decode(node["context"], live.__tensor_flatten__()[1])
        size, stride = torch.Size(node["shape"]), tuple(node["stride"])
        unflatten: Callable[..., Any] = type(live).__tensor_unflatten__
        return unflatten(inner, context, size, stride)


def _word(text: str, kind: type[_Word]) -> _Word:
    word = getattr(torch, text, None)
    if not isinstance(word, kind):
        raise StateMismatch(f"torch {torch.__version__} has no {kind.__name__} {text!r}")
    return word


_BUILDERS: Mapping[str, Callable[[Source, Mapping[str, Json]], Any]] = {
    "ndarray": Source.array,
    "torch.sparse_coo": Source.sparse_coo,
    **{str(layout): Source.sparse_compressed for layout in COMPRESSED},
    **{tag: lambda _, node: _word(node["value"], WORDS[node["$"]]) for tag in WORDS},
    "torch.device": lambda _, node: torch.device(node["value"]),
    "torch.Size": lambda _, node: torch.Size(node["value"]),
}
"""How values of the other tags are rebuilt."""


def _in_class(value: torch.Tensor, live: object) -> torch.Tensor:
    """A subclass that has memory of its own was saved as plain values; the live object says which class."""
    if not isinstance(live, torch.Tensor) or type(live) in PLAIN or is_wrapper(live):
        return value
    return value.as_subclass(type(live))


def _device(node: Mapping[str, Json], live: object) -> torch.device:
    if isinstance(live, torch.Tensor) and not live.is_meta:
        return live.device
    if node.get("device") == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
