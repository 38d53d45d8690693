"""State of optimizers under parameter names, restored to the exact dtypes that were saved.

`optimizer.state_dict()` numbers parameters by position; a program that declares them in another order would
load every moment into the wrong place, silently where shapes agree. So what it returns is stored under names,
and a dict with the live positions is made of it for `load_state_dict`. That casts floating state to the
parameter's dtype (also fp32 moments of bf16 parameters, and uint8 state); what was saved is put back
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from spotsafe.checkpoint import typed
from spotsafe.errors import StateMismatch, UntrackedParameters
from spotsafe.tensors.context import Capturing, Restoring
from spotsafe.tensors.groups import match_groups
from spotsafe.tensors.inplace import has_casts
from spotsafe.tensors.tree import Json, is_wrapper

_BY_NAME, _BY_POSITION = "by name", "by position"
_IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
"""How a step is computed, not what: the program's choice of today wins over the checkpoint's."""


def is_optimizer(value: object) -> bool:
    """Whether a value is an optimizer, of torch or shaped like one."""
    if isinstance(value, torch.optim.Optimizer):
        return True
    groups = getattr(value, "param_groups", None)
    known = callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    return (
        known
        and isinstance(groups, list)
        and all(isinstance(one, dict) and "params" in one for one in groups)
    )


def parameters_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Every parameter of an optimizer, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]


def capture_optimizer(optimizer: Any, path: str, capturing: Capturing) -> dict[str, Json]:
    """The typed tree of an optimizer. Its own hooks and overrides of `state_dict` are used.

    Raises:
        UntrackedParameters: a parameter of it has no name.
    """
    collector, order = capturing.collector, _order(optimizer, path, capturing.names)
    state = _state_dict(optimizer, path, capturing.warn)
    head = {"class": type(optimizer).__name__, "order": order}
    if not _is_standard(state, order):
        return {**head, "form": _BY_POSITION, "state": collector.encode(state, path, role="moment")}
    named = _names_of_keys(state, order)
    own = {key: value for key, value in state["state"].items() if key in named}
    shared = {key: value for key, value in state["state"].items() if key not in named}
    extra = {key: value for key, value in state.items() if key not in {"state", "param_groups"}}
    groups = [{key: value for key, value in one.items() if key != "params"} for one in state["param_groups"]]
    return {
        **head,
        "form": _BY_NAME,
        "groups": [collector.encode(one, f"{path}.param_groups[{at}]") for at, one in enumerate(groups)],
        "state": _moments([(named[key], value) for key, value in own.items()], path, capturing),
        "shared": collector.encode(shared, f"{path}.state", role="moment"),
        "extra": collector.encode(extra, path),
        "on_host": sorted(_on_host(optimizer)),
    }


def _moments(entries: Sequence[tuple[str, object]], path: str, capturing: Capturing) -> Json:
    known = capturing.known.moments(entries, path, capturing.collector)
    if known is not None:
        return known
    members = capturing.collector.members
    return [[name, members(value, f"{path}.{name}", role="moment")] for name, value in entries]


def _order(optimizer: Any, path: str, names: Mapping[int, str]) -> list[list[str]]:
    try:
        return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    except KeyError:
        raise UntrackedParameters(f"{path} holds parameters that no tracked object owns") from None


def _is_standard(state: object, order: Sequence[Sequence[str]]) -> TypeGuard[Mapping[str, Any]]:
    """Whether a state dict has the form that torch documents, for the live groups."""
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(order):
        return False
    keys = [one.get("params") if isinstance(one, Mapping) else None for one in groups]
    return all(
        isinstance(key, list) and len(key) == len(names) for key, names in zip(keys, order, strict=True)
    )


def _names_of_keys(state: Mapping[str, Any], order: Sequence[Sequence[str]]) -> dict[Any, str]:
    keys = [key for group in state["param_groups"] for key in group["params"]]
    return dict(zip(keys, (name for names in order for name in names), strict=True))


def _state_dict(optimizer: Any, path: str, warn: Callable[[str], None]) -> Any:
    """`optimizer.state_dict()`, which fails on state whose parameter is in no group any more."""
    state = getattr(optimizer, "state", None)
    if not isinstance(state, dict):
        return optimizer.state_dict()
    known = {id(parameter) for parameter in parameters_of(optimizer)}
    orphans = [key for key in state if isinstance(key, torch.Tensor) and id(key) not in known]
    if not orphans:
        return optimizer.state_dict()
    warn(
        f"{path} keeps state of {len(orphans)} tensors that are in none of its parameter groups any more "
        "(replaced parameters?); it is not saved"
    )
    everything = dict(state)
    try:
        for key in orphans:
            del state[key]
        return optimizer.state_dict()
    finally:
        state.clear()
        state.update(everything)


def _on_host(optimizer: Any) -> set[str]:
    """Keys of state that lies on the CPU while its parameter does not; for torch's ``step`` torch decides."""
    state = getattr(optimizer, "state", None)
    found: set[str] = set()
    for parameter, entries in state.items() if isinstance(state, dict) else ():
        if (
            isinstance(parameter, torch.Tensor)
            and parameter.device.type != "cpu"
            and isinstance(entries, dict)
        ):
            tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
            found |= {str(key) for key, value in tensors.items() if value.device.type == "cpu"}
    return found - {"step"}


