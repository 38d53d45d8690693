"""Python values -> typed JSON (see `typed`)."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, Flag
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

from spotsafe.checkpoint.strict_json import is_text
from spotsafe.checkpoint.typed_scalars import ENCODERS, TAG, encode_int, encode_numpy, encode_str
from spotsafe.checkpoint.typed_values import (
    MAX_DEPTH,
    MAX_VALUES,
    TensorRef,
    class_id,
    class_name,
    is_attribute,
    key_text,
)
from spotsafe.errors import UnsupportedState

Leaf = Callable[[object, str], Any]
"""``leaf(value, path)``: the node of a value that this module does not know, or None."""

_WAY_OUT = "Give the object that owns it state_dict/load_state_dict, or track a (get, set) pair of callables."
_BUILTIN = (str, bytes, bytearray, int, float, complex, tuple, list, dict, set, frozenset, deque)


class Encoder:
    """Walks one value. Knows where it is, so that every error can say so."""

    def __init__(self, *, path: str, leaf: Leaf) -> None:
        self._root = path
        self._leaf = leaf
        self._parts: list[str] = []
        self._open: set[int] = set()
        self._count = 0

    def encode(self, value: object) -> Any:
        """The node of `value`."""
        kind = type(value)
        self._count += 1
        scalar = ENCODERS.get(kind)
        if scalar is not None:
            return self._scalar(scalar, value)
        container = _CONTAINERS.get(kind)
        if container is None:
            node = self._leaf(value, self._path())
            if node is not None:
                return node
            container = _find(value)
        if container is None:
            self._refuse(f"is {_describe(value)}, which cannot be saved. {_WAY_OUT}")
        if id(value) in self._open:
            self._refuse(f"contains itself, which cannot be saved. {_WAY_OUT}")
        if len(self._parts) >= MAX_DEPTH:
            self._refuse(f"is nested deeper than {MAX_DEPTH}, which cannot be saved. Flatten it.")
        self._open.add(id(value))
        node = container(self, value)
        self._open.remove(id(value))
        return node

    def _scalar(self, encode: Callable[[Any], Any], value: object) -> Any:
        try:
            return encode(value)
        except ValueError as error:
            self._refuse(str(error))

    def _at(self, part: str, value: object) -> Any:
        self._parts.append(part)
        node = self.encode(value)
        self._parts.pop()
        return node

    def _path(self) -> str:
        return self._root + "".join(self._parts)

    def _refuse(self, problem: str) -> NoReturn:
        path = self._path()
        raise UnsupportedState(f"{path} {problem}", path=path)

    def _items(self, values: Iterable[object]) -> list[Any]:
        items = list(values)
        self._check_count(len(items))
        if _is_flat(items):
            return items
        return [self._at(f"[{place}]", item) for place, item in enumerate(items)]

    def _check_count(self, more: int) -> None:
        self._count += more
        if self._count > MAX_VALUES:
            self._refuse(f"holds more than {MAX_VALUES} values: keep them as an array or a tensor.")

    def _pairs(self, mapping: Mapping[Any, Any]) -> list[Any]:
        self._check_count(len(mapping))
        return [
            [self._at(f".keys({key_text(key)})", key), self._at(f"[{key_text(key)}]", value)]
            for key, value in mapping.items()
        ]

    def _members(self, mapping: Mapping[str, Any]) -> dict[str, Any]:
        self._check_count(len(mapping))
        return {key: self._at(f"[{key!r}]", value) for key, value in mapping.items()}

    def of_dict(self, value: dict[Any, Any]) -> Any:
        """A plain object where JSON can hold it; otherwise pairs of nodes."""
        if all(type(key) is str and key != TAG and is_text(key) for key in value):
            return self._members(value)
        return {TAG: "dict", "items": self._pairs(value)}

    def of_list(self, value: list[Any]) -> Any:
        """A plain array."""
        return self._items(value)

    def of_tuple(self, value: tuple[Any, ...]) -> Any:
        """An array with a tag."""
        return {TAG: "tuple", "items": self._items(value)}

    def of_named_tuple(self, value: Any) -> Any:
        """A tuple, with what is needed to tell whether a live class is the same."""
        self._refuse_attributes(getattr(value, "__dict__", {}))
        fields = [str(name) for name in value._fields]
        node = {TAG: "namedtuple", "class": class_id(value), "fields": fields}
        return {**node, "items": self._items(value)}

    def of_set(self, value: Iterable[Any]) -> Any:
        """An array in the order of the nodes' text: a set's own order changes with every process."""
        nodes = [self._at(f".item({key_text(item)})", item) for item in value]
        self._check_count(len(nodes))
        ordered = sorted(nodes, key=json.dumps)
        return {TAG: "frozenset" if isinstance(value, frozenset) else "set", "items": ordered}

    def of_ordered_dict(self, value: OrderedDict[Any, Any]) -> Any:
        """Pairs, and the instance's attributes: a module's state dict has ``_metadata``."""
        node: dict[str, Any] = {TAG: "ordered_dict", "items": self._pairs(value)}
        attributes = vars(value)
        for name in attributes:
            if not is_attribute(name):
                self._refuse(f"has an attribute {name!r}, which cannot be saved. Rename it.")
        if attributes:
            node["attributes"] = {name: self._at(f".{name}", item) for name, item in attributes.items()}
        return node

    def of_default_dict(self, value: defaultdict[Any, Any]) -> Any:
        """Pairs; the factory is code, and comes from the live object."""
        return {TAG: "defaultdict", "items": self._pairs(value)}

    def of_counter(self, value: Counter[Any]) -> Any:
        """Pairs."""
        return {TAG: "counter", "items": self._pairs(value)}

    def of_deque(self, value: deque[Any]) -> Any:
        """An array and the bound."""
        return {TAG: "deque", "maxlen": value.maxlen, "items": self._items(value)}

    def of_slice(self, value: slice) -> Any:
        """Three nodes."""
        start, stop, step = value.start, value.stop, value.step
        return {
            TAG: "slice",
            "start": self._at(".start", start),
            "stop": self._at(".stop", stop),
            "step": self._at(".step", step),
        }

    def of_namespace(self, value: SimpleNamespace) -> Any:
        """Pairs of name and node."""
        pairs = [[encode_str(name), self._at(f".{name}", item)] for name, item in vars(value).items()]
        return {TAG: "namespace", "items": pairs}

    def of_tensor(self, value: TensorRef) -> Any:
        """A reference to a tensor of the index."""
        return value.node()

    def of_numpy(self, value: np.generic) -> Any:
        """A numpy scalar."""
        return self._scalar(encode_numpy, value)

    def of_enum(self, value: Enum) -> Any:
        """The member's name; of a flag, which may be a combination, the number."""
        node = {TAG: "enum", "class": class_id(value)}
        if not isinstance(value, Flag):
            return {**node, "name": value.name}
        return {**node, "value": encode_int(int(value.value))}

    def of_dataclass(self, value: Any) -> Any:
        """The fields. Whatever else the instance carries would be lost, and is refused."""
        names = [field.name for field in dataclasses.fields(value)]
        extra = {name: None for name in getattr(value, "__dict__", {}) if name not in names}
        self._refuse_attributes(extra)
        unset = [name for name in names if not hasattr(value, name)]
        if unset:
            self._refuse(f"is a dataclass whose field {unset[0]} is not set. {_WAY_OUT}")
        fields = {name: self._at(f".{name}", getattr(value, name)) for name in names}
        return {TAG: "dataclass", "class": class_id(value), "fields": fields}

    def _refuse_attributes(self, attributes: Mapping[str, Any]) -> None:
        for name in attributes:
            self._refuse(f"has an attribute {name!r} that is no field and would be lost. {_WAY_OUT}")


