"""Where every tensor of a save goes: which file, which box, which place in the arena. Values only.

The arena holds the files of a save byte for byte, each from a multiple of 4096 on. A tensor that is too large
for a file is cut into boxes, along its first dimension that is longer than 1, and again if that is not
enough. The plan depends on names, dtypes, shapes and roles alone, so it is made once and kept while these
stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from spotsafe.checkpoint import dtypes, layout
from spotsafe.checkpoint.image import METADATA, PAGE, ImageTensor, plan_image
from spotsafe.checkpoint.index import Slice, TensorEntry
from spotsafe.tensors.memory import MANY, SMALL
from spotsafe.tensors.pause import collection_paused
from spotsafe.tensors.tree import NamedTensor, dtype_name
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
_FLOATING = ("float", "bfloat", "complex")
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
    rows: tuple[range, ...]
    """Positions in `placements` of small whole tensors of one dtype and shape, without a gap, if they are many."""
    arena_size: int
    """Bytes that the arena must have; a multiple of 4096."""

    @property
    def total_bytes(self) -> int:
        """Sum of the sizes of the files."""
        return sum(file.size for file in self.files)


def pieces_of(plan: SavePlan) -> Iterator[SavePlan]:
    """A plan of each file alone, as if it lay at the beginning of the arena."""
    places, rows = plan.placements, list(plan.rows)
    at = 0
    for file, (base, header) in zip(plan.files, plan.headers, strict=True):
        begin = at
        while at < len(places) and places[at].arena_offset + places[at].nbytes <= base + file.size:
            at += 1
        here = [range(row.start - begin, row.stop - begin) for row in rows if begin <= row.start < at]
        yield replace(
            plan,
            files=(replace(file, arena_offset=0),),
            placements=tuple(one._replace(arena_offset=one.arena_offset - base) for one in places[begin:at]),
            headers=((0, header),),
            health=(),
            rows=tuple(here),
            arena_size=-(-file.size // PAGE) * PAGE,
        )


class _Kind(NamedTuple):
    """A dtype and the lengths of a box."""

    lengths: tuple[int, ...]
    nbytes: int
    item_bytes: int
    origin: tuple[int, ...]
    """As many zeros as there are dimensions."""
    stored: tuple[Any, ...]
    """What an `ImageTensor` says after its key."""


class _Piece(NamedTuple):
    """A box of the tensor at position `tensor`, and its name in the file."""

    tensor: int
    offsets: tuple[int, ...]
    kind: _Kind
    key: str


def specs_of(tensors: Iterable[NamedTensor]) -> tuple[TensorSpec, ...]:
    """The specs of live tensors."""
    names, roles, dtypes_, shapes = _columns(tuple(tensors))
    return tuple(map(TensorSpec, names, map(dtype_name, dtypes_), map(tuple, shapes), roles))


def _columns(
    tensors: Sequence[NamedTensor],
) -> tuple[list[str], list[str], list[torch.dtype], list[torch.Size]]:
    """Names, roles, dtypes and shapes: four lists are made and compared sooner than one of many tuples."""
    live = [one.tensor for one in tensors]
    dtypes_, shapes = list(map(attrgetter("dtype"), live)), list(map(attrgetter("shape"), live))
    return [one.name for one in tensors], [one.role for one in tensors], dtypes_, shapes


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
    if len({spec.name for spec in specs}) != len(specs) and _are_repeated(specs):
        raise ValueError("two tensors of one save have the same name")
    layout_ = _Layout(specs, rank=rank, named=named)
    room = max_file_bytes - 2 * PAGE if max_file_bytes > _TINY else max_file_bytes
    for pieces in _packed(_pieces(specs, room), room):
        layout_.add_file(pieces)
    return layout_.plan()


def _are_repeated(specs: Sequence[TensorSpec]) -> bool:
    return len({(spec.name, spec.offsets) for spec in specs}) != len(specs)


class PlanCache:
    """Keeps the last plan while the tensors stay the same."""

    def __init__(self, *, max_file_bytes: int = MAX_FILE_BYTES, named: FileNames = layout.data_file) -> None:
        self.max_file_bytes, self._named = max_file_bytes, named
        self._tensors: object = None
        self._key: tuple[object, ...] = ()
        self._plan: SavePlan | None = None

    def plan(self, tensors: Iterable[NamedTensor], *, rank: int = 0) -> SavePlan:
        """The plan for these tensors; the same object as last time if nothing about them changed.

        A tuple that is the very one of last time is not looked into: a capture that reuses one has done that.
        """
        with collection_paused():
            tensors = tuple(tensors)
            if self._plan is not None and self._tensors is tensors and self._key[0] == rank:
                return self._plan
            key = rank, *_columns(tensors)
            if self._plan is None or key != self._key:
                specs, limit = specs_of(tensors), self.max_file_bytes
                self._plan = plan_save(specs, rank=rank, max_file_bytes=limit, named=self._named)
            self._tensors, self._key = tensors, key
            return self._plan


class _Layout:
    """Files one after the other in the arena."""

    def __init__(self, specs: Sequence[TensorSpec], *, rank: int, named: FileNames) -> None:
        self._specs, self._rank, self._named, self._end = tuple(specs), rank, named, 0
        self._files: list[StagedFile] = []
        self._headers: list[tuple[int, bytes]] = []
        self._placements: list[Placement] = []
        self._rows: list[range] = []
        self._slices: list[tuple[Slice, ...]] = [()] * len(self._specs)

    def add_file(self, pieces: Sequence[_Piece]) -> None:
        image = plan_image([ImageTensor(key, *kind.stored) for _, _, kind, key in pieces])
        name, base = self._named(self._rank, len(self._files)), self._end
        self._files.append(StagedFile(name=name, arena_offset=base, size=image.size))
        self._headers.append((base, image.header))
        self._end += -(-image.size // PAGE) * PAGE
        starts, specs, slices = image.starts, self._specs, self._slices
        for tensor, offsets, kind, key in pieces:
            slices[tensor] += (
                Slice(
                    offsets=_shifted(offsets, specs[tensor]),
                    lengths=kind.lengths,
                    file=name,
                    start=starts[key],
                    nbytes=kind.nbytes,
                ),
            )
        by_key = {piece.key: piece for piece in pieces}
        self._add_rows(by_key[key].kind for key in starts)
        for key, start in starts.items():
            tensor, offsets, kind, _ = by_key[key]
            self._placements.append(Placement(tensor, offsets, kind.lengths, base + start, kind.nbytes))

    def _add_rows(self, kinds: Iterable[_Kind]) -> None:
        begin = len(self._placements)
        for _, group in groupby(kinds, key=id):  # whole tensors of one kind share the object
            same = list(group)
            if len(same) >= MANY and 0 < same[0].nbytes <= SMALL:
                self._rows.append(range(begin, begin + len(same)))
            begin += len(same)

    def plan(self) -> SavePlan:
        return SavePlan(
            specs=self._specs,
            files=tuple(self._files),
            tensors=self._entries(),
            placements=tuple(self._placements),
            headers=tuple(self._headers),
            health=tuple(self._spans()),
            rows=tuple(self._rows),
            arena_size=self._end,
        )

    def _entries(self) -> tuple[TensorEntry, ...]:
        slices, specs = dict[str, tuple[Slice, ...]](), dict[str, TensorSpec]()
        for spec, parts in zip(self._specs, self._slices, strict=True):
            specs[spec.name] = spec
            slices[spec.name] = slices[spec.name] + parts if spec.name in slices else parts
        return tuple(
            TensorEntry(
                name=name,
                dtype=spec.dtype,
                shape=spec.shape if spec.piece_of is None else spec.piece_of,
                slices=slices[name],
                role=spec.role,
            )
            for name, spec in specs.items()
        )

    def _spans(self) -> Iterator[HealthSpan]:
        specs = self._specs
        floating = {dtype for dtype in {spec.dtype for spec in specs} if dtype.startswith(_FLOATING)}
        for tensor, _, _, offset, nbytes in self._placements:
            name, dtype, _, role, _, _ = specs[tensor]
            if nbytes and role in _SCANNED and dtype in floating:
                yield HealthSpan(name, offset, nbytes, dtype, role)


def _kind_of(spec: TensorSpec, lengths: tuple[int, ...]) -> _Kind:
    """The kind of such a box of a tensor.

    Raises:
        UnsupportedState: a dtype that cannot be stored.
    """
    dtype = dtypes.require(spec.dtype, path=spec.name)
    stored = ImageTensor.of("", dtype=dtype, shape=lengths)
    return _Kind(lengths, stored.nbytes, dtype.item_bytes, (0,) * len(lengths), stored[1:])


def _pieces(specs: Sequence[TensorSpec], limit: int) -> Iterator[_Piece]:
    names = {spec.name for spec in specs}
    kinds: dict[tuple[str, tuple[int, ...]], _Kind] = {}  # thousands of tensors are of a few kinds
    for number, spec in enumerate(specs):
        form = spec.dtype, spec.shape
        kind = kinds.get(form) or kinds.setdefault(form, _kind_of(spec, spec.shape))
        whole = spec.piece_of is None and kind.nbytes <= limit
        if whole and spec.name not in {"", METADATA}:  # nearly every tensor
            yield _Piece(number, kind.origin, kind, spec.name)
            continue
        for offsets, lengths in _cut(kind.origin, spec.shape, kind.item_bytes, limit):
            at = _shifted(offsets, spec)
            key = spec.name if whole else f"{spec.name}[{','.join(map(str, at))}]"
            while key in {"", METADATA} or (key != spec.name and key in names):
                key += "'"
            names.add(key)
            yield _Piece(number, offsets, _kind_of(spec, lengths), key)


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


def _packed(pieces: Iterable[_Piece], limit: int) -> Iterator[list[_Piece]]:
    """Fill files one after the other, so that the tensors of one object stay together; the first ones are smaller."""
    file: list[_Piece] = []
    used, room = 0, min(limit, FIRST_FILE_BYTES)
    for piece in pieces:
        need = piece.kind.nbytes + len(piece.key) + _ENTRY_BYTES + 20 * len(piece.offsets)
        if file and used + need > room:
            yield file
            file, used, room = [], 0, min(limit, room * _GROWTH)
        file.append(piece)
        used += need
    if file:
        yield file