def optimizer_problems(optimizer: Any, saved: Json, path: str, restoring: Restoring) -> list[str]:
    """How the classes, groups and parameters of a saved optimizer and the live one differ."""
    order = _order(optimizer, path, restoring.names)
    kind, was = type(optimizer).__name__, saved["class"]
    if was not in {kind, None} and restoring.strict:
        return [f"{path}: saved from {was}, program has {kind}"]
    if _needs_order(optimizer, saved):
        problem = f"{path}: {kind} depends on the order of its parameters, which was {saved['order']} and is {order}"
        return [problem] if order != _saved_order(saved, restoring) else []
    _, problems = match_groups(_saved_order(saved, restoring), order)
    return [f"{path}: {problem}" for problem in problems] if restoring.strict else []


def _saved_order(saved: Json, restoring: Restoring) -> list[list[str]]:
    return [[restoring.aliases.get(name, name) for name in names] for names in saved["order"]]


def _needs_order(optimizer: object, saved: Json) -> bool:
    return saved["form"] == _BY_POSITION or isinstance(optimizer, torch.optim.LBFGS)


def restore_optimizer(optimizer: Any, saved: Json, path: str, restoring: Restoring) -> None:
    """Load an optimizer in place through its own `load_state_dict`, then put exact dtypes back.

    Raises:
        StateMismatch: the optimizer refuses it.
    """
    if saved["class"] not in {type(optimizer).__name__, None}:  # None: imported, and not known
        restoring.skip(f"{path}: saved from {saved['class']}, program has {type(optimizer).__name__}")
        return
    if saved["form"] == _BY_POSITION:
        live = optimizer.state_dict()
        _load(optimizer, restoring.source.decode(saved["state"], live, path=path), path)
        return
    source = restoring.source.on_cpu()
    state = source.decode(saved["extra"], path=path)
    state["param_groups"] = _groups(optimizer, saved, path, restoring)
    states = {restoring.aliases.get(name, name): node for name, node in saved["state"]}
    parameters = list(parameters_of(optimizer))
    exact: list[tuple[torch.Tensor, Any]] = []
    state["state"] = dict(source.decode(saved["shared"], path=f"{path}.state"))
    for position, parameter in enumerate(parameters):
        name = restoring.names[id(parameter)]
        node = states.pop(name, None)
        if node is not None:
            present = optimizer.state.get(parameter, typed.MISSING)
            value = source.decode(node, present, path=f"{path}.{name}")
            exact.append((parameter, value))
            state["state"][position] = _shield(value) if _loads_as_torch(optimizer) else _containers(value)
    for name in states:
        restoring.skip(f"{path}: state of {name}: in the checkpoint, not in the program")
    _load(optimizer, state, path)
    for parameter, value in exact:
        _put_back(optimizer, parameter, value, frozenset(saved["on_host"]))


