"""Where every tensor of a save goes: which file, which box, which place in the arena. Values only.

The arena holds the files of a save byte for byte, each from a multiple of 4096 on. A tensor that is too large
for a file is cut into boxes, along its first dimension that is longer than 1, and again if that is not
enough. The plan depends on names, dtypes, shapes and roles alone, so it is made once and kept while these
stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from spotsafe.checkpoint import dtypes, layout
from spotsafe.checkpoint.image import METADATA, PAGE, ImageTensor, plan_image
from spotsafe.checkpoint.index import Slice, TensorEntry
from spotsafe.tensors.pause import collection_paused
from spotsafe.tensors.tree import NamedTensor, spec_of
from spotsafe.writer.job import HealthSpan, StagedFile

MAX_FILE_BYTES = 2 << 30
"""Default size that a data file does not exceed, in bytes."""
FIRST_FILE_BYTES = 64 << 20
"""Size that the first file does not exceed: as soon as it is copied it is written, while the rest is being copied."""
_GROWTH = 4
"""So many times larger each next file may be. Copying is that much faster than writing, so the writer never waits."""
FileNames = Callable[[int, int], str]
"""Name of a file by rank and number."""
_SCANNED = ("parameter", "moment", "buffer")
_TINY = 1 << 20
"""Limits up to this one count the tensors alone; above, a file keeps the limit with its header."""
_ENTRY_BYTES = 160
"""More than the header needs for one tensor beside its name and the numbers of its shape."""


class TensorSpec(NamedTuple):
    """What a plan needs to know of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    piece_of: tuple[int, ...] | None = None
    """Set if this is a box of a larger tensor: the shape of that one."""
    offsets: tuple[int, ...] = ()
    """Where such a box begins."""


class Placement(NamedTuple):
    """A box of a tensor and its place in the arena."""

    tensor: int
    """Position in the capture's tensors."""
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    arena_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """A whole save as it will lie in the arena."""

    specs: tuple[TensorSpec, ...]
    files: tuple[StagedFile, ...]
    tensors: tuple[TensorEntry, ...]
    """For the index, in the order of the capture."""
    placements: tuple[Placement, ...]
    """In the order of the arena."""
    headers: tuple[tuple[int, bytes], ...]
    """Arena offset and bytes of each file's header."""
    health: tuple[HealthSpan, ...]
    arena_size: int
    """Bytes that the arena must have; a multiple of 4096."""

    @property
    def total_bytes(self) -> int:
        """Sum of the sizes of the files."""
        return sum(file.size for file in self.files)


class _Piece(NamedTuple):
    tensor: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    key: str
    nbytes: int


def specs_of(tensors: Iterable[NamedTensor]) -> tuple[TensorSpec, ...]:
    """The specs of live tensors."""
    return tuple(TensorSpec(one.name, *spec_of(one.tensor), one.role) for one in tensors)


def plan_save(
    specs: Sequence[TensorSpec],
    *,
    rank: int = 0,
    max_file_bytes: int = MAX_FILE_BYTES,
    named: FileNames = layout.data_file,
) -> SavePlan:
    """Lay out the files of one rank.

    Args:
        specs: the tensors, each name once; of a larger tensor each box once.
        rank: of this process; part of the file names.
        max_file_bytes: what a file does not exceed; only a header or an item that alone is larger does.
        named: name of a file by rank and number.

    Raises:
        UnsupportedState: a dtype that cannot be stored.
        ValueError: a name that appears twice, or a limit below 1.
    """
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be positive, not {max_file_bytes}")
    if len({(spec.name, spec.offsets) for spec in specs}) != len(specs):
        raise ValueError("two tensors of one save have the same name")
    layout_ = _Layout(specs, rank=rank, named=named)
    room = max_file_bytes - 2 * PAGE if max_file_bytes > _TINY else max_file_bytes
    for pieces in _packed(_pieces(specs, room), specs, room):
        layout_.add_file(pieces)
    return layout_.plan()


class PlanCache:
    """Keeps the last plan while the tensors stay the same."""

    def __init__(self, *, max_file_bytes: int = MAX_FILE_BYTES, named: FileNames = layout.data_file) -> None:
        self._max_file_bytes, self._named = max_file_bytes, named
        self._key: object = None
        self._plan: SavePlan | None = None

    def plan(self, tensors: Iterable[NamedTensor], *, rank: int = 0) -> SavePlan:
        """The plan for these tensors; the same object as last time if nothing about them changed."""
        with collection_paused():
            tensors = tuple(tensors)
            key = rank, [(one.name, one.tensor.dtype, one.tensor.shape, one.role) for one in tensors]
            if self._plan is None or key != self._key:
                specs, limit = specs_of(tensors), self._max_file_bytes
                self._plan = plan_save(specs, rank=rank, max_file_bytes=limit, named=self._named)
                self._key = key
            return self._plan


