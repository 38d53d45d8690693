"""From live values to typed JSON with named tensors.

A `Collector` walks the state of the tracked objects. Plain values become typed JSON; every tensor becomes a
name in it, and aliases (tied weights, a parameter that a second object also holds) become the same name.
`spotsafe.tensors.source` goes the other way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spotsafe.checkpoint import dtypes, typed
from spotsafe.errors import UnsupportedState
from spotsafe.tensors import arrays

Json = Any
"""A value that `json` can write."""
Spec = tuple[str, tuple[int, ...]]
"""A tensor's dtype as torch names it, without ``torch.``, and its shape."""

PLAIN = (torch.Tensor, torch.nn.Parameter, *((torch.nn.Buffer,) if hasattr(torch.nn, "Buffer") else ()))
COMPRESSED: Mapping[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
STORABLE = frozenset(
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtypes.find(str(dtype)[6:])
)
_ROLE_ORDER = {"other": 0, "buffer": 1, "moment": 2, "parameter": 3}
WORDS = {"torch.dtype": torch.dtype, "torch.layout": torch.layout, "torch.memory_format": torch.memory_format}


class NamedTensor(
    NamedTuple
):  # as all values of which there is one for each tensor: it is made in a third of the time
    """A live tensor under the name that it has in the checkpoint."""

    name: str
    tensor: torch.Tensor
    role: str = "other"
    """`parameter` (trainable), `moment` (of an optimizer), `buffer` or `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """The state of everything tracked, at one instant. The tensors are the live ones, not copies."""

    state: Mapping[str, Json]
    """Tracked name -> typed tree, in which tensors are ``{"$": "tensor", "name": ...}``."""
    tensors: tuple[NamedTensor, ...]
    """Each tensor once, aliases too."""
    session: Json = None
    """The session's own values as typed JSON; their tensors are in `tensors` too."""
    frozen: frozenset[str] = frozenset()
    """Names of those tensors that no training changes, as far as can be told; see `spotsafe.tensors.frozen`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What a checkpoint holds: verified, on the CPU, in memory that nobody else changes."""

    state: Mapping[str, Json]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)


def outranks(role: str, other: str) -> bool:
    """Which of two roles a tensor has that is met in both."""
    return _ROLE_ORDER[role] > _ROLE_ORDER[other]


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def spec_of(tensor: torch.Tensor) -> Spec:
    """Dtype and shape of a live tensor."""
    return dtype_name(tensor.dtype), tuple(tensor.shape)


