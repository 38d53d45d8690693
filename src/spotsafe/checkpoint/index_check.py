"""Whether an index makes sense: names, sizes, places, the tiling of tensors, and references."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from spotsafe.checkpoint import dtypes
from spotsafe.checkpoint.coverage import box_fault, tiling_fault
from spotsafe.checkpoint.digest import block_count
from spotsafe.checkpoint.image import MAX_HEADER
from spotsafe.checkpoint.index_values import ROLES, FileEntry, Index, Slice, TensorEntry
from spotsafe.checkpoint.layout import CheckpointName, is_data_file, is_frozen_file, rank_of
from spotsafe.checkpoint.typed_values import tensor_names

_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_INT = (1 << 63) - 1
_MAX_DIMENSIONS = 64
_END_BITS = 64
_END = (1 << _END_BITS) - 1
_MAX_BLOCK = 1 << 26  # what a verifying reader has to hold, several at once
_MAX_HEADER = MAX_HEADER + 8  # with the field that says how long it is
_MAX_ITEM = max(info.item_bytes for info in dtypes.DTYPES.values())


def check_index(index: Index, *, complete: bool) -> None:
    """See that an index does not contradict itself.

    Args:
        index: what was read, or is to be written.
        complete: whether its slices must cover every tensor exactly once.

    Raises:
        ValueError: it does; the text says where.
    """
    check_files(index)
    check_tensors(index, complete=complete)
    check_references([index.state, index.session], known={tensor.name for tensor in index.tensors})


def check_files(index: Index) -> None:
    """See that the rank, the block size and the list of files make sense.

    Raises:
        ValueError: they do not.
    """
    if not 0 <= index.rank <= _MAX_INT or not 0 < index.block_size <= _MAX_BLOCK:
        raise ValueError("a rank or block_size out of range")
    if len({entry.name for entry in index.files}) != len(index.files):
        raise ValueError("the same file twice")
    for entry in index.files:
        if not is_data_file(entry.name) or rank_of(entry.name) != index.rank:
            raise ValueError(f"{entry.name[:80]!r} is no data file's name of rank {index.rank}")
        if entry.checkpoint is not None:
            _check_reference(entry)
        if not 0 <= entry.size <= _MAX_INT:
            raise ValueError(f"{entry.name}: a size of {entry.size} bytes")
        if len(entry.digests) != block_count(entry.size, block_size=index.block_size):
            raise ValueError(f"{entry.name}: {len(entry.digests)} digests for {entry.size} bytes")
        if not all(map(_DIGEST.fullmatch, entry.digests)):
            raise ValueError(f"{entry.name}: a digest that is not 32 hexadecimal characters")


def _check_reference(entry: FileEntry) -> None:
    if CheckpointName.parse(entry.checkpoint or "") is None:
        raise ValueError(
            f"{entry.name}: lies in {str(entry.checkpoint)[:80]!r}, which is no checkpoint's name"
        )
    if not is_frozen_file(entry.name):
        raise ValueError(f"{entry.name} lies in another checkpoint, but is no file that may")
    if not 0 <= entry.age_s < math.inf:
        raise ValueError(f"{entry.name}: an age of {entry.age_s} seconds")


def check_tensors(index: Index, *, complete: bool) -> None:
    """See that every tensor makes sense, and lies in the files that are listed.

    Raises:
        ValueError: one does not.
    """
    if len({tensor.name for tensor in index.tensors}) != len(index.tensors):
        raise ValueError("the same tensor twice")
    sizes = {entry.name: entry.size for entry in index.files}
    # One number for start and end: a million tuples would set off collections, for which training waits.
    spans: dict[str, list[int]] = {entry.name: [] for entry in index.files}
    kinds = _Kinds()
    for tensor in index.tensors:
        kind = kinds[tensor.dtype, tensor.shape, tensor.role]
        if not _is_plain(tensor, kind, sizes):
            fault = _tensor_fault(tensor, kind, sizes=sizes, complete=complete)
            if fault is not None:
                raise ValueError(f"{tensor.name[:200]!r}: {fault}")
        for piece in tensor.slices:
            if piece.nbytes:
                spans[piece.file].append(piece.start << _END_BITS | piece.start + piece.nbytes)
    for name, of_file in spans.items():
        held = _disjoint_bytes(name, of_file)
        # Without gaps: so a sparse file of a terabyte needs a tensor of one, which a program does not expect.
        if sizes[name] - held > _MAX_HEADER:
            raise ValueError(f"{name}: {sizes[name]} bytes are more than its tensors and a header have")


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is the same for all tensors of one dtype, shape and role."""

    fault: str | None
    item_bytes: int = 0
    nbytes: int = 0
    origin: tuple[int, ...] = ()


