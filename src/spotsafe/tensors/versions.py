"""Whether tensors were touched or hold bad values, without copying them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from spotsafe.tensors.tree import NamedTensor

_CHECKED = ("parameter", "moment")


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor's memory was written, as far as torch counts."""
    return tensor._version  # noqa: SLF001 - torch has no public way


class BuffersMark:
    """Tensors and their versions at one instant. Equal to another mark if they are the same objects, unwritten."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        # Holding the tensors keeps a new one from taking the address of an old one.
        self._tensors = tensors
        self._versions = [version_of(one) for one in tensors]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BuffersMark):
            return NotImplemented
        return (
            self._versions == other._versions
            and len(self._tensors) == len(other._tensors)
            and all(one is two for one, two in zip(self._tensors, other._tensors, strict=True))
        )

    __hash__ = None  # type: ignore[assignment] # a mark is compared, never looked up


class VersionWatch:
    """Takes marks of the tensors in modules, and of bare ones.

    A mark is taken at every step, so the list of tensors is remembered and only their versions are read: a
    microsecond for twenty. Whoever compares calls `forget` first; a tensor that was replaced since the list was
    made then shows as a difference.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] | None = None

    def forget(self) -> None:
        """Look for the tensors again at the next mark."""
        self._tensors = None

    def mark(self, parts: Iterable[object]) -> BuffersMark:
        """The mark of everything in `parts` that is a tensor or a module; read only after `forget`."""
        if self._tensors is None:
            self._tensors = _tensors_in(parts)
        return BuffersMark(self._tensors)


def _tensors_in(parts: Iterable[object]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for part in parts:
        if isinstance(part, torch.Tensor):
            found.append(part)
        elif isinstance(part, nn.Module):
            for module in part.modules():
                # The dicts themselves: `named_parameters` would build every name.
                found += [one for one in module._parameters.values() if one is not None]  # noqa: SLF001 - see above
                found += [one for one in module._buffers.values() if one is not None]  # noqa: SLF001 - see above
    return [one for one in found if not one.is_inference()]  # these have no version


def not_finite(tensors: Iterable[NamedTensor]) -> frozenset[str]:
    """Names of the trainable parameters and moments that hold a NaN or an infinity."""
    return frozenset(one.name for one in tensors if one.role in _CHECKED and not _is_finite(one.tensor))


def _is_finite(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    values = tensor.detach()
    if values.element_size() == 1:
        if "float4" in str(values.dtype):
            return True  # has neither
        values = values.float()
    return bool(torch.isfinite(values).all())