@functools.cache
def torch_dtype(name: str) -> torch.dtype:
    """`torch.float32` for ``float32``.

    Raises:
        UnsupportedState: this torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if dtypes.find(name) is not None else None
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedState(
            f"torch {torch.__version__} has no dtype {name!r}; load with the version that saved it"
        )
    return dtype


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor subclass made of other tensors, which `__tensor_flatten__` gives."""
    return bool(is_traceable_wrapper_subclass(value))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements lie at one place in memory (after `expand`), so that it cannot be written."""
    if tensor.layout is not torch.strided:
        return False
    return any(step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True))


class Collector:
    """Gathers the tensors of one capture."""

    def __init__(self) -> None:
        self._first_at: dict[int, int] = {}
        self._at: dict[object, int] = {}
        self._taken: set[str] = set()
        self._tensors: list[NamedTensor] = []
        self._composed: dict[int, tuple[object, Json]] = {}

    @property
    def tensors(self) -> tuple[NamedTensor, ...]:
        """All that was gathered, in the order of the first sight."""
        return tuple(self._tensors)

    def adopt(
        self, tensors: Sequence[NamedTensor], names: AbstractSet[str], places: Mapping[int, int]
    ) -> bool:
        """Take over what was gathered elsewhere, as if it had been gathered here; false if that is not the same.

        Args:
            tensors: each once, at addresses of its own.
            names: theirs.
            places: address -> place in `tensors`.
        """
        if not self._taken.isdisjoint(names) or not self._first_at.keys().isdisjoint(places.keys()):
            return False
        base = len(self._tensors)
        self._tensors += tensors
        self._taken |= names
        self._first_at.update({address: base + at for address, at in places.items()} if base else places)
        return True

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """The name of a tensor that was gathered, or of one that is the same memory; None if there is none."""
        first = self._first_at.get(tensor.data_ptr() or id(tensor))
        if first is None:
            return None
        key = _alias_key(tensor)
        same = key == _alias_key(self._tensors[first].tensor)
        index = first if same else self._at.get(key)
        return None if index is None else self._tensors[index].name

    def encode(self, value: object, path: str, *, role: str = "other") -> Json:
        """Typed JSON of any value; `path` names it in errors and becomes the names of its tensors.

        Raises:
            UnsupportedState: it holds something that cannot be saved; the message says where and what to do.
        """
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path, role=role)
        return typed.encode(value, path=path, leaf=lambda leaf, at: self._leaf(leaf, at, role))

    def members(self, value: object, path: str, *, role: str = "other") -> Json:
        """The same as `encode`, with names like ``path.key`` for what a dict of plain words holds."""
        if type(value) is not dict or not all(type(key) is str and key.isidentifier() for key in value):
            return self.encode(value, path, role=role)
        return {key: self.encode(item, f"{path}.{key}", role=role) for key, item in value.items()}

    def session(self, values: Mapping[str, object]) -> Json:
        """The session's own values. They are restored before the program can show its classes, so none may be in them.

        Raises:
            UnsupportedState: as `encode`, and for what only a live value could be rebuilt from.
        """
        return {
            key: typed.encode(
                value,
                path=f"run.{key}",
                leaf=self._values_leaf if key == "values" else self._session_leaf,
            )
            for key, value in values.items()
        }

    def tensor(self, tensor: torch.Tensor, path: str, *, role: str = "other") -> Json:
        """The node of a tensor: its name, or for composed tensors the names of its components."""
        _refuse(tensor, path)
        if tensor.layout is torch.strided and (type(tensor) in PLAIN or not is_wrapper(tensor)):
            return self._strided(tensor, path, role)
        return self._once(tensor, lambda: self._compose(tensor, path, role))

    def _once(self, value: object, encode: Callable[[], Json]) -> Json:
        """The same node for the same object, whose components may be made anew whenever they are asked for."""
        known = self._composed.get(id(value))
        if known is None:
            known = self._composed[id(value)] = value, encode()  # held, so that its id stays its own
        return known[1]

    def _compose(self, tensor: torch.Tensor, path: str, role: str) -> Json:
        if is_wrapper(tensor):
            return self._wrapper(tensor, path, role)
        if tensor.layout is torch.sparse_coo:
            # The public accessors refuse a tensor that is not coalesced, and coalescing changes its bits.
            parts = {"indices": tensor._indices(), "values": tensor._values()}  # noqa: SLF001 - see above
            extra = {"shape": list(tensor.shape), "coalesced": tensor.is_coalesced()}
            return {"$": "torch.sparse_coo", **self._parts(parts, path, role), **extra}
        if tensor.layout in COMPRESSED:
            parts = {name: getattr(tensor, name)() for name in (*COMPRESSED[tensor.layout], "values")}
            return {"$": str(tensor.layout), **self._parts(parts, path, role), "shape": list(tensor.shape)}
        raise UnsupportedState(f"{path} has layout {tensor.layout}; track a dense copy of it", path=path)

    def _parts(self, parts: Mapping[str, torch.Tensor], path: str, role: str) -> dict[str, Json]:
        return {name: self.tensor(part, f"{path}.{name}", role=role) for name, part in parts.items()}

    def _strided(self, tensor: torch.Tensor, path: str, role: str) -> Json:
        if tensor.dtype not in STORABLE:
            dtypes.require(dtype_name(tensor.dtype), path=path)
        index = self._place_of(tensor)
        if index is None:
            name = self._free_name(path)
            self._tensors.append(NamedTensor(name, tensor, role))
        else:
            name = self._see_again(index, role)
        node: dict[str, Json] = {"$": "tensor", "name": name}
        if not tensor.is_cpu:
            node["device"] = tensor.device.type
        if tensor.requires_grad and tensor.is_leaf:
            node["requires_grad"] = True
        if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
            node["parameter"] = True
        return node

    def _place_of(self, tensor: torch.Tensor) -> int | None:
        """Where the same elements are among `_tensors`; None if they come next."""
        address = tensor.data_ptr() or id(tensor)
        first = self._first_at.setdefault(address, len(self._tensors))
        if first == len(self._tensors):
            return None
        key = _alias_key(tensor)  # seldom needed, for few tensors begin where another one does
        if key == _alias_key(self._tensors[first].tensor):
            return first
        index = self._at.setdefault(key, len(self._tensors))
        return None if index == len(self._tensors) else index

    def _see_again(self, index: int, role: str) -> str:
        seen = self._tensors[index]
        if outranks(role, seen.role):
            self._tensors[index] = NamedTensor(name=seen.name, tensor=seen.tensor, role=role)
        return seen.name

    def _wrapper(self, tensor: Any, path: str, role: str) -> Json:
        names, context = tensor.__tensor_flatten__()
        return {
            "$": "torch.wrapper",
            "class": typed.class_id(tensor),
            "inner": [
                [name, self.tensor(getattr(tensor, name), f"{path}.{name}", role=role)] for name in names
            ],
            "context": self.encode(context, f"{path}.__tensor_flatten__()[1]", role=role),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }

    def _free_name(self, path: str) -> str:
        base = path if path.isascii() else path.encode("utf-8", "backslashreplace").decode("utf-8")
        name, taken, number = base, self._taken, 1
        while name in taken:  # two places of a state may spell the same path
            number += 1
            name = f"{base}#{number}"
        taken.add(name)
        return name

    def _leaf(self, value: object, path: str, role: str) -> Json | None:
        if isinstance(value, torch.Tensor):
            return self.tensor(value, path, role=role)
        if isinstance(value, np.ndarray):
            return self._once(value, lambda: self._array(value, path))
        if isinstance(value, torch.device):
            return {"$": "torch.device", "value": str(value)}
        if isinstance(value, torch.Size):
            return {"$": "torch.Size", "value": list(value)}
        for word, kind in WORDS.items():
            if isinstance(value, kind):
                return {"$": word, "value": str(value).removeprefix("torch.")}
        return None

    def _values_leaf(self, value: object, path: str) -> Json | None:
        """The user's own: what would come back as its plain base breaks the program after a resume, and only then."""
        if isinstance(value, defaultdict):
            self._refuse_class(
                value, path, "keep dict(...) of it, and write .setdefault(key, ...) where it is read"
            )
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            self._refuse_class(value, path, "keep ._asdict() of it, or tuple(...)")
        return self._session_leaf(value, path)

    def _session_leaf(self, value: object, path: str) -> Json | None:
        if isinstance(value, Enum):
            self._refuse_class(value, path, "keep its .name or .value")
        if dataclasses.is_dataclass(value):
            self._refuse_class(value, path, "keep dataclasses.asdict(...) of it")
        return self._leaf(value, path, "other")

    def _refuse_class(self, value: object, path: str, instead: str) -> NoReturn:
        raise UnsupportedState(
            f"{path} is of class {type(value).__qualname__}, which a resume could not find again (classes are never "
            f"imported by name): {instead}, or track an object that owns it",
            path=path,
        )

    def _array(self, array: np.ndarray[Any, Any], path: str) -> Json:
        dtype = arrays.dtype_node(array.dtype)
        if type(array) is not np.ndarray or dtype is None:
            raise UnsupportedState(
                f"{path} is a {type(array).__name__} of {array.dtype}, which cannot be saved; "
                "keep a plain array of numbers, text or dates, or structures of these",
                path=path,
            )
        values = self.tensor(arrays.to_tensor(array), path)
        return {"$": "ndarray", "dtype": dtype, "shape": list(array.shape), "values": values}