class _Layout:
    """Files one after the other in the arena."""

    def __init__(self, specs: Sequence[TensorSpec], *, rank: int, named: FileNames) -> None:
        self._specs, self._rank, self._named, self._end = tuple(specs), rank, named, 0
        self._files: list[StagedFile] = []
        self._headers: list[tuple[int, bytes]] = []
        self._placements: list[Placement] = []
        self._slices: list[list[Slice]] = [[] for _ in specs]

    def add_file(self, pieces: Sequence[_Piece]) -> None:
        image = plan_image(
            ImageTensor.of(piece.key, dtype=self._dtype(piece.tensor), shape=piece.lengths)
            for piece in pieces
        )
        name, base = self._named(self._rank, len(self._files)), self._end
        self._files.append(StagedFile(name=name, arena_offset=base, size=image.size))
        self._headers.append((base, image.header))
        self._end += -(-image.size // PAGE) * PAGE
        starts = image.starts
        for tensor, offsets, lengths, key, nbytes in pieces:
            start, at = starts[key], _shifted(offsets, self._specs[tensor])
            self._slices[tensor].append(
                Slice(offsets=at, lengths=lengths, file=name, start=start, nbytes=nbytes)
            )
            self._placements.append(Placement(tensor, offsets, lengths, base + start, nbytes))

    def plan(self) -> SavePlan:
        placements = tuple(sorted(self._placements, key=lambda place: (place.arena_offset, place.nbytes)))
        return SavePlan(
            specs=self._specs,
            files=tuple(self._files),
            tensors=tuple(self._entries()),
            placements=placements,
            headers=tuple(self._headers),
            health=tuple(self._spans()),
            arena_size=self._end,
        )

    def _entries(self) -> Iterator[TensorEntry]:
        slices: dict[str, list[Slice]] = {}
        for spec, parts in zip(self._specs, self._slices, strict=True):
            slices.setdefault(spec.name, []).extend(parts)
        for name, spec in {spec.name: spec for spec in self._specs}.items():
            shape = spec.shape if spec.piece_of is None else spec.piece_of
            yield TensorEntry(
                name=name, dtype=spec.dtype, shape=shape, slices=tuple(slices[name]), role=spec.role
            )

    def _spans(self) -> Iterator[HealthSpan]:
        for place in self._placements:
            spec = self._specs[place.tensor]
            if (
                place.nbytes
                and spec.role in _SCANNED
                and spec.dtype.startswith(("float", "bfloat", "complex"))
            ):
                yield HealthSpan(spec.name, place.arena_offset, place.nbytes, spec.dtype, spec.role)

    def _dtype(self, tensor: int) -> dtypes.DtypeInfo:
        return _dtype(self._specs[tensor])


def _dtype(spec: TensorSpec) -> dtypes.DtypeInfo:
    return dtypes.require(spec.dtype, path=spec.name)


def _pieces(specs: Sequence[TensorSpec], limit: int) -> Iterator[_Piece]:
    names = {spec.name for spec in specs}
    for number, spec in enumerate(specs):
        item = _dtype(spec).item_bytes
        origin, nbytes = (0,) * len(spec.shape), math.prod(spec.shape) * item
        whole = spec.piece_of is None and nbytes <= limit
        if whole and spec.name not in {"", METADATA}:  # nearly every tensor
            yield _Piece(number, origin, spec.shape, spec.name, nbytes)
            continue
        for offsets, lengths in _cut(origin, spec.shape, item, limit):
            at = _shifted(offsets, spec)
            key = spec.name if whole else f"{spec.name}[{','.join(map(str, at))}]"
            while key in {"", METADATA} or (key != spec.name and key in names):
                key += "'"
            names.add(key)
            yield _Piece(number, offsets, lengths, key, math.prod(lengths) * item)


def _shifted(offsets: tuple[int, ...], spec: TensorSpec) -> tuple[int, ...]:
    """Offsets in the larger tensor, if this is a box of one."""
    if spec.piece_of is None:
        return offsets
    return tuple(begin + at for begin, at in zip(spec.offsets, offsets, strict=True))


def _cut(
    offsets: tuple[int, ...], lengths: tuple[int, ...], item: int, limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes of at most `limit` bytes (or of one item) that cover the box exactly, of nearly equal size."""
    nbytes = math.prod(lengths) * item
    axis = next((axis for axis, length in enumerate(lengths) if length > 1), None)
    if nbytes <= limit or axis is None:
        yield offsets, lengths
        return
    rows = max(1, limit * lengths[axis] // nbytes)
    parts = -(-lengths[axis] // rows)
    bounds = [lengths[axis] * part // parts for part in range(parts + 1)]
    for low, high in pairwise(bounds):
        shifted = (*offsets[:axis], offsets[axis] + low, *offsets[axis + 1 :])
        shorter = (*lengths[:axis], high - low, *lengths[axis + 1 :])
        yield from _cut(shifted, shorter, item, limit)


def _packed(pieces: Iterable[_Piece], specs: Sequence[TensorSpec], limit: int) -> Iterator[list[_Piece]]:
    """Fill files one after the other, so that the tensors of one object stay together; the first ones are smaller."""
    file: list[_Piece] = []
    used, room = 0, min(limit, FIRST_FILE_BYTES)
    for piece in pieces:
        need = piece.nbytes + len(piece.key) + _ENTRY_BYTES + 20 * len(specs[piece.tensor].shape)
        if file and used + need > room:
            yield file
            file, used, room = [], 0, min(limit, room * _GROWTH)
        file.append(piece)
        used += need
    if file:
        yield file
