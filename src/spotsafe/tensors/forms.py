"""What the saved tree of each kind has to look like: a checkpoint is untrusted, and is looked at before any change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from spotsafe.checkpoint.typed_scalars import TAG
from spotsafe.tensors.tree import Json

_MAPPINGS = frozenset({"dict", "ordered_dict", "defaultdict", "counter"})


class _Module(msgspec.Struct):
    state: dict[str, Any]
    frozen: list[str] | None
    metadata: dict[str, Any]


class _Optimizer(msgspec.Struct, rename={"kind": "class"}):
    kind: str | None
    order: list[list[str]]
    form: Literal["by name", "by position"]
    state: Any


class _ByName(msgspec.Struct):
    groups: list[dict[str, Any]]
    state: list[tuple[str, dict[str, Any]]]
    shared: dict[str, Any]
    extra: dict[str, Any]
    on_host: list[str]


class _Value(msgspec.Struct):
    value: Any


class _Stateful(msgspec.Struct):
    state: Any


class _Items(msgspec.Struct):
    items: list[tuple[str | int, Any]]


_FORMS: Mapping[str, type[msgspec.Struct]] = {
    "module": _Module,
    "optimizer": _Optimizer,
    "tensor": _Value,
    "array": _Value,
    "stateful": _Stateful,
    "pair": _Stateful,
    "dict": _Items,
    "list": _Items,
}


def form_problem(kind: str, saved: Mapping[str, Json]) -> str | None:
    """Why a tree is none that its kind makes, or None. What typed JSON in it says is not looked at."""
    try:
        if kind in _FORMS:
            msgspec.convert(saved, _FORMS[kind])
        if kind == "optimizer" and saved["form"] == "by name":
            found = msgspec.convert(saved, _ByName)
            if not all(map(_is_mapping, [*found.groups, found.shared, found.extra])):
                return "something else where a dict belongs"
        if kind == "module" and not all(map(_is_mapping, [saved["metadata"], *saved["metadata"].values()])):
            return "something else where a dict belongs"
    except msgspec.ValidationError as error:
        return str(error)
    return None


def _is_mapping(node: Json) -> bool:
    return isinstance(node, Mapping) and (TAG not in node or node[TAG] in _MAPPINGS)
