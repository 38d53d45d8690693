"""The index: what one rank wrote. Slices of tensors in files, digests of the files, and typed state."""

from __future__ import annotations

import gc
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spotsafe.checkpoint import dtypes, strict_json
from spotsafe.checkpoint.coverage import Box, box_fault, tiling_fault
from spotsafe.checkpoint.digest import ALGORITHM, block_count
from spotsafe.checkpoint.layout import is_data_file
from spotsafe.checkpoint.typed_values import tensor_names
from spotsafe.checkpoint.versions import VERSION, check_version, unsupported
from spotsafe.errors import DamagedCheckpoint, UnsupportedFormat

MAX_BYTES = 1 << 30
"""What an index may have at most, in bytes."""

ROLES = ("parameter", "moment", "buffer", "other")
"""`parameter`: trainable; `moment`: a floating tensor of an optimizer's state; both decide about health."""

_DIGEST = re.compile(r"[0-9a-f]{32}")
_MAX_INT = (1 << 63) - 1
_MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One data file."""

    name: str
    size: int
    digests: tuple[str, ...]
    """xxh3_128 of each block of `Index.block_size` bytes, in hexadecimal; the last block may be shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """An axis-aligned box of a tensor, and where its bytes lie (row-major, contiguous)."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    file: str
    start: int
    """Byte offset in the file."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the global view."""

    name: str
    dtype: str
    """As torch names it, without ``torch.``: ``float32``, ``bfloat16``, ..."""
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    role: str = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Everything one rank wrote for one checkpoint."""

    rank: int
    block_size: int
    """Bytes of a digest block."""
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    """Tracked name -> its state in typed JSON; tensors in it are references to names of `tensors`."""
    session: Any = None
    """The session's own state in typed JSON: positions of the loops, RNG, values, names of the nonfinite."""


class _Document(msgspec.Struct, kw_only=True):
    """The file's members as they are typed; unknown ones are ignored."""

    rank: int
    algorithm: str
    block_size: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    state: dict[str, Any]
    session: Any


def encode_index(index: Index) -> bytes:
    """The bytes of an index file. Its digest and size go into the manifest.

    Raises:
        ValueError: an index that contradicts itself, state that is not typed JSON (NaN as a bare number, a
            lone surrogate), or too large an index.
        TypeError: state that holds a value JSON has no form for.
    """
    _check(index, complete=False)
    members = {
        **VERSION,
        "rank": index.rank,
        "algorithm": ALGORITHM,
        "block_size": index.block_size,
        "files": index.files,
        "tensors": index.tensors,
        "state": msgspec.Raw(strict_json.dump(dict(index.state))),
        "session": msgspec.Raw(strict_json.dump(index.session)),
    }
    data = msgspec.json.encode(members) + b"\n"
    if len(data) > MAX_BYTES:
        raise ValueError(f"an index of {len(data)} bytes, more than {MAX_BYTES}: keep large values as arrays")
    return data


def decode_index(data: bytes, *, checkpoint: str, file: str, complete: bool = True) -> Index:
    """What an index file says, checked against itself.

    The caller has compared the bytes with the size and SHA-256 in the manifest; here it is checked that the
    content makes sense, so that no reader has to.

    Args:
        data: the whole file.
        checkpoint: the checkpoint's name, for the error.
        file: the index's name, for the error.
        complete: whether the slices must cover every tensor exactly once, as they do when one rank wrote
            everything. Otherwise `tiling_problem` judges all ranks together.

    Raises:
        DamagedCheckpoint: it is no index, or contradicts itself.
        UnsupportedFormat: written by a newer spotsafe.
    """
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        with _collection_paused():
            index = _parse(data, checkpoint=checkpoint, file=f"{checkpoint}/{file}")
            _check(index, complete=complete)
    except UnsupportedFormat:
        raise
    except ValueError as error:  # msgspec.ValidationError is one
        raise DamagedCheckpoint(checkpoint=checkpoint, file=file, reason=str(error)) from error
    return index