_CONTAINERS: Mapping[type, Callable[[Encoder, Any], Any]] = {
    dict: Encoder.of_dict,
    list: Encoder.of_list,
    tuple: Encoder.of_tuple,
    set: Encoder.of_set,
    frozenset: Encoder.of_set,
    OrderedDict: Encoder.of_ordered_dict,
    Counter: Encoder.of_counter,
    deque: Encoder.of_deque,
    slice: Encoder.of_slice,
    SimpleNamespace: Encoder.of_namespace,
    TensorRef: Encoder.of_tensor,
}


def _find(value: object) -> Callable[[Encoder, Any], Any] | None:
    """How to encode a value whose class is not one of Python's own."""
    kind = type(value)
    if kind is defaultdict:  # behind `leaf`, which may not want what only a live value gives back
        return Encoder.of_default_dict
    if isinstance(value, np.generic):
        return Encoder.of_numpy
    if isinstance(value, Enum):
        return Encoder.of_enum
    if isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple):
        return Encoder.of_named_tuple
    if dataclasses.is_dataclass(kind) and _is_plain(kind):
        return Encoder.of_dataclass
    return None


def _is_plain(kind: type) -> bool:
    """Whether instances are made of attributes alone, so that their fields can be all there is."""
    try:
        object.__new__(kind)
    except TypeError:
        return False
    return True


def _is_flat(items: list[Any]) -> bool:
    """Whether a list is JSON as it stands. Long lists of numbers are common, and walking them is slow."""
    kinds = set(map(type, items))
    if kinds == {int}:
        return bool(min(items) >= -(1 << 63) and max(items) < 1 << 63)
    if kinds == {float}:
        return bool(np.isfinite(items).all())
    return kinds <= {bool, type(None)}


def _describe(value: object) -> str:
    if isinstance(value, type):
        return f"the class {value.__qualname__}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"the function {value.__qualname__}"
    for base in _BUILTIN:
        if isinstance(value, base):
            return f"of class {class_name(value)} (convert it to {base.__name__} if that is all it is)"
    return f"of class {class_name(value)}"
