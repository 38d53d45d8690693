"""What a capture says of a module, kept for the next one; `kept_moments` does the same for optimizers.

A module of torch's own ways (no hook, no override of what `state_dict` is made by) is captured without `state_dict`,
from the tensors that its parts hold. All that such a capture depends on is a `Look`: the classes of the parts, keys
and tensors, and of each tensor its role, address, dtype, shape and device. As long as two looks are the same, so are
the captures, and the last one is taken as it is. Values are no part of a capture, which holds the live tensors.

Whatever is not seen to be of that kind is captured in full, by `spotsafe.tensors.modules`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from spotsafe.checkpoint.index import KeptTree
from spotsafe.checkpoint.strict_json import is_text
from spotsafe.tensors.kept_moments import KeptMoments
from spotsafe.tensors.look import PLAIN_TYPES, Captured, Look, all_are, look_at_tensors, nodes_of
from spotsafe.tensors.modules import ModuleNames
from spotsafe.tensors.optimizers import is_optimizer, parameters_of
from spotsafe.tensors.owners import Names
from spotsafe.tensors.tree import Collector, Json, NamedTensor, outranks

_METHODS = (
    "state_dict",
    "_save_to_state_dict",
    "get_extra_state",
    "modules",
    "named_modules",
    "named_parameters",
    "named_buffers",
    "_named_members",
)
_methods_of = attrgetter(*_METHODS)
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_DICTS = (dict, OrderedDict)
_MOST_VERSION = 1 << 53


class KeptCapture:
    """The last capture, as far as the next one may be the same."""

    def __init__(self) -> None:
        self._looks: dict[int, Look | None] = {}
        self._last: dict[str, Captured] = {}
        self._now: dict[str, Captured] = {}
        self._parts: list[tuple[str, object]] = []
        self._names: Names | None = None
        self._tensors: tuple[NamedTensor, ...] = ()
        self._moments = KeptMoments()

    def begin(self) -> None:
        """A new capture begins: look at everything again, and let go of what the last one did not meet."""
        self._looks, self._last, self._now = {}, self._now, {}
        self._moments.begin()

    def names(self, parts: Iterable[tuple[str, object]], find: Callable[[], Names]) -> Names:
        """The names of all parameters; to be asked for after `begin` and before `module`.

        Args:
            parts: path and object of everything tracked.
            find: finds the names.
        """
        parts = list(parts)
        known = self._names
        if known is None or not self._same_parts(parts) or _any_nameless(parts, known):
            known = find()
        self._parts, self._names = parts, known
        return known

    def _same_parts(self, parts: Sequence[tuple[str, object]]) -> bool:
        return (
            [path for path, _ in parts] == [path for path, _ in self._parts]
            and all_are([part for _, part in parts], [part for _, part in self._parts])
            and all(self._is_as_it_was(path, part) for path, part in parts if isinstance(part, nn.Module))
        )

    def _is_as_it_was(self, path: str, module: nn.Module) -> bool:
        look, last = self._look(module), self._last.get(path)
        return look is not None and last is not None and look.same_as(last.look)

    def _look(self, module: nn.Module) -> Look | None:
        if id(module) not in self._looks:
            self._looks[id(module)] = _look_at(module)
        return self._looks[id(module)]

    def module(self, module: nn.Module, path: str, collector: Collector) -> Json | None:
        """The typed tree of a module, whose tensors the collector then has; None if it must be captured in full."""
        look = self._look(module)
        if look is None:
            return None
        captured = self._last.get(path)
        if captured is None or not look.same_as(captured.look):
            captured = _capture(look, module, path)
        if captured is None or not collector.adopt(captured.tensors, captured.names, captured.places):
            return None
        self._now[path] = captured
        return captured.tree

    def moments(self, entries: Sequence[tuple[str, object]], path: str, collector: Collector) -> Json | None:
        """The typed tree of what an optimizer keeps of its parameters; see `KeptMoments.tree`."""
        return self._moments.tree(entries, path, collector)

    def end(self, tensors: tuple[NamedTensor, ...]) -> tuple[NamedTensor, ...]:
        """The tensors of the whole capture; the very tuple of the last one if nothing in it is another."""
        self._looks = {}
        if not all_are(tensors, self._tensors):
            self._tensors = tensors
        return self._tensors


def _any_nameless(parts: Iterable[tuple[str, object]], names: Names) -> bool:
    return any(
        id(one) not in names.of for _, part in parts if is_optimizer(part) for one in parameters_of(part)
    )


def _look_at(module: nn.Module) -> Look | None:
    """What there is to see of a module; None if it is not of torch's own ways, or holds an unusual tensor."""
    if not _is_usual(module):
        return None
    found = list(module.named_modules(remove_duplicate=False))
    prefixes, parts = [prefix for prefix, _ in found], [part for _, part in found]
    if not all(map(_is_usual, parts)):
        return None
    keys: list[str] = []
    roles: list[str] = []
    tensors: list[Any] = []
    for prefix, part in found:
        if not (part._parameters or part._buffers):  # noqa: SLF001 - see `_is_usual`
            continue
        start = f"{prefix}." if prefix else ""
        parameters, buffers = _present(part._parameters), _persistent_buffers(part)  # noqa: SLF001 - see `_is_usual`
        keys += [start + name for held in (parameters, buffers) for name in held]
        tensors += [*parameters.values(), *buffers.values()]
        roles += ["parameter" if one.requires_grad else "other" for one in parameters.values()]
        roles += ["buffer"] * len(buffers)
    return look_at_tensors(
        tensors,
        types=PLAIN_TYPES,
        prefixes=prefixes,
        kinds=list(map(type, parts)),
        versions=[part._version for part in parts],  # noqa: SLF001 - what `state_dict` puts beside the tensors
        keys=keys,
        roles=roles,
    )


