"""The names of what is in a checkpoint, as ``spotsafe show`` prints them and `spotsafe.load` takes them.

A name is the path of a value in what the program tracked::

    model.layers.0.weight           an entry of a module's state_dict; a tied one has all of its names
    optimizer.model.bias.exp_avg    of an optimizer: the parameter's name, then what is kept of it
    optimizer.param_groups[0].lr
    scheduler.last_epoch            of an object with a state_dict: the keys of it
    heads.left.weight               inside a dict or list of objects: its key
    ema                             a tensor or an array that is tracked itself
    run.values                      of the session, each one value: values, positions, rng, nonfinite

Dicts with text keys are gone into; whatever else there is, such as a tuple or a dict with other keys, is one value.
The tensors inside such a value can be had by their own names too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spotsafe.checkpoint.index_values import Index
from spotsafe.checkpoint.typed_scalars import TAG
from spotsafe.checkpoint.typed_values import tensor_names
from spotsafe.errors import DamagedCheckpoint, SpotsafeError

Json = Any
"""A value that `json` can write."""
_KIND = "kind"
_ALIKE = 100
"""Values whose paths may be spelled alike."""
_NAMES = 1 << 28
"""Characters of all names together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a checkpoint holds, by name."""

    values: Mapping[str, Json]
    """Name -> typed JSON, in the order of the program; together they are everything."""
    inner: Mapping[str, Json]
    """Tensors inside of a value, which go by a name of their own too."""

    def find(self, name: str) -> Json:
        """The typed JSON of a value or an inner tensor.

        Raises:
            KeyError: there is none of this name.
        """
        return self.values[name] if name in self.values else self.inner[name]


def is_tensor(node: Json) -> bool:
    """Whether typed JSON is one tensor and nothing else."""
    return isinstance(node, Mapping) and node.get(TAG) == "tensor"


def contents(indexes: Sequence[Index], *, checkpoint: str) -> Contents:
    """Everything in a checkpoint, from the indexes of all its ranks.

    Raises:
        DamagedCheckpoint: the state in them is not what a session or an import writes.
    """
    with reading_trees(checkpoint):
        return _contents(indexes)


@contextmanager
def reading_trees(checkpoint: str) -> Iterator[None]:
    """Around code that goes through trees of state: what it stumbles over there is damage.

    Raises:
        DamagedCheckpoint: a tree is not what a session or an import writes.
    """
    try:
        yield
    except SpotsafeError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        reason = f"its state cannot be read: {type(error).__name__}: {error}"
        raise DamagedCheckpoint(checkpoint=checkpoint, file="index-*.json", reason=reason) from error


def _contents(indexes: Sequence[Index]) -> Contents:
    state = {name: tree for index in indexes for name, tree in index.state.items()}
    session = indexes[0].session if indexes else None
    pairs = itertools.chain(
        (pair for name, tree in state.items() for pair in _object(name, tree)),
        ((f"run.{key}", node) for key, node in (session or {}).items()),
    )
    values: dict[str, Json] = {}
    for name, node in _counted(pairs):
        values[_free(name, values) if name in values else name] = node
    used = set(tensor_names(list(values.values())))
    rest = {entry.name: None for index in indexes for entry in index.tensors if entry.name not in values}
    alone = {name: _tensor(name) for name in rest if name not in used}
    return Contents(values={**values, **alone}, inner={name: _tensor(name) for name in rest if name in used})


def _free(name: str, taken: Mapping[str, Json]) -> str:
    """Two paths may be spelled alike."""
    for _ in range(_ALIKE):
        if name not in taken:
            return name
        name += "'"
    raise ValueError(f"more than {_ALIKE} values are named {name[:80]!r}")


def _counted(pairs: Iterable[tuple[str, Json]]) -> Iterator[tuple[str, Json]]:
    """The same, up to what names may take: a long key above many short ones is repeated in each of their names."""
    total = 0
    for name, node in pairs:
        total += len(name)
        if total > _NAMES:
            raise ValueError(f"its names have more than {_NAMES:,} characters")
        yield name, node


def module_entries(tree: Mapping[str, Json]) -> Mapping[str, Json] | None:
    """The state_dict of a tracked module, key by key; None if `tree` is no module's."""
    return tree["state"] if tree.get(_KIND) == "module" else None


def objects(state: Mapping[str, Json]) -> Iterator[tuple[str, Mapping[str, Json]]]:
    """Path and tree of every tracked object; of dicts and lists of objects, those in them.

    To be used inside of `reading_trees`.
    """
    for path, tree in state.items():
        if tree.get(_KIND) in {"dict", "list"}:
            yield from objects({_at(path, key): inner for key, inner in tree["items"]})
        else:
            yield path, tree


def _tensor(name: str) -> Json:
    return {TAG: "tensor", "name": name}


def _object(path: str, tree: Json) -> Iterator[tuple[str, Json]]:
    """What is saved of one tracked object; the tree is what `spotsafe.tensors.kinds` makes."""
    kind = tree.get(_KIND) if isinstance(tree, Mapping) else None
    if kind == "module":
        for key, node in tree["state"].items():
            if type(node) is dict and node.get(TAG) == "tensor":  # nearly all: straight away
                yield f"{path}.{key}", node
            else:
                yield from _leaf(f"{path}.{key}", node)
    elif kind in {"tensor", "array", "value"}:
        yield from _leaf(path, tree["value"])
    elif kind in {"dict", "list"}:
        for key, inner in tree["items"]:
            yield from _object(_at(path, key), inner)
    elif kind == "optimizer":
        yield from _optimizer(path, tree)
    elif kind in {"stateful", "pair"}:
        yield from _members(path, tree["state"])
    elif isinstance(tree, Mapping) and TAG not in tree:
        yield from _members(path, {key: node for key, node in tree.items() if key != _KIND})
    else:
        yield from _leaf(path, tree)


def _optimizer(path: str, tree: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    if "groups" not in tree:  # of a class that torch does not know: as its state_dict() is
        yield from _walk(path, tree["state"])
        return
    for number, group in enumerate(tree["groups"]):
        yield from _members(f"{path}.param_groups[{number}]", group)
    for parameter, node in tree["state"]:
        yield from _members(f"{path}.{parameter}", node)
    for name, node in (("state", tree["shared"]), ("extra", tree["extra"])):
        if node:
            yield from _walk(f"{path}.{name}", node)


def _members(path: str, node: Json) -> Iterator[tuple[str, Json]]:
    """With names like ``path.key``, if all the keys are plain words."""
    if _is_plain(node) and all(key.isidentifier() for key in node):
        for key, value in node.items():
            yield from _walk(f"{path}.{key}", value)
    else:
        yield from _walk(path, node)


def _walk(path: str, node: Json) -> Iterator[tuple[str, Json]]:
    if _is_plain(node) and node:
        for key, value in node.items():
            yield from _walk(f"{path}[{key!r}]", value)
    else:
        yield from _leaf(path, node)


def _leaf(path: str, node: Json) -> Iterator[tuple[str, Json]]:
    """One value; a tensor subclass is the tensors that it is made of, since only a live one can be rebuilt."""
    if isinstance(node, Mapping) and node.get(TAG) == "torch.wrapper":
        for name, inner in node["inner"]:
            yield from _leaf(f"{path}.{name}", inner)
    else:
        yield path, node


def _is_plain(node: Json) -> bool:
    return type(node) is dict and TAG not in node


def _at(path: str, key: str | int) -> str:
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"
