"""Whether what came back is what was saved: type, value, bits, key types, order and aliases."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from spotsafe.tensors.tree import COMPRESSED, is_wrapper


def bits(tensor: torch.Tensor) -> bytes:
    """The elements of a strided tensor, row-major, as bytes."""
    dense = tensor.detach().resolve_conj().resolve_neg()
    if not dense.is_contiguous():  # of some dtypes torch can copy nothing but bytes
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(dense.element_size())
        dense = (dense if word is None else dense.view(word)).contiguous()
    return bytes(dense.reshape(-1).view(torch.uint8).numpy()) if dense.numel() else b""


def differences(one: Any, other: Any, path: str = "it") -> Iterator[str]:
    """Every place where two values differ, with the reason; aliases aside."""
    if type(one) is not type(other):
        yield f"{path}: {type(one).__name__} became {type(other).__name__}"
    elif isinstance(one, torch.Tensor):
        yield from _of_tensors(one, other, path)
    elif isinstance(one, np.ndarray):
        if (one.dtype, one.shape, one.tobytes()) != (other.dtype, other.shape, other.tobytes()):
            yield f"{path}: {one!r} became {other!r}"
    elif (parts := _parts(one)) is not None:
        yield from _of_parts(parts, _parts(other), path)
    elif not _equal(one, other):
        yield f"{path}: {one!r} became {other!r}"


def _of_parts(ours: list[tuple[Any, Any]], theirs: Any, path: str) -> Iterator[str]:
    if len(ours) != len(theirs):
        yield f"{path}: {len(ours)} items became {len(theirs)}"
    for (key, mine), (their_key, their) in zip(ours, theirs, strict=False):
        yield from differences(key, their_key, f"{path} key {key!r}")
        yield from differences(mine, their, f"{path}[{key!r}]")


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """Keys or positions, and what is there; None of a value that holds no others."""
    if isinstance(value, Mapping):
        attributes = list(vars(value).items()) if isinstance(value, OrderedDict) else []
        return [*value.items(), *attributes, ("default_factory", getattr(value, "default_factory", None))]
    if isinstance(value, (list, tuple, deque)):
        return [*enumerate(value), ("maxlen", getattr(value, "maxlen", None))]
    if isinstance(value, (set, frozenset)):
        return list(enumerate(sorted(value, key=repr)))
    if isinstance(value, SimpleNamespace):
        return list(vars(value).items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _of_tensors(one: torch.Tensor, other: torch.Tensor, path: str) -> Iterator[str]:
    facts = [(t.dtype, t.shape, t.layout, t.device, t.requires_grad and t.is_leaf) for t in (one, other)]
    if facts[0] != facts[1]:
        yield f"{path}: {facts[0]} became {facts[1]}"
        return
    if one.layout is torch.strided and not is_wrapper(one):
        if bits(one) != bits(other):  # of some dtypes torch cannot print
            yield f"{path}: {bits(one).hex()} became {bits(other).hex()}"
        return
    for name, part in components(one).items():
        yield from differences(part, components(other)[name], f"{path}.{name}")


def components(tensor: Any) -> dict[str, Any]:
    """What a sparse tensor or a wrapper consists of."""
    if is_wrapper(tensor):
        names, context = tensor.__tensor_flatten__()
        return {**{name: getattr(tensor, name) for name in names}, "context": context}
    if tensor.layout is torch.sparse_coo:
        return {
            "indices": tensor._indices(),
            "values": tensor._values(),
            "coalesced": tensor.is_coalesced(),
        }
    return {name: getattr(tensor, name)() for name in (*COMPRESSED[tensor.layout], "values")}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(
        one, float
    ):  # of a NaN outside of tensors and arrays the format keeps no payload and no sign
        signs = math.copysign(1, one) == math.copysign(1, other)
        return (math.isnan(one) and math.isnan(other)) or (one == other and signs)
    if isinstance(one, complex):
        return _equal(one.real, other.real) and _equal(one.imag, other.imag)
    return repr(one) == repr(other)  # tells 1 from 1.0 and True inside dates, paths, ranges, ...


def aliases(value: Any) -> list[list[str]]:
    """The places of tensors and arrays that are one object, for each such object with several places."""
    places: dict[int, list[str]] = {}
    kept = []  # so that no id is used twice
    for path, leaf in _leaves(value, "it"):
        kept.append(leaf)
        places.setdefault(id(leaf), []).append(path)
    return sorted(paths for paths in places.values() if len(paths) > 1)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        yield path, value
    for key, part in _parts(value) or ():
        yield from _leaves(part, f"{path}[{key!r}]")
