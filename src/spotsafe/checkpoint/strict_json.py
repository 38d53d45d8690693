"""JSON without the liberties that parsers take: one document, one meaning.

Reading refuses duplicate keys (parsers differ in which one wins), NaN and Infinity literals and numbers that
overflow to infinity, text that is not UTF-8 or holds half of a surrogate pair, and nesting beyond a fixed
depth (an interpreter's recursion limit is no specification). Writing refuses what reading would.

A large document is first read by a fast parser that takes liberties of its own. What it found counts only if writing
that gives the same bytes: then there was nothing to be liberal about. All else goes to the slow, strict parser, which
also finds the words for what is wrong.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

import msgspec

MAX_DEPTH = 512
"""Nested arrays and objects that a document may have."""

_SCAN = 4 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]*)(?=[.eE])(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_FLOATS = 1 << 16
"""Numbers that are no integers in a document that is read fast: as text each takes ten times its memory."""
_NOT_NESTING = bytes(set(range(256)) - set(b'[]{}"'))


def dump(value: object, *, known: bytes = b"", around: int = 0) -> bytes:
    """The JSON of `value` without spaces, as UTF-8; members keep their order.

    Args:
        value: what JSON has a form for.
        known: what an earlier dump gave. If this gives the same, its depth is not looked at again.
        around: arrays and objects that it goes into, which count as depth.

    Raises:
        ValueError: a NaN or infinity, a lone surrogate, a cycle, too deep a nesting.
        TypeError: a value that JSON has no form for.
    """
    data = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if data != known and _depth(data) > MAX_DEPTH - around:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return data


def is_text(value: str) -> bool:
    """Whether a str is Unicode text: without surrogates, which no UTF-8 can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse(data: bytes, *, around: int = 0) -> Any:
    """The value of a JSON document; int and float are told apart by their spelling.

    Args:
        data: the document.
        around: arrays and objects that it is taken out of, which count as depth.

    Raises:
        ValueError: the document is not strict JSON; the text says why.
    """
    most = MAX_DEPTH - around
    deep = data.count(b"{") + data.count(b"[") > most and _depth(data) > most
    proven = None if deep else _proven(data)
    return _parse_slowly(data, deep=deep) if proven is None else proven[0]


def _proven(data: bytes) -> tuple[Any] | None:
    """The value, if it is written as these bytes and no others; None if that was not shown."""
    floats: list[float] = []

    def spelling(text: str) -> msgspec.Raw:
        """A number that is no integer, as it stands there: shortest forms of one number differ."""
        if _FLOAT.fullmatch(text) is None or len(floats) == _FLOATS:
            raise ValueError(text)
        floats.append(_float(text))
        return msgspec.Raw(text.encode())

    try:
        value = msgspec.json.Decoder(float_hook=spelling).decode(data)
        if not is_written_as(value, data):
            return None
        return (msgspec.json.Decoder(float_hook=_float).decode(data) if floats else value,)
    except (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError):
        return None


def is_written_as(value: object, data: bytes) -> bool:
    """Whether these are the bytes of a value, with or without an end of line.

    If so, no key is there twice, nothing was left out by a parser that ignores what it does not know, and no number
    or text was taken for what it is not: that would have been written differently.

    Raises:
        ValueError: it cannot be written.
        OverflowError: it cannot be written.
    """
    written = msgspec.json.encode(value)
    return data.startswith(written) and data[len(written) :] in {b"", b"\n"}


def _parse_slowly(data: bytes, *, deep: bool) -> Any:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    if deep:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    if _SURROGATE.search(data) is not None:
        _refuse_surrogates(value)
    return value


def _refuse_surrogates(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair in a string") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("the same key twice in one object")
    return members


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("a number beyond the range of a double")
    return value


def _constant(text: str) -> NoReturn:
    raise ValueError(f"not JSON: the literal {text}")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant)


def _depth(data: bytes) -> int:
    """Deepest nesting of brackets outside strings; exact for JSON, any number for what is not."""
    import numpy as np  # noqa: PLC0415 - a tenth of a second that small documents, as `ls` reads, need not pay

    unescaped = data.replace(b"\\\\", b"  ").replace(b'\\"', b"  ") if b"\\" in data else data
    # Only what matters is looked at; a pair of quotes with nothing between changes nothing for the brackets behind it.
    marks = unescaped.translate(None, _NOT_NESTING).replace(b'""', b"")
    deepest = level = 0
    in_string = np.uint8(0)
    for at in range(0, len(marks), _SCAN):
        chars = np.frombuffer(marks, np.uint8, min(_SCAN, len(marks) - at), at)
        inside = np.bitwise_xor.accumulate((chars == ord('"')).view(np.uint8)) ^ in_string
        in_string = inside[-1]
        lowered = chars | 0x20  # maps [ to { and ] to }
        brackets = lowered[((lowered == ord("{")) | (lowered == ord("}"))) & (inside == 0)]
        if brackets.size:
            levels = level + np.cumsum(np.where(brackets == ord("{"), 1, -1), dtype=np.int64)
            deepest, level = max(deepest, int(levels.max())), int(levels[-1])
    return deepest
