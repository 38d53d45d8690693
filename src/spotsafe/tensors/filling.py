"""Memory for tensors that are read from a checkpoint: what is to be read into it, and the tensors that come of it.

The many small ones are read together, for a range each would cost more than their bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from spotsafe.checkpoint import dtypes
from spotsafe.checkpoint.index_values import Index, Slice, TensorEntry
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.ranges import THREADS, Range, read_ranges
from spotsafe.checkpoint.read_progress import ReadProgress
from spotsafe.checkpoint.room import room_for
from spotsafe.storage.store import Store
from spotsafe.tensors.memory import CPU, SMALL, new_bytes, view_of
from spotsafe.tensors.pause import collection_paused
from spotsafe.tensors.runs import Placed, Run, only_piece, runs
from spotsafe.tensors.tree import torch_dtype

_GAP = 1 << 12
"""Bytes that nobody asked for between two small tensors that are still read together."""


class Filling:
    """The memory of some tensors, each its own; while they are read, that of the small ones twice.

    Args:
        entries: by name, what all ranks wrote of the tensor.
    """

    def __init__(self, entries: Mapping[str, Sequence[TensorEntry]]) -> None:
        self._names = tuple(entries)
        self._large: dict[str, _Large] = {}
        small: dict[str, list[Placed]] = defaultdict(list)
        for name, parts in entries.items():
            piece = only_piece(parts)
            if piece is not None and 0 < piece.nbytes <= SMALL:
                small[piece.file].append((piece.start, piece.nbytes, name, parts[0]))
            else:
                self._large[name] = _Large(parts)
        self._spans = [span for file, inside in small.items() for span in _spans(file, inside)]

    def ranges(self) -> Iterator[Range]:
        """What is to be read, and where to."""
        for span in self._spans:
            yield Range(span.file, span.start, view_of(span.memory()))
        for one in self._large.values():
            yield from one.ranges()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name, after everything was read. Only once: the memory of the reading is let go of.

        Raises:
            RuntimeError: there is no memory for the small ones, as torch says it.
        """
        found = {name: one.tensor() for name, one in self._large.items()}
        while self._spans:
            found.update(self._spans.pop().tensors())
        return {name: found[name] for name in self._names}


def read_filled(
    store: Store,
    name: CheckpointName,
    indexes: Sequence[Index],
    wanted: Mapping[str, Sequence[TensorEntry]],
    *,
    what: str,
    threads: int = THREADS,
    every_block: bool = False,
    progress: ReadProgress | None = None,
) -> dict[str, torch.Tensor]:
    """Read and verify tensors, each into memory of its own, which nothing else shares.

    Args:
        store: the run.
        name: the checkpoint.
        indexes: its own, all of them.
        wanted: by name, what all ranks wrote of each tensor.
        what: which files it takes memory for, for people.
        threads: see `read_ranges`.
        every_block: see `read_ranges`.
        progress: see `read_ranges`.

    Raises:
        NotEnoughMemory: there is none for them.
        StorageError, DamagedCheckpoint: as `read_ranges`.
    """
    with collection_paused(), room_for(what, by_torch=True):
        filling = Filling(wanted)
        ranges = list(filling.ranges())
    read_ranges(store, name, indexes, ranges, threads=threads, every_block=every_block, progress=progress)
    with collection_paused(), room_for(what, by_torch=True):
        return filling.tensors()


@dataclass(slots=True)
class _Span:
    """Small tensors that lie close to each other in one file."""

    file: str
    runs: list[Run]
    read: torch.Tensor | None = None

    @property
    def start(self) -> int:
        return self.runs[0].start

    def memory(self) -> torch.Tensor:
        self.read = new_bytes(max(run.end for run in self.runs) - self.start)
        return self.read

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.read is not None, "nothing was read yet"
        for run in self.runs:
            yield from run.copies(self.read, self.start)


def copy_box(data: torch.Tensor, piece: Slice, whole: torch.Tensor) -> None:
    """Copy a box to its place in a tensor.

    Args:
        data: the bytes of the box, flat, row-major.
        piece: where it is.
        whole: the bytes of the tensor, with one more, last dimension over those of an item.
    """
    target = whole
    for axis, (offset, length) in enumerate(zip(piece.offsets, piece.lengths, strict=True)):
        target = target.narrow(axis, offset, length)
    target.copy_(data.view(*piece.lengths, whole.shape[-1]))


def _spans(file: str, small: list[Placed]) -> Iterator[_Span]:
    """What is to be read of one file at a time: its small tensors, cut where the gaps are wide."""
    small.sort(key=itemgetter(0))
    span: _Span | None = None
    end = 0
    for run in runs(small):
        if span is None or run.start > end + _GAP:
            if span is not None:
                yield span
            span = _Span(file, [])
        span.runs.append(run)
        end = max(end, run.end)
    if span is not None:
        yield span


class _Large:
    """The memory of one tensor while it is read; of any size and in any number of pieces."""

    def __init__(self, entries: Sequence[TensorEntry]) -> None:
        first = entries[0]
        self._shape, self._dtype = first.shape, torch_dtype(first.dtype)
        self._item = dtypes.require(first.dtype, path=first.name).item_bytes
        self._bytes = new_bytes(math.prod(self._shape) * self._item)
        self._boxes: list[tuple[Slice, torch.Tensor]] = []
        self._slices = [piece for entry in entries for piece in entry.slices]

    def ranges(self) -> Iterator[Range]:
        for piece in self._slices:
            if self._is_run(piece):
                start = _offset(piece.offsets, self._shape) * self._item
                target = self._bytes[start : start + piece.nbytes]
            else:
                target = new_bytes(piece.nbytes)
                self._boxes.append((piece, target))
            yield Range(piece.file, piece.start, view_of(target))

    def tensor(self) -> torch.Tensor:
        for piece, data in self._boxes:
            copy_box(data, piece, self._bytes.view(*self._shape, self._item))
        self._boxes.clear()
        # No view: it is somebody's own, who may ask.
        own = torch.empty(0, dtype=self._dtype, device=CPU)
        strides = self._bytes.view(self._dtype).view(self._shape).stride()
        return own.set_(self._bytes.untyped_storage(), 0, self._shape, strides)

    def _is_run(self, piece: Slice) -> bool:
        """Whether the box's bytes are consecutive in the tensor too."""
        if piece.lengths == self._shape:
            return True
        rest = [length == whole for length, whole in zip(piece.lengths, self._shape, strict=True)]
        cut = next((axis for axis, one in enumerate(piece.lengths) if one != 1), len(rest))
        return all(rest[cut + 1 :])


def _offset(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """Position of an element in a row-major tensor."""
    return sum(at * math.prod(shape[axis + 1 :]) for axis, at in enumerate(offsets))