def _groups(optimizer: Any, saved: Json, path: str, restoring: Restoring) -> list[dict[str, Any]]:
    """The saved options for the live groups, with the positions of the live parameters."""
    order = _order(optimizer, path, restoring.names)
    match, problems = match_groups(_saved_order(saved, restoring), order)
    for problem in problems:
        restoring.skip(f"{path}: {problem}")
    groups, position = [], 0
    for live, found in zip(optimizer.param_groups, match, strict=True):
        options = {key: value for key, value in live.items() if key not in {"params", "param_names"}}
        if found is not None:
            flags = {key: live[key] for key in _IMPLEMENTATION if key in live}
            options = {**_options(saved, found, options, path, restoring), **flags}
            options.pop("param_names", None)  # of the saved order; torch keeps the live ones
        count = len(live["params"])
        groups.append({**options, "params": list(range(position, position + count))})
        position += count
    return groups


def _options(saved: Json, at: int, live: object, path: str, restoring: Restoring) -> dict[str, Any]:
    options: dict[str, Any] = restoring.source.decode(
        saved["groups"][at], live, path=f"{path}.param_groups[{at}]"
    )
    return options


def restore_group_options(optimizer: Any, saved: Json, path: str, restoring: Restoring) -> None:
    """Set the saved options (lr, betas, ...) again, after a scheduler that was made later changed them."""
    if saved["form"] == _BY_NAME:
        for live, options in zip(
            optimizer.param_groups, _groups(optimizer, saved, path, restoring), strict=True
        ):
            live.update({key: value for key, value in options.items() if key != "params"})


def _load(optimizer: Any, state: Any, path: str) -> None:
    try:
        optimizer.load_state_dict(state)
    except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise StateMismatch(
            f"{path} refused its saved state: {error}", problems=[f"{path}: {error}"]
        ) from error


def _loads_as_torch(optimizer: Any) -> bool:
    load = getattr(type(optimizer), "load_state_dict", None)
    return getattr(load, "__module__", "").startswith("torch.optim")


@dataclass(frozen=True, slots=True)
class _Shielded:
    """Hides a value from torch's `load_state_dict`, which rebuilds whatever can be iterated, text included."""

    value: Any


def _shield(value: Any) -> Any:
    if type(value) in {dict, list, tuple}:
        return _containers(value, _shield)
    if isinstance(value, torch.Tensor):
        # torch casts to the parameter's dtype, which these may not be able to.
        return _Shielded(value) if is_wrapper(value) or not has_casts(value.dtype) else value
    return _Shielded(value) if isinstance(value, Iterable) else value


def _containers(value: Any, each: Callable[[Any], Any] | None = None) -> Any:
    """New dicts, lists and tuples around the same values, so that nobody empties ours."""
    each = each or _containers
    if type(value) is dict:
        return {key: each(item) for key, item in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(each(item) for item in value)
    return value


def _put_back(optimizer: Any, parameter: torch.Tensor, saved: Any, on_host: frozenset[str]) -> None:
    live = optimizer.state.get(parameter)
    if not isinstance(live, dict) or not isinstance(saved, dict):
        return
    for key in live.keys() & saved.keys():
        device = torch.device("cpu") if key in on_host else parameter.device
        if key != "step":  # where and what it must be depends on how the live optimizer computes
            live[key] = _exact(live[key], saved[key], device)


def _exact(live: Any, saved: Any, device: torch.device) -> Any:
    """`live` with whatever loading changed in dtype, device or kind as it was saved."""
    if isinstance(live, _Shielded):
        return live.value.to(device) if isinstance(live.value, torch.Tensor) else live.value
    if isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor):
        same = live.dtype == saved.dtype and live.device == device
        return live if same or live.shape != saved.shape else saved.to(device)
    if isinstance(live, dict) and isinstance(saved, dict):
        return {
            key: _exact(value, saved[key], device) if key in saved else value for key, value in live.items()
        }
    if type(live) in {list, tuple} and type(live) is type(saved) and len(live) == len(saved):
        return type(live)(_exact(one, other, device) for one, other in zip(live, saved, strict=True))
    return live
