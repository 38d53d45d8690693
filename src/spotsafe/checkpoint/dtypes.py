"""Torch dtypes by name: how many bytes an item has, and how a safetensors file spells it. Imports no torch.

A safetensors reader that meets a dtype it does not know refuses the whole file, not just that tensor. So a
file holds only codes that every safetensors since 0.4.3, the oldest that spotsafe admits, opens (tried with
0.4.3 and 0.8.0). What is not among them is stored as ``U8`` with one more, last dimension over the bytes of
an item; its true dtype stands in the index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from spotsafe.errors import UnsupportedState

CODE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8,
        "F32": 4,
        "F16": 2,
        "BF16": 2,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "I64": 8,
        "I32": 4,
        "I16": 2,
        "I8": 1,
        "U64": 8,
        "U32": 4,
        "U16": 2,
        "U8": 1,
        "BOOL": 1,
    }
)
"""Safetensors codes that a data file may hold, and the bytes of one item."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeInfo:
    """How values of a torch dtype lie in a file."""

    name: str
    """As torch names it, without ``torch.``."""
    item_bytes: int
    """Bytes of one item, ``torch.dtype.itemsize``."""
    code: str
    """The safetensors dtype of the stored tensor."""
    trailing: bool
    """Whether the stored shape has a last dimension of `item_bytes` more than the tensor."""

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape in the file of a tensor, or a piece of one, of `shape`."""
        return (*shape, self.item_bytes) if self.trailing else tuple(shape)


_NATIVE = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_AS_BYTES = {
    "complex128": 16,
    "complex64": 8,
    "complex32": 4,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "bits16": 2,
    "bits8": 1,
    "bits4x2": 1,
    "bits2x4": 1,
    "bits1x8": 1,
    **{f"{sign}int{bits}": 1 for sign in ("", "u") for bits in range(1, 8)},
}
_QUANTIZED = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})


def _table() -> Mapping[str, DtypeInfo]:
    native = (
        DtypeInfo(name=name, item_bytes=CODE_BYTES[code], code=code, trailing=False)
        for name, code in _NATIVE.items()
    )
    as_bytes = (
        DtypeInfo(name=name, item_bytes=size, code="U8", trailing=True) for name, size in _AS_BYTES.items()
    )
    return MappingProxyType({info.name: info for info in (*native, *as_bytes)})


DTYPES: Mapping[str, DtypeInfo] = _table()
"""Every dtype that can be stored, by name."""


def find(name: str) -> DtypeInfo | None:
    """The dtype that torch names `name` (without ``torch.``), or None if it cannot be stored."""
    return DTYPES.get(name)


def require(name: str, *, path: str) -> DtypeInfo:
    """The dtype that torch names `name`, of the tensor at `path`.

    Raises:
        UnsupportedState: tensors of this dtype cannot be saved.
    """
    info = DTYPES.get(name)
    if info is not None:
        return info
    if name in _QUANTIZED:
        message = (
            f"{path} is a quantized tensor ({name}), whose scale lies outside its values. "
            "Track its int_repr(), scale and zero_point, or the float tensor it was made from."
        )
    else:
        message = f"{path} has dtype {name}, which spotsafe does not know. View it as uint8 and track that."
    raise UnsupportedState(message, path=path)
