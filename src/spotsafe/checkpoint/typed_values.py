"""What typed JSON (see `typed`) is made of besides Python's own values."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from spotsafe.checkpoint.typed_scalars import TAG

MAX_DEPTH = 128
"""Containers inside each other. Each takes up to three levels of JSON, which `strict_json` allows for."""
MAX_VALUES = 10_000_000
"""Values of one tree at encoding; decoding is bounded by the size of the file."""


class _Missing:
    """The type of `MISSING`."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING: Final = _Missing()
"""Stands for "no live object here"; None is a live object."""


@dataclass(frozen=True, slots=True)
class TensorRef:
    """Stands in a tree for a tensor of the index."""

    name: str

    def node(self) -> dict[str, Any]:
        """Its typed JSON."""
        return {TAG: "tensor", "name": self.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbound:
    """An Enum member or a dataclass whose class is not at hand; only a lenient decode makes it."""

    class_name: str
    value: Any
    """The member's name or number; of a dataclass, a dict of its fields."""


def class_name(value: object) -> str:
    """Module and qualified name of a value's class, for people."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def class_id(value: object) -> str:
    """What a file says of a value's class: ``module:qualified name``."""
    return f"{type(value).__module__}:{type(value).__qualname__}"


def is_attribute(name: str) -> bool:
    """Whether an OrderedDict may carry an attribute of this name: none that hides what its class has."""
    return name.isidentifier() and not hasattr(OrderedDict, name)


def key_text(key: object) -> str:
    """How a key of a dict, or an item of a set, is written in a path."""
    try:
        return repr(key)
    except Exception:  # noqa: BLE001 - a user's __repr__ must not hide the error whose path this is
        return f"<{class_name(key)}>"


def tensor_names(node: Any) -> Iterator[str]:
    """The name in every tensor reference below `node`, in no particular order.

    Raises:
        ValueError: a reference without a name.
    """
    pending = [node] if isinstance(node, (list, Mapping)) else []
    while pending:
        current = pending.pop()
        if isinstance(current, list):
            inside: Iterable[Any] = current
        elif current.get(TAG) == "tensor":
            yield _name_in(current)
            continue
        else:
            inside = current.values()
        for item in inside:
            if type(item) is dict and item.get(TAG) == "tensor":  # nearly all of a model: straight away
                yield _name_in(item)
            elif isinstance(item, (list, dict)):
                pending.append(item)


def _name_in(reference: Mapping[str, Any]) -> str:
    name = reference.get("name")
    if type(name) is not str:
        raise ValueError("a reference to a tensor without a name")
    return name
