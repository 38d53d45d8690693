"""Typed JSON -> Python values (see `typed`). Runs no code that the document chooses."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum, Flag
from types import SimpleNamespace
from typing import Any, NoReturn

from spotsafe.checkpoint.typed_scalars import DECODERS, TAG, member
from spotsafe.checkpoint.typed_values import MAX_DEPTH, MISSING, Unbound, class_name, is_attribute, key_text
from spotsafe.errors import DamagedCheckpoint, StateMismatch, UnsupportedFormat

Leaf = Callable[[Mapping[str, Any], object, str], object]
"""``leaf(node, live, path)``: the value of a tag that this module does not know, or NotImplemented."""

_SHOWN = 100  # characters of each part of a path, which is told of every leaf
_COLLISIONS = 1000
_ATOMS = frozenset({type(None), bool, int, float, str})


class _Hashes:
    """Refuses keys that were made to have one hash, for which a dict takes quadratic time. Text is salted."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, key: object) -> None:
        if type(key) is str:
            return
        code = hash(key)
        self._counts[code] += 1
        if self._counts[code] > _COLLISIONS:
            raise ValueError(f"more than {_COLLISIONS:,} keys of one hash")


class Decoder:
    """Walks one node together with the live value at the same place."""

    def __init__(self, *, path: str, leaf: Leaf, lenient: bool, checkpoint: str, file: str) -> None:
        self._root = path
        self._leaf = leaf
        self._lenient = lenient
        self._checkpoint = checkpoint
        self._file = file
        self._parts: list[str] = []

    def decode(self, node: Any, live: object) -> Any:
        """The value of `node`; `live` is the program's value at the same path, or MISSING."""
        kind = type(node)
        if kind in _ATOMS:
            return node
        if len(self._parts) > MAX_DEPTH:
            self._damaged(f"nested deeper than {MAX_DEPTH}")
        if kind is list:
            return self._items(node, live)
        if kind is not dict:
            self._damaged(f"no typed JSON: {kind.__name__}")
        if TAG not in node:
            return {
                key: self._at(f"[{key!r}]", value, _value_at(live, key, value)) for key, value in node.items()
            }
        return self._tagged(node, live)

    def _tagged(self, node: Mapping[str, Any], live: object) -> Any:
        tag = node[TAG]
        if type(tag) is not str:
            self._damaged("a tag that is no string")
        scalar = DECODERS.get(tag)
        try:
            if scalar is not None:
                return scalar(node)
            if tag in _CONTAINERS:
                return _CONTAINERS[tag](self, node, live)
        except (DamagedCheckpoint, StateMismatch, UnsupportedFormat):
            raise
        except (ValueError, TypeError, ArithmeticError) as error:
            self._damaged(str(error), cause=error)
        value = self._leaf(node, live, self._path())
        if value is NotImplemented:
            where = f"{self._checkpoint}/{self._file}" if self._checkpoint else "the checkpoint"
            raise UnsupportedFormat(
                f"{where}: {self._path()} is a value of a kind {tag[:40]!r} that this version does not know; "
                "upgrade spotsafe",
                checkpoint=self._checkpoint,
                found=tag[:40],
            )
        return value

    def _at(self, part: str, node: Any, live: object) -> Any:
        if type(node) in _ATOMS:
            return node
        self._parts.append(part[:_SHOWN])
        value = self.decode(node, live)
        self._parts.pop()
        return value

    def _path(self) -> str:
        return self._root + "".join(self._parts)

    def _damaged(self, reason: str, *, cause: Exception | None = None) -> NoReturn:
        path = self._path()
        raise DamagedCheckpoint(
            checkpoint=self._checkpoint, file=self._file, reason=f"{path[:500]}: {reason}"
        ) from cause

    def _items(self, nodes: list[Any], live: object) -> list[Any]:
        if _ATOMS.issuperset(map(type, nodes)):
            return nodes.copy()
        places: Collection[Any] = live if isinstance(live, (list, tuple, deque)) else ()
        lives = _lives(places, nodes)
        return [
            self._at(f"[{place}]", node, value)
            for place, (node, value) in enumerate(zip(nodes, lives, strict=True))
        ]

    def _members_of(self, node: Mapping[str, Any], live: object) -> list[Any]:
        return self._items(member(node, "items", list), live)

    def to_pairs(self, node: Mapping[str, Any], live: object) -> dict[Any, Any]:
        """A dict with keys of any kind."""
        pairs: list[Any] = member(node, "items", list)
        known = list(live) if isinstance(live, Mapping) else []
        result: dict[Any, Any] = {}
        hashes = _Hashes()
        for pair in pairs:
            if type(pair) is not list or len(pair) != 2:
                raise ValueError(f"a {node[TAG]} whose items are no pairs")
            key = self._at(".keys()", pair[0], _witness(pair[0], known))
            hashes.add(key)
            result[key] = self._at(f"[{key_text(key)}]", pair[1], _value_at(live, key, pair[1]))
        if len(result) != len(pairs):
            raise ValueError(f"a {node[TAG]} with the same key twice")
        return result

    def to_items(self, node: Mapping[str, Any], live: object) -> list[Any]:
        """The items of a set."""
        nodes: list[Any] = member(node, "items", list)
        known = live if isinstance(live, (set, frozenset)) else ()
        values = [self._at(".item()", item, _witness(item, known)) for item in nodes]
        hashes = _Hashes()
        for value in values:
            hashes.add(value)
        if len(set(values)) != len(values):
            raise ValueError(f"a {node[TAG]} with the same item twice")
        return values

    def to_tuple(self, node: Mapping[str, Any], live: object) -> Any:
        """A tuple."""
        return tuple(self._members_of(node, live))

    def to_named_tuple(self, node: Mapping[str, Any], live: object) -> Any:
        """The live object's class if it has the same fields, else a plain tuple."""
        values = tuple(self._members_of(node, live))
        fields = member(node, "fields", list)
        if len(fields) != len(values):
            raise ValueError("a namedtuple with more or fewer fields than items")
        if isinstance(live, tuple) and getattr(live, "_fields", None) == tuple(fields):
            return tuple.__new__(type(live), values)
        return values

    def to_deque(self, node: Mapping[str, Any], live: object) -> Any:
        """A deque with its bound."""
        maxlen = None if node.get("maxlen") is None else member(node, "maxlen", int)
        items = self._members_of(node, live)
        if maxlen is not None and len(items) > maxlen:
            raise ValueError("a deque beyond its bound")
        return deque(items, maxlen)

    def to_ordered_dict(self, node: Mapping[str, Any], live: object) -> Any:
        """An OrderedDict, with the attributes of the instance."""
        result = OrderedDict(self.to_pairs(node, live))
        attributes = member(node, "attributes", dict) if "attributes" in node else {}
        present = vars(live) if isinstance(live, OrderedDict) else {}
        for name, value in attributes.items():
            if not is_attribute(name):
                raise ValueError(f"an ordered_dict with an attribute {name[:40]!r}")
            setattr(result, name, self._at(f".{name}", value, present.get(name, MISSING)))
        return result

    def to_default_dict(self, node: Mapping[str, Any], live: object) -> Any:
        """A defaultdict with the live object's factory; a plain dict if there is none."""
        pairs = self.to_pairs(node, live)
        return defaultdict(live.default_factory, pairs) if isinstance(live, defaultdict) else pairs

    def to_counter(self, node: Mapping[str, Any], live: object) -> Any:
        """A Counter; its own constructor would count the pairs."""
        result: Counter[Any] = Counter()
        dict.update(result, self.to_pairs(node, live))
        return result

    def to_slice(self, node: Mapping[str, Any], live: object) -> Any:
        """A slice."""
        missing = [name for name in ("start", "stop", "step") if name not in node]
        if missing:
            raise ValueError(f"a slice without {missing[0]}")
        start, stop, step = (
            self._at(f".{name}", node[name], getattr(live, name) if isinstance(live, slice) else MISSING)
            for name in ("start", "stop", "step")
        )
        return slice(start, stop, step)

    def to_namespace(self, node: Mapping[str, Any], live: object) -> Any:
        """A SimpleNamespace."""
        members = self.to_pairs(node, vars(live) if isinstance(live, SimpleNamespace) else MISSING)
        if any(type(name) is not str for name in members):
            raise ValueError("a namespace whose names are no strings")
        return SimpleNamespace(**members)

    def to_enum(self, node: Mapping[str, Any], live: object) -> Any:
        """The member of the live object's class."""
        name = node.get("name") if "name" in node else self.decode(node.get("value"), MISSING)
        if type(name) not in {str, int}:
            raise ValueError("an enum without a member")
        kind = self._live_class(node, live, isinstance(live, Enum))
        if kind is None:
            return Unbound(class_name=node["class"], value=name)
        is_flag = issubclass(kind, Flag) and type(name) is int
        try:
            found = kind(name) if is_flag else kind.__members__[name]
        except (KeyError, ValueError):
            raise self._mismatch(f"{node['class']} has no member {name!r} any more") from None
        return found

    def to_dataclass(self, node: Mapping[str, Any], live: object) -> Any:
        """An instance of the live object's class, made without running its code."""
        nodes: dict[str, Any] = member(node, "fields", dict)
        is_instance = dataclasses.is_dataclass(live) and not isinstance(live, type)
        present = {name: getattr(live, name, MISSING) for name in nodes} if is_instance else {}
        fields = {
            name: self._at(f".{name}", value, present.get(name, MISSING)) for name, value in nodes.items()
        }
        kind = self._live_class(node, live, is_instance)
        if kind is None:
            return Unbound(class_name=node["class"], value=fields)
        expected = {field.name for field in dataclasses.fields(kind)}
        if expected != set(fields):
            differing = ", ".join(sorted(expected ^ set(fields)))
            raise self._mismatch(
                f"fields of {node['class']} differ between checkpoint and program: {differing}"
            )
        instance = object.__new__(kind)
        for name, value in fields.items():
            object.__setattr__(instance, name, value)
        return instance

    def _live_class(self, node: Mapping[str, Any], live: object, is_one: bool) -> Any:
        saved = member(node, "class", str)
        if is_one and _is_named(live, saved):
            return type(live)
        if self._lenient:
            return None
        found = "nothing" if live is MISSING else f"a {class_name(live)}"
        raise self._mismatch(
            f"the checkpoint holds a value of class {saved[:200]}, the program {found}. Classes are never "
            "imported by name: have such a value there before the restore, or save it as plain values"
        )

    def _mismatch(self, problem: str) -> StateMismatch:
        line = f"{self._path()}: {problem}"
        return StateMismatch(line, problems=[line])