class _Kinds(dict[tuple[str, tuple[int, ...], str], _Kind]):
    """Judges each kind of tensor once: a model has thousands of tensors of a few kinds."""

    def __missing__(self, key: tuple[str, tuple[int, ...], str]) -> _Kind:
        kind = self[key] = _judged(*key)
        return kind


def _judged(dtype: str, shape: tuple[int, ...], role: str) -> _Kind:
    if len(shape) > _MAX_DIMENSIONS or (shape and not 0 <= min(shape) <= max(shape) <= _MAX_INT):
        return _Kind("a shape out of range")
    if math.prod(shape if all(shape) else (size or 1 for size in shape)) > _MAX_INT // _MAX_ITEM:
        # Also beside a length of 0: whoever makes room counts strides, which overflow.
        return _Kind("a shape of more bytes than there can be")
    info = dtypes.find(dtype)
    if info is None or role not in ROLES:
        return _Kind(f"unknown dtype {dtype!r} or role {role!r}")
    return _Kind(None, info.item_bytes, math.prod(shape) * info.item_bytes, (0,) * len(shape))


def _is_plain(tensor: TensorEntry, kind: _Kind, sizes: Mapping[str, int]) -> bool:
    """Whether it lies in one piece in a listed file, as nearly every tensor: nothing can be wrong with it."""
    if kind.fault is not None or len(tensor.slices) != 1:
        return False
    only = tensor.slices[0]
    return (
        only.lengths == tensor.shape
        and only.offsets == kind.origin
        and only.nbytes == kind.nbytes
        and 0 <= only.start <= sizes.get(only.file, -1) - only.nbytes
    )


def _tensor_fault(
    tensor: TensorEntry, kind: _Kind, *, sizes: Mapping[str, int], complete: bool
) -> str | None:
    if kind.fault is not None:
        return kind.fault
    fault = None if _is_whole(tensor) else _boxes_fault(tensor, complete=complete)
    for piece in tensor.slices:
        fault = fault or _place_fault(piece, item_bytes=kind.item_bytes, sizes=sizes)
    return fault


def _is_whole(tensor: TensorEntry) -> bool:
    """Whether its only slice is all of it, as of nearly every tensor: no need for geometry."""
    if len(tensor.slices) != 1:
        return False
    only, shape = tensor.slices[0], tensor.shape
    return only.lengths == shape and len(only.offsets) == len(shape) and not any(only.offsets)


def _boxes_fault(tensor: TensorEntry, *, complete: bool) -> str | None:
    boxes = [(piece.offsets, piece.lengths) for piece in tensor.slices]
    faults = (box_fault(tensor.shape, offsets, lengths) for offsets, lengths in boxes)
    fault = next((fault for fault in faults if fault is not None), None)
    return tiling_fault(tensor.shape, boxes) if fault is None and complete else fault


def _place_fault(piece: Slice, *, item_bytes: int, sizes: Mapping[str, int]) -> str | None:
    if piece.nbytes != math.prod(piece.lengths) * item_bytes:
        return f"a slice of {piece.nbytes} bytes, which is not what its lengths make"
    if piece.file not in sizes:
        return f"lies in a file {piece.file[:80]!r} that is not listed"
    if piece.start < 0 or piece.start + piece.nbytes > sizes[piece.file]:
        return f"reaches outside {piece.file}"
    return None


def _disjoint_bytes(file: str, spans: list[int]) -> int:
    """How many bytes they are together, if none is in two of them."""
    spans.sort()
    held = end = 0
    for span in spans:
        start = span >> _END_BITS
        if start < end:
            raise ValueError(f"{file}: two slices share byte {start}")
        end = span & _END
        held += end - start
    return held


def check_references(trees: list[object], *, known: Collection[str]) -> None:
    """See that typed JSON refers to `known` tensors only.

    Raises:
        ValueError: it refers to another one.
    """
    for name in tensor_names(trees):
        if name not in known:
            raise ValueError(f"the state refers to a tensor {name[:200]!r} that is not listed")


def tiling_problem(indexes: Iterable[Index]) -> str | None:
    """Why the slices of all ranks together do not make every tensor exactly once, or None if they do."""
    whole: dict[str, TensorEntry] = {}
    entries: dict[str, list[TensorEntry]] = {}
    for index in indexes:
        for tensor in index.tensors:
            if _is_whole(tensor) and tensor.name not in entries and tensor.name not in whole:
                whole[tensor.name] = tensor  # nearly every tensor
            else:
                before = [whole.pop(tensor.name)] if tensor.name in whole else []
                entries.setdefault(tensor.name, before).append(tensor)
    for name, parts in entries.items():
        first = parts[0]
        if any((part.dtype, part.shape) != (first.dtype, first.shape) for part in parts):
            return f"{name!r}: ranks disagree about its dtype or shape"
        boxes = [(piece.offsets, piece.lengths) for part in parts for piece in part.slices]
        fault = tiling_fault(first.shape, boxes)
        if fault is not None:
            return f"{name!r}: {fault}"
    return None
