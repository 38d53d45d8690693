"""Tensors of one kind that lie one after the other in a file: made by one call, not one by one.

A large model has tens of thousands of small tensors, of a few dtypes and shapes, and a file has them in order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from spotsafe.checkpoint.index import Slice, TensorEntry
from spotsafe.tensors.memory import AT_ONCE, CPU, MANY, copy_bytes
from spotsafe.tensors.tree import torch_dtype

_unbind_copy: Any = torch.unbind_copy  # torch's own types say that it gives nothing

Placed: TypeAlias = tuple[int, int, str, TensorEntry]
"""A tensor that lies in one piece: start in its file, bytes, name."""
Named: TypeAlias = Iterable[tuple[str, torch.Tensor]]


@dataclass(slots=True)
class Run:
    """Tensors of one dtype and shape without a gap between them."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    names: list[str]

    def copies(self, data: torch.Tensor, start: int) -> Named:
        """Each in memory of its own.

        Args:
            data: bytes of the file.
            start: where in the file they begin.
        """
        dtype = torch_dtype(self.dtype)
        if not self._is_row(dtype, self.start - start) or dtype not in AT_ONCE:
            return self._copied_singly(dtype, data.data_ptr() + self.start - start)
        return zip(self.names, _unbind_copy(self._row(data, start, dtype)), strict=True)

    def _is_row(self, dtype: torch.dtype, at: int) -> bool:
        return len(self.names) >= MANY and at % dtype.itemsize == 0

    def _row(self, data: torch.Tensor, start: int, dtype: torch.dtype) -> torch.Tensor:
        """All of them as one tensor."""
        return data[self.start - start : self.end - start].view(dtype).view(len(self.names), *self.shape)

    def _copied_singly(self, dtype: torch.dtype, address: int) -> Iterator[tuple[str, torch.Tensor]]:
        nbytes = (self.end - self.start) // len(self.names)
        for number, name in enumerate(self.names):
            tensor = torch.empty(self.shape, dtype=dtype, device=CPU)
            copy_bytes(tensor.data_ptr(), address + number * nbytes, nbytes)
            yield name, tensor


def only_piece(parts: Sequence[TensorEntry]) -> Slice | None:
    """The piece that is all of a tensor, as of nearly every one; None if there is no such piece."""
    if len(parts) != 1 or len(parts[0].slices) != 1:
        return None
    piece = parts[0].slices[0]
    return piece if piece.lengths == parts[0].shape else None


def runs(placed: Iterable[Placed]) -> Iterator[Run]:
    """Tensors of one file, by their starts, as runs."""
    run: Run | None = None
    for start, nbytes, name, entry in placed:
        if run is not None and start == run.end and entry.shape == run.shape and entry.dtype == run.dtype:
            run.names.append(name)
            run.end += nbytes
        else:
            if run is not None:
                yield run
            run = Run(entry.dtype, entry.shape, start, start + nbytes, [name])
    if run is not None:
        yield run
