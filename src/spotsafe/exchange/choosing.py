"""Which entries of a file become objects of a checkpoint, and what they are called. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_SHOWN = 20


def choose_entries(
    values: Mapping[str, Any], *, rename: Mapping[str, str], only: Collection[str], path: str
) -> dict[str, Any]:
    """The entries that are wanted, by the names that they shall have.

    Args:
        values: what the file holds.
        rename: an entry -> its name in the checkpoint. Dots lead to what is inside of an entry, such as
            ``optimizer_states.0``; it is taken out of there.
        only: names in the checkpoint that stay; empty keeps all.
        path: the file, for errors.

    Raises:
        ValueError: an entry is not there, or two would have one name.
    """
    ways = {old: [old] if old in values else old.split(".") for old in rename}
    taken: dict[str, Any] = {}
    for old, new in rename.items():
        if new in taken:
            raise ValueError(f"two entries would be called {new!r}")
        taken[new] = _at(values, ways[old], old, path)
    rest = _without(values, [tuple(way) for way in ways.values()])
    both = next((name for name in taken if name in rest), None)
    if both is not None:
        raise ValueError(f"{path} has a {both!r} of its own; rename that too")
    found = {**taken, **rest}
    missing = next((name for name in only if name not in found), None)
    if missing is not None:
        raise ValueError(f"{path} has no {missing!r}; it holds {_listed(found)}")
    return {name: value for name, value in found.items() if not only or name in only}


def _at(values: Any, way: list[str], old: str, path: str) -> Any:
    for key in way:
        inside = _entries(values)
        if key not in inside:
            raise ValueError(f"{path} has no {old!r}; there is {_listed(inside)}")
        values = inside[key]
    return values


def _without(value: Any, ways: list[tuple[str, ...]]) -> Any:
    """A copy without what lies at the ends of these ways, and without what is empty then."""
    left: dict[str, Any] = {}
    for key, one in _entries(value).items():
        further = [way[1:] for way in ways if way[0] == key]
        if () in further:
            continue
        inner = _without(one, further) if further else one
        if not further or inner:
            left[key] = inner
    return list(left.values()) if isinstance(value, (list, tuple)) else left


def _entries(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {str(key): one for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return {str(at): one for at, one in enumerate(value)}
    return {}


def _listed(values: Collection[str]) -> str:
    names = ", ".join(map(repr, list(values)[:_SHOWN])) or "nothing"
    return names if len(values) <= _SHOWN else f"{names} and {len(values) - _SHOWN} more"