def tiling_problem(indexes: Iterable[Index]) -> str | None:
    """Why the slices of all ranks together do not make every tensor exactly once, or None if they do."""
    known: dict[str, TensorEntry] = {}
    boxes: dict[str, list[Box]] = defaultdict(list)
    for index in indexes:
        for tensor in index.tensors:
            first = known.setdefault(tensor.name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                return f"{tensor.name!r}: ranks disagree about its dtype or shape"
            boxes[tensor.name].extend((piece.offsets, piece.lengths) for piece in tensor.slices)
    for name, tensor in known.items():
        fault = tiling_fault(tensor.shape, boxes[name])
        if fault is not None:
            return f"{name!r}: {fault}"
    return None


def _parse(data: bytes, *, checkpoint: str, file: str) -> Index:
    members = check_version(strict_json.parse(data), file=file, checkpoint=checkpoint)
    index, unknown = _convert(members)
    if unknown:
        raise unsupported(unknown, file=file, checkpoint=checkpoint)
    return index


@contextmanager
def _collection_paused() -> Iterator[None]:
    """No garbage collection while a tree of a million values grows: that is half of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _convert(members: dict[str, Any]) -> tuple[Index, list[str]]:
    """The index, and the words in it that this version does not know."""
    document = msgspec.convert(members, _Document)
    index = Index(
        rank=document.rank,
        block_size=document.block_size,
        files=document.files,
        tensors=document.tensors,
        state=document.state,
        session=document.session,
    )
    words = {f"dtype {name}" for name in {tensor.dtype for tensor in index.tensors} - dtypes.DTYPES.keys()}
    words |= {f"role {name}" for name in {tensor.role for tensor in index.tensors} - set(ROLES)}
    words |= {f"digests {document.algorithm}"} - {f"digests {ALGORITHM}"}
    return index, sorted(words)


def _check(index: Index, *, complete: bool) -> None:
    _check_files(index)
    _check_tensors(index, complete=complete)
    _check_references(index)


def _check_files(index: Index) -> None:
    if not 0 <= index.rank <= _MAX_INT or not 0 < index.block_size <= _MAX_INT:
        raise ValueError("a rank or block_size out of range")
    if len({entry.name for entry in index.files}) != len(index.files):
        raise ValueError("the same file twice")
    for entry in index.files:
        if not is_data_file(entry.name):
            raise ValueError(f"{entry.name[:80]!r} is no data file's name")
        if not 0 <= entry.size <= _MAX_INT:
            raise ValueError(f"{entry.name}: a size of {entry.size} bytes")
        if len(entry.digests) != block_count(entry.size, block_size=index.block_size):
            raise ValueError(f"{entry.name}: {len(entry.digests)} digests for {entry.size} bytes")
        if not all(map(_DIGEST.fullmatch, entry.digests)):
            raise ValueError(f"{entry.name}: a digest that is not 32 hexadecimal characters")


def _check_tensors(index: Index, *, complete: bool) -> None:
    if len({tensor.name for tensor in index.tensors}) != len(index.tensors):
        raise ValueError("the same tensor twice")
    sizes = {entry.name: entry.size for entry in index.files}
    extents: dict[str, list[tuple[int, int]]] = {entry.name: [] for entry in index.files}
    for tensor in index.tensors:
        fault = _tensor_fault(tensor, sizes=sizes, complete=complete)
        if fault is not None:
            raise ValueError(f"{tensor.name[:200]!r}: {fault}")
        for piece in tensor.slices:
            extents[piece.file].append((piece.start, piece.start + piece.nbytes))
    for name, spans in extents.items():
        _check_disjoint(name, spans)


def _tensor_fault(tensor: TensorEntry, *, sizes: Mapping[str, int], complete: bool) -> str | None:
    if len(tensor.shape) > _MAX_DIMENSIONS or any(not 0 <= size <= _MAX_INT for size in tensor.shape):
        return "a shape out of range"
    info = dtypes.find(tensor.dtype)
    if info is None or tensor.role not in ROLES:
        return f"unknown dtype {tensor.dtype!r} or role {tensor.role!r}"
    fault = None if _is_whole(tensor) else _boxes_fault(tensor, complete=complete)
    for piece in tensor.slices:
        fault = fault or _place_fault(piece, item_bytes=info.item_bytes, sizes=sizes)
    return fault


def _is_whole(tensor: TensorEntry) -> bool:
    """Whether its only slice is all of it, as of nearly every tensor: no need for geometry."""
    if len(tensor.slices) != 1:
        return False
    only = tensor.slices[0]
    return only.lengths == tensor.shape and len(only.offsets) == len(tensor.shape) and not any(only.offsets)


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


def _check_disjoint(file: str, spans: list[tuple[int, int]]) -> None:
    solid = sorted(span for span in spans if span[0] < span[1])
    for (_, end), (start, _) in itertools.pairwise(solid):
        if start < end:
            raise ValueError(f"{file}: two slices share byte {start}")


def _check_references(index: Index) -> None:
    known = {tensor.name for tensor in index.tensors}
    for name in tensor_names([index.state, index.session]):
        if name not in known:
            raise ValueError(f"the state refers to a tensor {name[:200]!r} that is not listed")
