"""JSON without the liberties that parsers take: one document, one meaning.

Reading refuses duplicate keys (parsers differ in which one wins), NaN and Infinity literals and numbers that
overflow to infinity, text that is not UTF-8 or holds half of a surrogate pair, and nesting beyond a fixed
depth (an interpreter's recursion limit is no specification). Writing refuses what reading would.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX_DEPTH = 512
"""Nested arrays and objects that a document may have."""

_SCAN = 4 << 20
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def dump(value: object, *, known: bytes = b"") -> bytes:
    """The JSON of `value` without spaces, as UTF-8; members keep their order.

    Args:
        value: what JSON has a form for.
        known: what an earlier dump gave. If this gives the same, its depth is not looked at again.

    Raises:
        ValueError: a NaN or infinity, a lone surrogate, a cycle, too deep a nesting.
        TypeError: a value that JSON has no form for.
    """
    data = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    if data != known and _depth(data) > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    return data


def is_text(value: str) -> bool:
    """Whether a str is Unicode text: without surrogates, which no UTF-8 can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse(data: bytes) -> Any:
    """The value of a JSON document; int and float are told apart by their spelling.

    Raises:
        ValueError: the document is not strict JSON; the text says why.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from None
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and _depth(data) > MAX_DEPTH:
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
    deepest = level = 0
    in_string = np.uint8(0)
    for at in range(0, len(unescaped), _SCAN):
        chars = np.frombuffer(unescaped, np.uint8, min(_SCAN, len(unescaped) - at), at)
        inside = np.bitwise_xor.accumulate((chars == ord('"')).view(np.uint8)) ^ in_string
        in_string = inside[-1]
        lowered = chars | 0x20  # maps [ to { and ] to }
        brackets = lowered[((lowered == ord("{")) | (lowered == ord("}"))) & (inside == 0)]
        if brackets.size:
            levels = level + np.cumsum(np.where(brackets == ord("{"), 1, -1), dtype=np.int64)
            deepest, level = max(deepest, int(levels.max())), int(levels[-1])
    return deepest
