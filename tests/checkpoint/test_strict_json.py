"""Strict JSON: one document, one meaning, and a bound on everything."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from spotsafe.checkpoint import strict_json

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


@given(values)
@settings(max_examples=100)
def test_what_is_dumped_parses_to_the_same(value: Any) -> None:
    """Numbers keep their kind, members their order."""
    back = strict_json.parse(strict_json.dump(value))
    assert back == value
    assert json.dumps(back) == json.dumps(value)


@given(st.binary(max_size=60) | st.text(alphabet='[]{}",:\\u0d8 1eE-.tfn', max_size=40).map(str.encode))
@settings(max_examples=300)
def test_any_bytes_parse_or_are_a_value_error(data: bytes) -> None:
    """No other exception comes out, and whatever parses can be dumped again."""
    try:
        value = strict_json.parse(data)
    except ValueError:
        return
    assert strict_json.parse(strict_json.dump(value)) == value


SPELLINGS = st.sampled_from(
    [
        *('{"a":1,"a":1}', "[1 ]", "NaN", "01", "1.", "true"),
        *("-0", "-0.0", "1e5", "1E+05", "1.50", "1e400", "1e-400", "9" * 40, "-" + "9" * 25),
        *('"\\u0041"', '"\\/"', '"\\ud83d\\ude00"', '"\\ud800"', '"\\u001f"', '"\x7f\u2028"'),
    ]
)


@given(st.lists(SPELLINGS | values.map(json.dumps), max_size=5), st.sampled_from(["", "\n", "\n\n", " "]))
@settings(max_examples=150)
def test_the_fast_way_gives_what_the_slow_one_gives(items: list[str], end: str) -> None:
    """Or nothing. Numbers of each kind, in every spelling, and whatever parsers differ in."""
    data = f"[{','.join(items)}]{end}".encode()
    proven = strict_json._proven(data)
    if proven is not None:
        assert repr(proven[0]) == repr(strict_json._parse_slowly(data, deep=False))


def test_what_this_package_writes_is_read_the_fast_way() -> None:
    """Floats in both of their usual spellings too."""
    value = {"a": [1, -2.5, 1e-05, 1e22, True, None, 1 << 70], "b": {"\u03b2\n": "\x1f"}}
    for data in (strict_json.dump(value), msgspec.json.encode({**value, "a": [1e-05, 1e22]}) + b"\n"):
        proven = strict_json._proven(data)
        assert proven is not None
        assert repr(proven[0]) == repr(json.loads(data))


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ('{"a":1,"a":1}', "same key twice"),
        ('[{"b":{"x":1,"y":2,"x":3}}]', "same key twice"),
        ("NaN", "NaN"),
        ("[Infinity]", "Infinity"),
        ("[-Infinity]", "Infinity"),
        ("[1e999]", "range of a double"),
        ('"\\ud800"', "surrogate"),
        ('{"\\uDFFF":1}', "surrogate"),
        ("", "not JSON"),
        ("[1,]", "not JSON"),
        ("{} {}", "not JSON"),
        ("'a'", "not JSON"),
        ('"\n"', "not JSON"),
        ("9" * 10_000, "digits"),
    ],
)
def test_liberties_are_refused_with_a_reason(document: str, says: str) -> None:
    """Each is something that parsers read differently."""
    with pytest.raises(ValueError, match=says):
        strict_json.parse(document.encode())


def test_text_that_is_not_utf_8_is_refused() -> None:
    """Also inside a string."""
    with pytest.raises(ValueError, match="not UTF-8 at byte 1"):
        strict_json.parse(b'"\xff"')
    with pytest.raises(ValueError, match="not UTF-8"):
        strict_json.parse(b"\xef\xbb\xbf\xff")


def test_escapes_of_whole_pairs_and_of_backslashes_are_fine() -> None:
    """Only half of a pair is refused, not what looks like one."""
    assert strict_json.parse(b'"\\ud83d\\ude00"') == "\U0001f600"
    assert strict_json.parse(b'"\\\\ud800"') == "\\ud800"


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_nesting_is_bounded_at_a_fixed_depth(opening: str) -> None:
    """The bound is the same on every interpreter, and far below its recursion limit."""
    closing = "]" if opening == "[" else "}"
    at_limit = opening * strict_json.MAX_DEPTH + "1" + closing * strict_json.MAX_DEPTH
    assert strict_json.parse(at_limit.encode()) is not None
    for depth in (strict_json.MAX_DEPTH + 1, 100_000):
        with pytest.raises(ValueError, match="nested deeper"):
            strict_json.parse((opening * depth).encode())


def test_what_a_part_was_taken_out_of_counts() -> None:
    """So that a document read in parts is as deep as when it is read at once."""
    data = b"[" * 510 + b"]" * 510
    assert strict_json.parse(data, around=2) == strict_json.parse(data)
    with pytest.raises(ValueError, match="nested deeper than 512"):
        strict_json.parse(data, around=3)


def test_brackets_in_strings_are_not_nesting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quotes, escaped quotes and backslashes are told apart, also across the pieces in which it looks."""
    text = '[\\"' * 2000 + "\\" * 3
    document = strict_json.dump({"k": [text, text + "\\", {"[" * 900: "{" * 900}]})
    for size in (1, 2, 3, 7, 1 << 20):
        monkeypatch.setattr(strict_json, "_SCAN", size if size > 3 else 64 + size)
        assert strict_json.parse(document)["k"][0] == text


@given(values)
@settings(max_examples=60)
def test_the_measured_depth_is_the_real_one(value: Any) -> None:
    """Compared with a plain walk."""

    def depth(node: Any) -> int:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    assert strict_json._depth(strict_json.dump(value)) == depth(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, "\ud800", {"\ud800": 1}])
def test_what_parse_would_refuse_is_not_dumped(value: object) -> None:
    """A file that cannot be read must not be written."""
    with pytest.raises(ValueError, match=r"."):
        strict_json.dump(value)


def test_too_deep_a_value_is_not_dumped() -> None:
    """The same bound on both sides."""
    value: Any = 1
    for _ in range(strict_json.MAX_DEPTH + 1):
        value = [value]
    with pytest.raises(ValueError, match="nested deeper"):
        strict_json.dump(value)


def test_a_value_without_a_json_form_is_a_type_error() -> None:
    """A mistake of the caller, not of the data."""
    with pytest.raises(TypeError):
        strict_json.dump(object())
