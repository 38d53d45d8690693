"""State of modules under names that do not depend on wrappers: plain, compiled and parallel models fit.

`torch.compile` puts ``_orig_mod.`` into the names, DistributedDataParallel and DataParallel ``module.``.
These segments are left out where such a wrapper put them, and only there: a real submodule called ``module``
keeps its name.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from spotsafe.checkpoint import typed
from spotsafe.checkpoint.strict_json import is_text
from spotsafe.errors import StateMismatch, UnsupportedState
from spotsafe.tensors.context import Capturing, Restoring, describe, tensor_problems
from spotsafe.tensors.inplace import spread_buffers, write_unusual
from spotsafe.tensors.tree import Json, is_wrapper

_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    (
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "_fsdp_wrapped_module",
    ),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)
"""Where each wrapper class lives, and the attribute in which it keeps the real module."""
_EXTRA = "_extra_state"
"""How keys end under which a module keeps what is no parameter and no buffer; it may keep the very object."""
_MANY = 4096
_known: dict[type[nn.Module], str | None] = {}
"""Class -> the attribute in which it keeps the real module, if it is a wrapper."""


def wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute under which `module`, if it is a wrapper, keeps the real one."""
    kind = type(module)
    if kind not in _known:
        if len(_known) > _MANY:  # classes made at run time, over and over
            _known.clear()
        _known[kind] = _find_attribute(kind)
    return _known[kind]


def _find_attribute(kind: type[nn.Module]) -> str | None:
    for home, name, attribute in _WRAPPERS:
        # A wrapper whose module is not imported has no instances; one that has an instance is imported for good.
        wrapper = getattr(sys.modules.get(home), name, None)
        if wrapper is not None and issubclass(kind, wrapper):
            return attribute
    return None


class ModuleNames:
    """The names inside one module: canonical ones, and those that it uses as it is wrapped now."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.wrapped = any(wrapped_attribute(part) for part in root.modules())
        self._prefixes: dict[str, str] = {}
        self._customised: dict[str, bool] = {}

    def canonical(self, key: str) -> str:
        """`key` without the segments that wrappers put there."""
        if not self.wrapped:
            return key
        prefix, _, last = key.rpartition(".")
        if prefix not in self._prefixes:
            self._prefixes[prefix] = self._strip(prefix)
        kept = self._prefixes[prefix]
        return f"{kept}.{last}" if kept else last

    def module(self, path: str) -> str:
        """The canonical path of a module."""
        return self._strip(path) if self.wrapped else path

    def raw(self, key: str) -> str:
        """The inverse of `canonical`."""
        return ".".join(self._unstripped(key)) if self.wrapped else key

    def loads_its_own_way(self, key: str) -> bool:
        """Whether a module on the way to `key` has a loading of its own, so that only loading tells what fits."""
        prefix = self.raw(key).rpartition(".")[0]
        if prefix not in self._customised:
            module: nn.Module | None = self._root
            found = customised(self._root)
            for segment in prefix.split("."):
                module = _child(module, segment)
                found = found or (module is not None and customised(module))
            self._customised[prefix] = found
        return self._customised[prefix]

    def _strip(self, path: str) -> str:
        """Leave out wrappers' segments. Hooks may have removed such a segment already; then none is missed."""
        module: nn.Module | None = self._root
        kept = []
        for segment in path.split(".") if path else ():
            put_there = False
            while module is not None and not put_there and (attribute := wrapped_attribute(module)):
                module = _child(module, attribute)
                put_there = segment == attribute
            if not put_there:
                kept.append(segment)
                module = _child(module, segment)
        return ".".join(kept)

    def _unstripped(self, key: str) -> Iterator[str]:
        module: nn.Module | None = self._root
        for segment in key.split("."):
            while module is not None and (attribute := wrapped_attribute(module)):
                yield attribute
                module = _child(module, attribute)
            yield segment
            module = _child(module, segment)


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter under each of its canonical names; tied ones appear under all of them."""
    names, found = ModuleNames(module), _all_parameters(module)
    return ((names.canonical(name), parameter) for name, parameter in found) if names.wrapped else found


def _all_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """`module.named_parameters(remove_duplicate=False)`, without the hash of every parameter that torch asks for."""
    if type(module).named_parameters is not nn.Module.named_parameters:
        yield from module.named_parameters(remove_duplicate=False)
        return
    for prefix, part in module.named_modules(remove_duplicate=False):
        start = f"{prefix}." if prefix else ""
        for name, parameter in part._parameters.items():  # noqa: SLF001 - as torch's own method does
            if parameter is not None:
                yield start + name, parameter


def capture_module(module: nn.Module, path: str, capturing: Capturing) -> dict[str, Json]:
    """The typed tree of a module. Its own hooks and overrides of `state_dict` are used."""
    state, names = _state_dict(module, path), ModuleNames(module)
    canonical = names.canonical if names.wrapped else str
    roles = {name: "buffer" for name, _ in module.named_buffers(remove_duplicate=False)}
    frozen = []
    for name, parameter in _all_parameters(module):
        if parameter.requires_grad:
            roles[name] = "parameter"
        else:
            roles[name] = "other"
            frozen.append(canonical(name))
    encode, role_of, nodes = capturing.collector.encode, roles.get, dict[str, Json]()
    for key, value in state.items():
        name = canonical(key)
        if name in nodes or name == "$":
            raise UnsupportedState(f"{path}: two entries of its state_dict are called {name!r}", path=path)
        nodes[name] = encode(value, f"{path}.{name}", role=role_of(key, "other"))
    versions = {names.module(key): value for key, value in getattr(state, "_metadata", {}).items()}
    if "$" in versions or not all(map(_is_version, versions.values())):
        versions = capturing.collector.encode(versions, f"{path}.state_dict()._metadata")
    return {"state": nodes, "frozen": frozen, "metadata": versions}


def _is_version(value: object) -> bool:
    """Whether a module's metadata is what torch's own have, which is JSON as it stands."""
    return type(value) is dict and value.keys() == {"version"} and type(value["version"]) is int


def _state_dict(module: nn.Module, path: str) -> Mapping[str, Any]:
    state: object = module.state_dict()
    if isinstance(state, Mapping):
        keys: list[Any] = list(state)
        if set(map(type, keys)) <= {str} and is_text("".join(keys)):
            return state
    raise UnsupportedState(f"{path}: its state_dict() is no dict whose keys are text", path=path)


def module_problems(module: nn.Module, saved: Json, path: str, restoring: Restoring) -> list[str]:
    """Every name, shape and dtype that differs between a saved module and the live one."""
    names = ModuleNames(module)
    live = {names.canonical(key): value for key, value in _state_dict(module, path).items()}
    nodes: Mapping[str, Json] = saved["state"]
    problems = []
    for name in live.keys() | nodes.keys():
        if names.loads_its_own_way(name):
            continue  # such a module may make, rename or resize what it loads; loading will tell
        if name not in nodes and restoring.strict:
            problems.append(f"{path}.{name}: {describe(live[name])} in the program, not in the checkpoint")
        elif name not in live and restoring.strict:
            problems.append(
                f"{path}.{name}: {restoring.describe(nodes[name])} in the checkpoint, not in the program"
            )
        elif name in live and name in nodes:
            problems += tensor_problems(live[name], nodes[name], f"{path}.{name}", restoring)
    return sorted(problems)


def restore_module(module: nn.Module, saved: Json, path: str, restoring: Restoring) -> None:
    """Load a module in place through its own `load_state_dict`.

    Raises:
        StateMismatch: the module refuses it.
    """
    names = ModuleNames(module)
    live = {names.canonical(key): (key, value) for key, value in _state_dict(module, path).items()}
    own = any(customised(part) for part in module.modules())
    state: OrderedDict[str, Any] = OrderedDict()
    for name, node in saved["state"].items():
        if name not in live and not restoring.strict and not names.loads_its_own_way(name):
            restoring.skip(f"{path}.{name}: in the checkpoint, not in the program")
            continue
        key, present = live[name] if name in live else (names.raw(name), typed.MISSING)
        whole = own or name.endswith(_EXTRA)
        state[key] = _value(node, present, f"{path}.{name}", restoring, whole=whole)
    for name in live.keys() - saved["state"].keys():
        restoring.skip(f"{path}.{name}: in the program, not in the checkpoint")
    setattr(state, "_metadata", _versions(module, names, saved, restoring))  # noqa: B010 - where torch looks for it
    spread_buffers(module, state)
    _load(module, state, path, strict=restoring.strict, own=own)
    _compare_frozen(module, saved, path, restoring)


def _value(node: Json, live: object, path: str, restoring: Restoring, *, whole: bool) -> Any:
    """What is handed to `load_state_dict`. torch's own loading only copies from it, so no copy is made before."""
    if isinstance(node, Mapping) and node.get("$") == "tensor" and not whole:
        return restoring.source.view(node["name"])
    # Of a plain tensor nothing is needed but the values; its class may be one that only its module can make.
    present = typed.MISSING if isinstance(live, Tensor) and not is_wrapper(live) else live
    return restoring.source.decode(node, present, path=path)