_CONTAINERS: Mapping[str, Callable[[Decoder, Mapping[str, Any], object], Any]] = {
    "dict": Decoder.to_pairs,
    "tuple": Decoder.to_tuple,
    "namedtuple": Decoder.to_named_tuple,
    "set": lambda self, node, live: set(self.to_items(node, live)),
    "frozenset": lambda self, node, live: frozenset(self.to_items(node, live)),
    "ordered_dict": Decoder.to_ordered_dict,
    "defaultdict": Decoder.to_default_dict,
    "counter": Decoder.to_counter,
    "deque": Decoder.to_deque,
    "slice": Decoder.to_slice,
    "namespace": Decoder.to_namespace,
    "enum": Decoder.to_enum,
    "dataclass": Decoder.to_dataclass,
}


def _is_named(value: object, saved: str) -> bool:
    """Whether a value's class has the saved name. Its module may be ``__main__`` in one start only."""
    return type(value).__qualname__ == saved.rpartition(":")[2]


def _lives(places: Collection[Any], nodes: list[Any]) -> Iterator[Any]:
    """The live value beside each node; past their end, one of the same class, if there is any."""
    yield from (value for value, _ in zip(places, nodes, strict=False))
    for node in nodes[len(places) :]:
        yield _witness(node, places)


def _value_at(live: object, key: object, node: Any) -> object:
    if not isinstance(live, dict):
        return MISSING
    value = dict.get(live, key, MISSING)
    return _witness(node, live.values()) if value is MISSING else value


def _witness(node: Any, others: Iterable[Any]) -> object:
    """A live value of the class that `node` names, among the neighbours of its place."""
    saved = node.get("class") if type(node) is dict else None
    if type(saved) is not str:
        return MISSING
    return next((value for value in others if _is_named(value, saved)), MISSING)
