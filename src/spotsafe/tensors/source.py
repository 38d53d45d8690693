"""From a checkpoint's typed JSON and tensors back to values, in memory of their own.

What an object gets here it may keep, change or empty: nothing is shared with another object, nor with the
files' memory, which is freed as soon as the restore is over.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from spotsafe.checkpoint import typed
from spotsafe.errors import SpotsafeError, StateMismatch
from spotsafe.tensors import arrays
from spotsafe.tensors.giving import Giving
from spotsafe.tensors.memory import CPU
from spotsafe.tensors.tree import COMPRESSED, PLAIN, WORDS, Json, as_bytes, clone, is_wrapper

_Word = TypeVar("_Word")
_Value = TypeVar("_Value")


class Source:
    """Rebuilds the values of a saved state, for one object.

    What `decode` and `tensor` return is a copy that the object may keep and change; aliases inside it stay
    aliases.

    Args:
        tensors: what the checkpoint holds, by name.
        on_cpu: leave every tensor on the CPU, whatever it was on.
        copy: whether the values get memory of their own; not needed for tensors that nobody else has.
        lenient: give an `Unbound` for an Enum or a dataclass without a live counterpart instead of an error.
        giving: what `on_cpu` may hand over without a copy.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        on_cpu: bool = False,
        copy: bool = True,
        lenient: bool = False,
        giving: Giving | None = None,
    ) -> None:
        self._tensors, self._on_cpu, self._lenient, self._copy = tensors, on_cpu, lenient, copy
        self._giving = giving
        self._copies: dict[Hashable, Any] = {}

    def decode(self, node: Json, live: object = typed.MISSING, *, path: str = "") -> Any:
        """The value of a typed tree.

        Args:
            node: the tree.
            live: the object's value now: devices and classes follow it.
            path: where the tree is, for errors.
        """
        if type(node) is dict and node.get("$") == "tensor":
            value = self._tensor(node, live)
            return value if live is typed.MISSING else _in_class(value, live)
        return typed.decode(node, leaf=self._leaf, live=live, path=path, lenient=self._lenient)

    def on_cpu(self) -> Source:
        """The same, but every tensor stays on the CPU whatever it was on, and what nobody else needs is no copy."""
        return Source(self._tensors, on_cpu=True, giving=self._giving)

    def view(self, name: str) -> torch.Tensor:
        """The saved tensor itself, only to be copied from.

        Raises:
            StateMismatch: the checkpoint has no tensor of this name.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise StateMismatch(f"the checkpoint refers to a tensor {name!r} that it does not hold") from None

    def _once(self, key: Hashable, build: Callable[[], _Value]) -> _Value:
        """What was built for this key before: aliases inside an object stay aliases."""
        if key not in self._copies:
            self._copies[key] = build()
        value: _Value = self._copies[key]
        return value

    def _own(self, name: str, device: torch.device) -> torch.Tensor:
        saved = self.view(name)
        if self._on_cpu and self._giving is not None:
            own = self._giving.give(name, saved)
        else:
            own = clone(saved) if self._copy else saved
        return own if own.device == device else own.to(device)

    def _tensor(self, node: Mapping[str, Json], live: object) -> torch.Tensor:
        name, device = node["name"], CPU if self._on_cpu else _device(node, live)
        copy = self._copies.get((name, device))
        if copy is None:
            copy = self._copies[name, device] = self._own(name, device)
        trained, parameter = bool(node.get("requires_grad")), bool(node.get("parameter"))
        if trained or parameter:
            return self._once((name, device, trained, parameter), lambda: _as_leaf(copy, trained, parameter))
        return copy

    def _leaf(self, node: Mapping[str, Json], live: object = typed.MISSING, path: str = "") -> Any:
        tag = node["$"]
        if tag == "tensor":
            return _in_class(self._tensor(node, live), live)
        build = _BUILDERS.get(tag)
        if build is None:
            return NotImplemented
        try:
            return build(self, node, live, path)
        except SpotsafeError:
            raise
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise StateMismatch(f"{path}: the checkpoint holds no proper {tag} there: {first}") from error

    def sparse_coo(self, node: Mapping[str, Json], live: object, path: str) -> torch.Tensor:
        """A sparse tensor in coordinate form, coalesced or not as it was."""
        indices, values = (self._part(node, name, live, path) for name in ("indices", "values"))
        return self._once(
            _names_in(node),
            lambda: torch.sparse_coo_tensor(
                indices,
                values,
                node["shape"],
                device=values.device,
                is_coalesced=node["coalesced"],
                check_invariants=True,
            ),
        )

    def sparse_compressed(self, node: Mapping[str, Json], live: object, path: str) -> torch.Tensor:
        """A sparse tensor of a compressed layout."""
        layout = _word(node["$"].removeprefix("torch."), torch.layout)
        names = (*COMPRESSED[layout], "values")
        first, second, values = (self._part(node, name, live, path) for name in names)
        return self._once(
            _names_in(node),
            lambda: torch.sparse_compressed_tensor(
                first,
                second,
                values,
                size=node["shape"],
                layout=layout,
                device=values.device,
                check_invariants=True,
            ),
        )

    def _part(self, node: Mapping[str, Json], name: str, live: object, path: str) -> torch.Tensor:
        """A component of a sparse tensor, on the device of the live tensor in whose place it comes."""
        part: torch.Tensor = self.decode(node[name], path=f"{path}.{name}")
        return part.to(live.device) if isinstance(live, torch.Tensor) and not self._on_cpu else part

    def array(self, node: Mapping[str, Json], _live: object, path: str) -> np.ndarray[Any, Any]:
        """A numpy array."""
        name, form = node["values"]["name"], (node["dtype"], node["shape"])
        first, array = self._once(
            ("ndarray", name),
            lambda: (form, arrays.from_bytes(node, as_bytes(self.view(name)).numpy(), path)),
        )
        if form != first:  # else a small file could ask for any number of copies
            raise ValueError(f"two different arrays of one tensor {name[:80]!r}")
        return array

    def wrapper(self, node: Mapping[str, Json], live: Any, path: str) -> Any:
        """A tensor subclass, in the class of the live tensor at its place, or in one that the program has made."""
        made_of = live.__tensor_flatten__()[1] if is_wrapper(live) else typed.MISSING
        inner = {
            name: self.decode(part, getattr(live, name, typed.MISSING), path=f"{path}.{name}")
            for name, part in node["inner"]
        }
        context = self.decode(node["context"], made_of, path=f"{path}.__tensor_flatten__()[1]")
        kind = type(live) if is_wrapper(live) else _subclass(node.get("class"), path)
        size, stride = torch.Size(node["shape"]), tuple(node["stride"])
        return self._once(_names_in(node), lambda: kind.__tensor_unflatten__(inner, context, size, stride))


def _names_in(node: Json) -> Hashable:
    """The components of a composed tensor: two with the same ones are one."""
    return node["$"], tuple(typed.tensor_names(node))


def _as_leaf(copy: torch.Tensor, trained: bool, parameter: bool) -> torch.Tensor:
    trained = trained and (copy.is_floating_point() or copy.is_complex())
    return nn.Parameter(copy, requires_grad=trained) if parameter else copy.detach().requires_grad_(trained)


def _subclass(name: Json, path: str) -> Any:
    """The wrapper subclass of this name that the running program has made. Nothing is imported to find it."""
    pending: list[Any] = [torch.Tensor]
    while pending:
        kind = pending.pop()
        if f"{kind.__module__}:{kind.__qualname__}" == name and hasattr(kind, "__tensor_unflatten__"):
            return kind
        pending += kind.__subclasses__()
    raise StateMismatch(
        f"{path}: the checkpoint holds a tensor of class {name}, and the program has made no such class yet; "
        "import the library that has it before the session"
    )


def _word(text: str, kind: type[_Word]) -> _Word:
    word = vars(torch).get(text)  # getattr would import what torch loads lazily
    if not isinstance(word, kind):
        raise StateMismatch(f"torch {torch.__version__} has no {kind.__name__} {text!r}")
    return word


_BUILDERS: Mapping[str, Callable[[Source, Mapping[str, Json], object, str], Any]] = {
    "ndarray": Source.array,
    "torch.sparse_coo": Source.sparse_coo,
    **{str(layout): Source.sparse_compressed for layout in COMPRESSED},
    "torch.wrapper": Source.wrapper,
    **{tag: lambda _, node, _live, _path: _word(node["value"], WORDS[node["$"]]) for tag in WORDS},
    "torch.device": lambda _, node, _live, _path: torch.device(node["value"]),
    "torch.Size": lambda _, node, _live, _path: torch.Size(node["value"]),
}
"""How values of the other tags are rebuilt."""


def _in_class(value: torch.Tensor, live: object) -> torch.Tensor:
    """A subclass that has memory of its own was saved as plain values; the live object says which class."""
    if not isinstance(live, torch.Tensor) or type(live) in PLAIN or is_wrapper(live):
        return value
    return value.as_subclass(type(live))


def _device(node: Mapping[str, Json], live: object) -> torch.device:
    if isinstance(live, torch.Tensor) and not live.is_meta:
        return live.device
    if node.get("device") == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
