"""Typed JSON of values that contain no others: each kind's two directions side by side.

Encoders raise ValueError with the rest of a sentence that begins with the value's path ("has a time zone").
Decoders may raise ValueError, TypeError or ArithmeticError on a node that no encoder made; `typed` turns both
into errors of the tree.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Container, Mapping
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any
from uuid import UUID

import numpy as np

from spotsafe.checkpoint.strict_json import is_text

TAG = "$"
"""The member that marks an object as a typed value; a plain object has no such key."""

MAX_FRACTION_BITS = 1 << 14
"""Of the numerator and of the denominator of a Fraction."""

_HEX_INT = re.compile(r"-?0x[0-9a-f]+")
_HEX_UUID = re.compile(r"[0-9a-f]{32}")
_UNIT = r"(\[[1-9]?\d{0,8}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
_NUMPY = re.compile(rf"\|b1|\|[iu]1|<[iu][248]|<f[248]|<c(8|16)|<[mM]8{_UNIT}")
_NONFINITE = ("nan", "inf", "-inf")


def member(node: Mapping[str, Any], name: str, kind: type) -> Any:
    """The member `name` of a tagged node.

    Raises:
        ValueError: it is missing, or not exactly of `kind`.
    """
    value = node.get(name)
    if type(value) is not kind:
        raise ValueError(f"a {node.get(TAG)} without a proper {name!r}")
    return value


def _integers(node: Mapping[str, Any], name: str, count: int) -> list[int]:
    values: list[int] = member(node, name, list)
    if len(values) != count or any(type(value) is not int for value in values):
        raise ValueError(f"a {node[TAG]} without {count} integers in {name!r}")
    return values


def _tagged(node: Any, tag: str) -> dict[str, Any]:
    """A node that stands inside another one and must be of one kind."""
    if type(node) is not dict or node.get(TAG) != tag:
        raise ValueError(f"something else where a {tag} belongs")
    return node


def encode_int(value: int) -> Any:
    """Plain within 64 bits; beyond, hexadecimal: parsers differ, and decimal digits cost quadratic time."""
    return value if -(1 << 63) <= value < 1 << 63 else {TAG: "int", "hex": hex(value)}


def _decode_int(node: Any) -> int:
    if type(node) is int:
        return node
    text = member(_tagged(node, "int"), "hex", str)
    if _HEX_INT.fullmatch(text) is None:
        raise ValueError("an int that is not hexadecimal")
    return int(text, 16)


def encode_float(value: float) -> Any:
    """Plain if finite (the shortest digits that give the same double), else by name."""
    return value if math.isfinite(value) else {TAG: "float", "value": str(value)}


def _decode_float(node: Any) -> float:
    if type(node) is float:
        return node
    # Each NaN an object of its own: a dict or a set may hold several, which differ by identity alone.
    return float(_one_of(member(_tagged(node, "float"), "value", str), _NONFINITE))


def _one_of(text: str, allowed: Container[str]) -> str:
    if text not in allowed:
        raise ValueError(f"unknown value {text[:20]!r}")
    return text


def encode_str(value: str) -> Any:
    """Plain if it is Unicode text, else the bytes of an extended UTF-8."""
    if is_text(value):
        return value
    return {TAG: "str", "base64": _base64(value.encode("utf-8", "surrogatepass"))}


def _decode_str(node: Any) -> str:
    if type(node) is str:
        return node
    return _bytes(_tagged(node, "str")).decode("utf-8", "surrogatepass")


def _base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


def _bytes(node: Mapping[str, Any]) -> bytes:
    return base64.b64decode(member(node, "base64", str), validate=True)


def _decode_complex(node: Mapping[str, Any]) -> complex:
    return complex(_decode_float(node.get("real")), _decode_float(node.get("imag")))


def _decode_range(node: Mapping[str, Any]) -> range:
    return range(_decode_int(node.get("start")), _decode_int(node.get("stop")), _decode_int(node.get("step")))


def _encode_path(flavour: str) -> Callable[[Any], Any]:
    def encode(value: Any) -> Any:
        text = str(value)
        if type(value)(text) != value:
            raise ValueError("is a path that its own text does not spell: keep os.fspath() of it instead")
        return {TAG: "path", "flavour": flavour, "text": encode_str(text)}

    return encode


_PATHS: Mapping[str, Callable[[str], object]] = {
    "local": Path,
    "posix": PurePosixPath,
    "windows": PureWindowsPath,
}


def _decode_path(node: Mapping[str, Any]) -> object:
    flavour = _one_of(member(node, "flavour", str), _PATHS)
    return _PATHS[flavour](_decode_str(node.get("text")))


def _delta_fields(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _encode_zone(zone: tzinfo | None) -> Any:
    if zone is None:
        return None
    if type(zone) is not timezone:
        raise ValueError(
            f"has a time zone of class {type(zone).__name__}, whose rules cannot be saved: use a fixed "
            "offset (datetime.timezone) or UTC"
        )
    offset = zone.utcoffset(None)
    name = zone.tzname(None)
    unnamed = timezone(offset).tzname(None)
    return {
        TAG: "timezone",
        "offset": _delta_fields(offset),
        "name": None if name == unnamed else encode_str(name),
    }


def _decode_zone(node: Mapping[str, Any]) -> timezone:
    offset = timedelta(*_integers(node, "offset", 3))
    return timezone(offset) if node.get("name") is None else timezone(offset, _decode_str(node["name"]))


def _zone_of(node: Mapping[str, Any]) -> timezone | None:
    return None if node.get("zone") is None else _decode_zone(_tagged(node["zone"], "timezone"))


def _encode_datetime(value: datetime) -> Any:
    day = [value.year, value.month, value.day]
    fields = [*day, value.hour, value.minute, value.second, value.microsecond]
    return {TAG: "datetime", "fields": fields, "fold": value.fold, "zone": _encode_zone(value.tzinfo)}


def _decode_datetime(node: Mapping[str, Any]) -> datetime:
    year, month, day, hour, minute, second, micro = _integers(node, "fields", 7)
    fold = member(node, "fold", int)
    return datetime(year, month, day, hour, minute, second, micro, _zone_of(node), fold=fold)


def _encode_time(value: time) -> Any:
    fields = [value.hour, value.minute, value.second, value.microsecond]
    return {TAG: "time", "fields": fields, "fold": value.fold, "zone": _encode_zone(value.tzinfo)}


def _decode_time(node: Mapping[str, Any]) -> time:
    hour, minute, second, micro = _integers(node, "fields", 4)
    return time(hour, minute, second, micro, _zone_of(node), fold=member(node, "fold", int))


def _short(value: int) -> int:
    """A part of a fraction: their common divisor takes quadratic time, so there is a limit."""
    if value.bit_length() > MAX_FRACTION_BITS:
        raise ValueError(
            f"is a fraction with a part of more than {MAX_FRACTION_BITS} bits: keep two integers instead"
        )
    return value


def _decode_fraction(node: Mapping[str, Any]) -> Fraction:
    numerator, denominator = (_decode_int(node.get(name)) for name in ("numerator", "denominator"))
    return Fraction(_short(numerator), _short(denominator))


def _decode_uuid(node: Mapping[str, Any]) -> UUID:
    text = member(node, "hex", str)
    if _HEX_UUID.fullmatch(text) is None:
        raise ValueError("a uuid that is not 32 hexadecimal characters")
    return UUID(hex=text)


def encode_numpy(value: np.generic) -> Any:
    """A numpy scalar: its dtype with little-endian byte order, and its bytes.

    Raises:
        ValueError: a dtype whose bytes mean something else on another machine, or are references.
    """
    if isinstance(value, np.str_):
        text = str.__str__(value)  # numpy's own conversion drops trailing NULs
        return {TAG: "numpy", "dtype": "str", "value": encode_str(text)}
    if isinstance(value, np.bytes_):
        return {TAG: "numpy", "dtype": "bytes", "base64": _base64(bytes(value))}
    dtype = value.dtype.newbyteorder("<")
    if _NUMPY.fullmatch(dtype.str) is None:
        raise ValueError(
            f"is a numpy scalar of dtype {value.dtype}, which is not the same on every machine: convert it "
            "to float64, a plain Python value or an array"
        )
    return {TAG: "numpy", "dtype": dtype.str, "hex": np.asarray(value).astype(dtype).tobytes().hex()}


def _decode_numpy(node: Mapping[str, Any]) -> object:
    name = member(node, "dtype", str)
    if name == "str":
        return np.str_(_decode_str(node.get("value")))
    if name == "bytes":
        return np.bytes_(_bytes(node))
    if _NUMPY.fullmatch(name) is None:
        raise ValueError(f"unknown numpy dtype {name[:20]!r}")
    dtype, data = np.dtype(name), bytes.fromhex(member(node, "hex", str))
    if len(data) != dtype.itemsize or (name == "|b1" and data[0] > 1):
        raise ValueError(f"a numpy {name} that is none")
    return np.frombuffer(data, dtype)[0]


ENCODERS: Mapping[type, Callable[[Any], Any]] = MappingProxyType(
    {
        type(None): lambda value: value,
        bool: lambda value: value,
        int: encode_int,
        float: encode_float,
        str: encode_str,
        complex: lambda value: {
            TAG: "complex",
            "real": encode_float(value.real),
            "imag": encode_float(value.imag),
        },
        bytes: lambda value: {TAG: "bytes", "base64": _base64(value)},
        bytearray: lambda value: {TAG: "bytearray", "base64": _base64(value)},
        range: lambda value: {
            TAG: "range",
            "start": encode_int(value.start),
            "stop": encode_int(value.stop),
            "step": encode_int(value.step),
        },
        type(...): lambda _: {TAG: "ellipsis"},
        type(Path()): _encode_path("local"),
        PurePosixPath: _encode_path("posix"),
        PureWindowsPath: _encode_path("windows"),
        date: lambda value: {TAG: "date", "fields": [value.year, value.month, value.day]},
        datetime: _encode_datetime,
        time: _encode_time,
        timedelta: lambda value: {TAG: "timedelta", "fields": _delta_fields(value)},
        timezone: _encode_zone,
        Decimal: lambda value: {TAG: "decimal", "text": str(value)},
        Fraction: lambda value: {
            TAG: "fraction",
            "numerator": encode_int(_short(value.numerator)),
            "denominator": encode_int(_short(value.denominator)),
        },
        UUID: lambda value: {TAG: "uuid", "hex": value.hex},
    }
)
"""Encoders by exact type."""

DECODERS: Mapping[str, Callable[[Mapping[str, Any]], object]] = MappingProxyType(
    {
        "int": _decode_int,
        "float": _decode_float,
        "str": _decode_str,
        "complex": _decode_complex,
        "bytes": _bytes,
        "bytearray": lambda node: bytearray(_bytes(node)),
        "range": _decode_range,
        "ellipsis": lambda _: ...,
        "path": _decode_path,
        "date": lambda node: date(*_integers(node, "fields", 3)),
        "datetime": _decode_datetime,
        "time": _decode_time,
        "timedelta": lambda node: timedelta(*_integers(node, "fields", 3)),
        "timezone": _decode_zone,
        "decimal": lambda node: Decimal(member(node, "text", str)),
        "fraction": _decode_fraction,
        "uuid": _decode_uuid,
        "numpy": _decode_numpy,
    }
)
"""Decoders by tag."""
