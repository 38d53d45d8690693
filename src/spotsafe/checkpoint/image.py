"""The bytes of a data file: a safetensors header, then the tensors without a gap.

::

    8 bytes   length of the JSON, little-endian
    JSON      {"name":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},...}, spaces to a multiple of 4096
    tensors   by item size descending, then by name, each row-major and little-endian

The order makes every tensor start at a multiple of its item size; the padding makes the first one start at a
page. Nothing here depends on step or attempt: files of equal content are equal byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, NoReturn

import msgspec

from spotsafe.checkpoint import strict_json
from spotsafe.checkpoint.dtypes import CODE_BYTES, DtypeInfo
from spotsafe.errors import DamagedCheckpoint

PAGE = 4096
MAX_HEADER = 100_000_000
"""What safetensors readers accept of a header, in bytes."""
METADATA = "__metadata__"
_RESERVED = ("", METADATA)
_LENGTH = 8
_MAX_DIMENSIONS = 64


class ImageTensor(NamedTuple):
    """A tensor, or a piece of one, that goes into a file."""

    key: str
    """Its name in the file."""
    dtype_code: str
    shape: tuple[int, ...]
    """Shape as stored, with the trailing dimension of bytes if its dtype has one."""
    nbytes: int
    item_bytes: int | None = None
    """Bytes of an item of the true dtype, which decides the order; by default those of `dtype_code`."""

    @staticmethod
    def of(key: str, *, dtype: DtypeInfo, shape: Iterable[int]) -> ImageTensor:
        """The tensor of torch dtype `dtype` and true `shape`."""
        dims = tuple(shape)
        return ImageTensor(
            key=key,
            dtype_code=dtype.code,
            shape=dtype.stored_shape(dims),
            nbytes=math.prod(dims) * dtype.item_bytes,
            item_bytes=dtype.item_bytes,
        )


class _HeaderEntry(msgspec.Struct, frozen=True, gc=False):
    """What the header says of one tensor, member by member."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileImage:
    """Where everything lies in a file."""

    header: bytes
    """The first bytes of the file, up to its first tensor; a multiple of 4096."""
    starts: Mapping[str, int]
    """Key -> byte offset in the file, in file order."""
    size: int
    """Bytes of the whole file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """What a file's header says of one tensor."""

    dtype_code: str
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""
    nbytes: int


def plan_image(tensors: Iterable[ImageTensor]) -> FileImage:
    """Lay out a file of `tensors`, given in any order.

    Raises:
        ValueError: a key that is taken twice, empty, or ``__metadata__``, which safetensors reserves; an
            unknown dtype code; bytes that do not fit the shape; a header that readers would not accept.
    """
    # Twice, by what is simple to compare: the second sort keeps the first one's order where items are of one size.
    ordered = sorted(tensors, key=attrgetter("key"))
    ordered.sort(key=_item_bytes, reverse=True)
    entries: dict[str, _HeaderEntry] = {}
    ends: list[int] = []
    sound, offset = set[tuple[object, ...]](), 0
    for tensor in ordered:
        key, code, shape, nbytes, _ = tensor
        if key in entries or key in _RESERVED:
            _refuse_key(key, taken=entries)
        kind = code, shape, nbytes
        if kind not in sound:  # thousands of tensors are of a few kinds
            _check(tensor)
            sound.add(kind)
        entries[key] = _HeaderEntry(code, shape, (offset, offset + nbytes))
        offset += nbytes
        ends.append(offset)
    header = _header(entries)
    first = len(header)
    starts = dict(zip(entries, [first, *(first + end for end in ends)], strict=False))
    return FileImage(header=header, starts=MappingProxyType(starts), size=first + offset)


def _item_bytes(tensor: ImageTensor) -> int:
    stored = CODE_BYTES.get(tensor.dtype_code)
    if stored is None:
        raise ValueError(f"{tensor.key!r}: {tensor.dtype_code!r} is no dtype of a data file")
    return stored if tensor.item_bytes is None else tensor.item_bytes


def _refuse_key(key: str, *, taken: Mapping[str, object]) -> NoReturn:
    if key in taken:
        raise ValueError(f"two tensors named {key!r} in one file")
    raise ValueError(f"a tensor in a file cannot be named {key!r}: escape the name")