def _is_usual(part: nn.Module) -> bool:
    """Whether `state_dict` of a module, without those below it, is made of its dicts in torch's own way."""
    kind, own = type(part), vars(part)
    return (
        all_are(_methods_of(kind), _methods_of(nn.Module))
        and own.keys().isdisjoint(_METHODS)
        and not (own.get(_HOOKS[0], True) or own.get(_HOOKS[1], True))
        and type(own.get("_parameters")) in _DICTS
        and type(own.get("_buffers")) in _DICTS
        and type(own.get("_modules")) in _DICTS
        and type(part._version) is int  # noqa: SLF001 - what `state_dict` puts beside the tensors
        and 0 <= part._version < _MOST_VERSION  # noqa: SLF001 - as above
    )


def _present(held: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in held.items() if one is not None}


def _persistent_buffers(part: nn.Module) -> dict[str, Any]:
    passing = part._non_persistent_buffers_set  # noqa: SLF001 - as torch's own method does
    return {name: one for name, one in _present(part._buffers).items() if name not in passing}  # noqa: SLF001 - as above


def _capture(look: Look, module: nn.Module, path: str) -> Captured | None:
    """The capture of a look; None if its names need the care of a full one."""
    keys, prefixes, names = look.keys, look.prefixes, ModuleNames(module)
    if names.wrapped:
        keys, prefixes = list(map(names.canonical, keys)), list(map(names.module, prefixes))
    distinct = frozenset(keys)
    if len(distinct) != len(keys) or "$" in distinct or "$" in prefixes:
        return None
    if not is_text("".join(keys)) or not is_text("".join(prefixes)):
        return None
    labels = [f"{path}.{key}" for key in keys]
    if len(set(look.addresses)) == len(keys):  # as nearly always: no tensor is there twice
        tensors = list(map(NamedTensor, labels, look.tensors, look.roles))
        places = dict(zip(look.addresses, range(len(keys)), strict=True))
    else:
        labels, tensors, places = _gathered(look, labels)
        if len(tensors) != len(set(map(id, look.tensors))):
            return (
                None  # two tensors begin at one place: whether they are aliases is for the collector to say
            )
    tree = KeptTree(
        kind="module",
        state=nodes_of(keys, labels, look.devices),
        frozen=[key for key, role in zip(keys, look.roles, strict=True) if role == "other"],
        metadata={
            prefix: {"version": version} for prefix, version in zip(prefixes, look.versions, strict=True)
        },
    )
    taken = frozenset(one.name for one in tensors)
    return Captured(look=look, tree=tree, tensors=tensors, names=taken, places=places)


def _gathered(look: Look, labels: Sequence[str]) -> tuple[list[str], list[NamedTensor], dict[int, int]]:
    """As a collector does: the name of each entry, each tensor once, and where in them each address is."""
    names: list[str] = []
    tensors: list[NamedTensor] = []
    places: dict[int, int] = {}
    for label, tensor, role, address in zip(labels, look.tensors, look.roles, look.addresses, strict=True):
        at = places.setdefault(address, len(tensors))
        if at == len(tensors):
            tensors.append(NamedTensor(label, tensor, role))
        elif outranks(role, tensors[at].role):
            tensors[at] = tensors[at]._replace(role=role)
        names.append(tensors[at].name)
    return names, tensors, places