def _load(module: nn.Module, state: OrderedDict[str, Any], path: str, *, strict: bool, own: bool) -> None:
    try:
        if not own:
            write_unusual(module, state)
        if strict:
            module.load_state_dict(state)
        else:
            module.load_state_dict(state, strict=False)
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise StateMismatch(
            f"{path} refused its saved state: {error}", problems=[f"{path}: {error}"]
        ) from error


def _versions(
    module: nn.Module, names: ModuleNames, saved: Json, restoring: Restoring
) -> OrderedDict[str, Any]:
    versions = restoring.source.decode(saved["metadata"])
    parts = [(part, names.module(part)) for part, _ in module.named_modules(remove_duplicate=False)]
    return OrderedDict((part, versions[name]) for part, name in parts if name in versions)


def _compare_frozen(module: nn.Module, saved: Json, path: str, restoring: Restoring) -> None:
    if saved["frozen"] is None:  # it was made of a file that does not tell
        return
    frozen = set(saved["frozen"])
    for name, parameter in named_parameters(module):
        if name in saved["state"] and parameter.requires_grad is (name in frozen):
            was = "frozen" if name in frozen else "trainable"
            restoring.warn(
                f"{path}.{name} was saved {was}, but has requires_grad={parameter.requires_grad} now"
            )


def _child(module: nn.Module | None, name: str) -> nn.Module | None:
    # Registered children only: `getattr` would run properties.
    children = {} if module is None else module._modules  # noqa: SLF001 - torch has no public way to them
    return children[name] if name in children else None  # noqa: SIM401 - a scripted module's have no `get`


def customised(module: nn.Module) -> bool:
    """Whether a module saves or loads in another way than torch's modules do."""
    kind = type(module)
    hooks = ("_load_state_dict_pre_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
    return any(getattr(module, name) for name in hooks) or any(
        not getattr(getattr(kind, name), "__module__", "").startswith("torch.")
        for name in ("_load_from_state_dict", "load_state_dict", "state_dict", "_save_to_state_dict")
    )