def _check(tensor: ImageTensor) -> None:
    if min(tensor.shape, default=0) < 0:
        raise ValueError(f"{tensor.key!r}: negative length in shape {tensor.shape}")
    expected = math.prod(tensor.shape) * CODE_BYTES[tensor.dtype_code]
    if tensor.nbytes != expected:
        raise ValueError(f"{tensor.key!r}: {tensor.nbytes} bytes, but its shape makes {expected}")


def _header(entries: Mapping[str, _HeaderEntry]) -> bytes:
    text = msgspec.json.encode(entries)
    length = -(-(_LENGTH + len(text)) // PAGE) * PAGE - _LENGTH
    if length > MAX_HEADER:
        raise ValueError(f"a header of {length} bytes, more than readers accept: spread over more files")
    return length.to_bytes(_LENGTH, "little") + text.ljust(length)


def header_bytes(first: bytes, *, file_size: int, checkpoint: str = "", file: str = "") -> int:
    """How many bytes the header has, its length field included.

    Args:
        first: the first 8 bytes of the file, or more.
        file_size: bytes of the whole file.
        checkpoint: the checkpoint's name, for the error.
        file: the file's name, for the error.

    Raises:
        DamagedCheckpoint: it cannot be the beginning of a safetensors file of that size.
    """
    length = int.from_bytes(first[:_LENGTH], "little")
    if len(first) < _LENGTH or length < len("{}"):
        reason = "no safetensors header"
    elif length > MAX_HEADER:
        reason = f"a header of {length} bytes"
    elif _LENGTH + length > file_size:
        reason = f"a header of {length} bytes in a file of {file_size}"
    else:
        return _LENGTH + length
    raise DamagedCheckpoint(checkpoint=checkpoint, file=file, reason=reason)


def parse_header(
    data: bytes, *, file_size: int, checkpoint: str = "", file: str = ""
) -> Mapping[str, StoredTensor]:
    """What a data file holds, checked: tensors without gap or overlap, exactly to the end of the file.

    Args:
        data: the file's first `header_bytes` bytes, or more.
        file_size: bytes of the whole file.
        checkpoint: the checkpoint's name, for the error.
        file: the file's name, for the error.

    Raises:
        DamagedCheckpoint: the header is not one that `plan_image` could have made.
    """
    size = header_bytes(data, file_size=file_size, checkpoint=checkpoint, file=file)
    try:
        if len(data) < size:
            raise ValueError(f"the header ends after {len(data)} of {size} bytes")
        return _stored(strict_json.parse(data[_LENGTH:size]), base=size, file_size=file_size)
    except ValueError as error:
        raise DamagedCheckpoint(checkpoint=checkpoint, file=file, reason=f"header: {error}") from error


def _stored(header: object, *, base: int, file_size: int) -> Mapping[str, StoredTensor]:
    if type(header) is not dict:
        raise ValueError("not a JSON object")
    tensors = {key: _entry(key, entry, base=base) for key, entry in header.items() if key != METADATA}
    end = base
    for key, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start != end:
            raise ValueError(f"{key[:200]!r} starts at byte {tensor.start}, not at {end}")
        end += tensor.nbytes
    if end != file_size:
        raise ValueError(f"its tensors end at byte {end}, the file at {file_size}")
    return tensors


def _entry(key: str, entry: object, *, base: int) -> StoredTensor:
    if type(entry) is not dict:
        raise ValueError(f"{key[:200]!r} is not an object")
    code, shape, offsets = entry.get("dtype"), _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if not isinstance(code, str) or code not in CODE_BYTES:
        raise ValueError(f"{key[:200]!r} has an unknown dtype")
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{key[:200]!r} has no proper shape and data_offsets")
    (begin, end), item = offsets, CODE_BYTES[code]
    if end - begin != math.prod(shape) * item:
        raise ValueError(f"{key[:200]!r} has {end - begin} bytes, which is not what its shape makes")
    return StoredTensor(dtype_code=code, shape=shape, start=base + begin, nbytes=end - begin)


def _counts(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or len(value) > _MAX_DIMENSIONS:
        return None
    if all(type(item) is int and 0 <= item < 1 << 63 for item in value):
        return tuple(value)
    return None