def _alias_key(tensor: torch.Tensor) -> object:
    """Equal for two tensors that are the same elements in the same memory, or without elements the same object.

    Addresses are only compared among tensors that one capture holds, so none can have been freed and used
    again.
    """
    if tensor.numel() == 0:
        return id(tensor), "empty"
    # The shape as it is: hashing a `torch.Size` is cheaper than copying it.
    flags = (tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride(), tensor.dtype, flags


def _refuse(tensor: torch.Tensor, path: str) -> None:
    if type(tensor) in PLAIN and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested):
        return
    problem = ""
    if torch.nn.parameter.is_lazy(tensor):
        problem = "is not initialised yet; run one forward pass before the session"
    elif tensor.is_meta:
        problem = "is on the meta device and has no values; materialise it first"
    elif tensor.is_quantized:
        problem = (
            "is quantized; track its int_repr(), scale and zero_point, or the float tensor it was made from"
        )
    elif tensor.is_nested:
        problem = "is a nested tensor, whose rows have lengths of their own; track its values() and offsets()"
    elif type(tensor) not in PLAIN and not is_wrapper(tensor) and _has_no_memory(tensor):
        problem = f"is a {type(tensor).__name__} without memory of its own; give it __tensor_flatten__"
    if problem:
        raise UnsupportedState(f"{path} {problem}", path=path)


def _has_no_memory(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    try:
        return tensor.untyped_storage().data_ptr() == 0
    except (RuntimeError, NotImplementedError):
        return True


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as a flat tensor of bytes."""
    # Not `reshape`: it may leave a single element with a stride that `view` refuses.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy; also of dtypes for which torch has no copy kernel."""
    if tensor.numel() == 0:
        return tensor.detach()  # no memory to share
    return as_bytes(tensor).clone().view(tensor.dtype).reshape(tensor.shape)
