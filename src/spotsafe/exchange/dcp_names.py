"""The names that torch.distributed.checkpoint gives to values, from and to the trees of a checkpoint.

It flattens a state_dict: dicts are gone into, and lists that hold tensors or dicts; what is left is a value under
its *fqn*, the keys on the way to it joined by dots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from spotsafe.checkpoint.naming import is_tensor, module_entries, objects
from spotsafe.checkpoint.typed_scalars import TAG
from spotsafe.exchange.optimizers import in_module, is_optimizer_tree
from spotsafe.exchange.trees import tree_of
from spotsafe.tensors.tree import Json

Path = tuple[str | int, ...]
"""Keys of dicts and positions in lists."""
_DICTS = ("dict", "ordered_dict", "defaultdict", "counter")


def fqn_of(path: Path) -> str:
    """The name of what lies at a path."""
    return ".".join(map(str, path))


def nest(values: Iterable[tuple[Path, Json]]) -> dict[str, dict[str, Json]]:
    """The trees of a program that tracked each of the state_dict's entries; the inverse of `flatten`.

    Args:
        values: path and typed JSON of each value.
    """
    nested: dict[str | int, Any] = {}
    for path, node in values:
        inner = nested
        for key in path[:-1]:
            inner = inner.setdefault(key, _Branch())
        inner[path[-1]] = node
    return {str(name): tree_of(_node(value)) for name, value in nested.items()}


class _Branch(dict[str | int, Any]):
    """A dict or a list on the way to values; tells it from a value that is typed JSON of a dict."""


def _node(value: Any) -> Json:
    if not isinstance(value, _Branch):
        return value
    parts = {key: _node(one) for key, one in value.items()}
    if all(type(key) is int for key in parts) and sorted(parts) == list(range(len(parts))):
        return [parts[at] for at in range(len(parts))]
    if TAG in parts or not all(type(key) is str for key in parts):
        return {TAG: "dict", "items": [[key, one] for key, one in parts.items()]}
    return parts


def flatten(state: Mapping[str, Json]) -> dict[str, tuple[Path, Json]]:
    """Everything in the trees of a checkpoint by fqn: its path, and its typed JSON.

    A module's weights are ``<tracked name>.<key>``. State of optimizers is named as `get_optimizer_state_dict` of
    torch.distributed.checkpoint names it: ``<tracked name>.state.<parameter>.exp_avg``, the parameter without the
    name under which its module was tracked.

    To be used inside of `reading_trees`.
    """
    trees = dict(objects(state))
    modules = [path for path, tree in trees.items() if module_entries(tree) is not None]
    found: dict[str, tuple[Path, Json]] = {}
    for name, tree in trees.items():
        for path, node in _object(name, tree, modules):
            found.setdefault(fqn_of(path), (path, node))
    return found


def _object(name: str, tree: Mapping[str, Json], modules: list[str]) -> Iterator[tuple[Path, Json]]:
    entries = module_entries(tree)
    if entries is not None:
        for key, node in entries.items():
            yield from _leaf((name, key), node)
    elif is_optimizer_tree(tree):
        yield from _optimizer(name, tree, modules)
    else:
        rest = {key: node for key, node in tree.items() if key != "kind"}
        yield from _walk((name,), tree.get("state", tree.get("value", rest)))


def _optimizer(name: str, tree: Mapping[str, Json], modules: list[str]) -> Iterator[tuple[Path, Json]]:
    for parameter, node in tree["state"]:
        yield from _walk((name, "state", in_module(parameter, modules)), node)
    for at, (options, owned) in enumerate(zip(tree["groups"], tree["order"], strict=True)):
        yield from _walk((name, "param_groups", at), options)
        yield (name, "param_groups", at, "params"), [in_module(one, modules) for one in owned]


def _walk(path: Path, node: Json) -> Iterator[tuple[Path, Json]]:
    if isinstance(node, list) and not _is_terminal(node):
        for at, one in enumerate(node):
            yield from _walk((*path, at), one)
    elif _is_dict(node):
        pairs = node.items() if TAG not in node else node["items"]
        for key, one in pairs:
            yield from _walk((*path, str(key)), one)
    else:
        yield from _leaf(path, node)


def _leaf(path: Path, node: Json) -> Iterator[tuple[Path, Json]]:
    """One value; a tensor subclass is the tensors that it is made of."""
    if isinstance(node, Mapping) and node.get(TAG) == "torch.wrapper":
        for name, inner in node["inner"]:
            yield from _leaf((*path, name), inner)
    else:
        yield path, node


def _is_dict(node: Json) -> bool:
    return isinstance(node, Mapping) and (TAG not in node or node[TAG] in _DICTS)


def _is_terminal(nodes: list[Json]) -> bool:
    """Whether a list is one value: it holds no tensor, no dict, and no list that does."""
    return not any(
        is_tensor(node) or _is_dict(node) or (isinstance(node, list) and not _is_terminal(node))
        for node in nodes
    )
