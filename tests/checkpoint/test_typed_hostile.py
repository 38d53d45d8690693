"""Decoding what nobody encoded: damage has one kind of error, costs no memory and runs no code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from spotsafe.checkpoint import typed
from spotsafe.checkpoint.typed_decode import _CONTAINERS
from spotsafe.checkpoint.typed_scalars import DECODERS
from spotsafe.errors import DamagedCheckpoint, StateMismatch, UnsupportedFormat

TAGS = sorted([*DECODERS, *_CONTAINERS])
MEMBERS = [
    *(
        "items",
        "value",
        "hex",
        "base64",
        "fields",
        "fold",
        "zone",
        "offset",
        "name",
        "class",
        "text",
        "flavour",
    ),
    *("start", "stop", "step", "real", "imag", "numerator", "denominator", "maxlen", "attributes", "dtype"),
]
PLAIN = {"$": "tuple", "items": []}

words = st.sampled_from(
    [
        "nan",
        "inf",
        "0x1f",
        "-0x",
        "<f8",
        "|b1",
        "<M8[0s]",
        "<M8[ns]",
        "V8",
        "O",
        "posix",
        "windows",
        "00",
        "AA==",
        "__class__",
        "1e999999999",
        "1/0",
        "str",
        "bytes",
    ]
)
atoms = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words | st.text(max_size=5)
nodes = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(st.lists(inner, min_size=2, max_size=2), max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(
            lambda tag, members: {"$": tag, **members},
            st.sampled_from(TAGS),
            st.dictionaries(st.sampled_from(MEMBERS), inner | st.lists(st.integers(-3, 3000), max_size=7)),
        ),
    ),
    max_leaves=12,
)


def decode(node: Any) -> Any:
    """As a reader would; the three errors of the interface are fine."""
    try:
        return typed.decode(node, checkpoint="c", file="index-00000.json")
    except (DamagedCheckpoint, UnsupportedFormat, StateMismatch):
        return None


@given(nodes)
@settings(max_examples=400)
@example({"$": "deque", "maxlen": 1 << 70, "items": []})
@example({"$": "slice", "start": 1, "stop": 2, "step": PLAIN})
@example({"$": "enum", "class": "x", "value": {"$": "tuple", "items": []}})
@example({"$": ["unhashable"]})
def test_any_tree_is_a_value_or_one_of_three_errors(node: Any) -> None:
    """No other exception comes out, whatever the members are."""
    before = copy.deepcopy(node)
    decode(node)
    assert node == before


@pytest.mark.parametrize("tag", TAGS)
def test_a_node_without_members_is_damage(tag: str) -> None:
    """Every decoder looks for what it needs."""
    if tag == "ellipsis":
        assert typed.decode({"$": tag}) is ...
        return
    with pytest.raises(DamagedCheckpoint):
        typed.decode({"$": tag})


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"$": "int", "hex": "1f"}, "hexadecimal"),
        ({"$": "int", "hex": 5}, "proper 'hex'"),
        ({"$": "float", "value": "1.0"}, "unknown value"),
        ({"$": "range", "start": 0, "stop": 1, "step": 0}, "zero"),
        ({"$": "fraction", "numerator": 1, "denominator": 0}, "Fraction"),
        ({"$": "date", "fields": [2024, 13, 1]}, "month"),
        ({"$": "date", "fields": [2024, True, 1]}, "3 integers"),
        ({"$": "timedelta", "fields": [10**30, 0, 0]}, "days|int"),
        ({"$": "bytes", "base64": "A"}, "padding|base64|data characters"),
        ({"$": "set", "items": [1, 1]}, "same item"),
        ({"$": "set", "items": [[1]]}, "unhashable"),
        ({"$": "dict", "items": [[1, 2], [1, 3]]}, "same key"),
        ({"$": "dict", "items": [[1]]}, "no pairs"),
        ({"$": "dict", "items": [[{"a": 1}, 1]]}, "unhashable"),
        ({"$": "deque", "maxlen": 1, "items": [1, 2]}, "beyond"),
        ({"$": "numpy", "dtype": "|O", "hex": "00" * 8}, "numpy dtype"),
        ({"$": "numpy", "dtype": "<f8", "hex": "00"}, "none"),
        ({"$": "numpy", "dtype": "|b1", "hex": "02"}, "none"),
        ({"$": "namespace", "items": [[1, 2]]}, "no strings"),
        ({"$": "namedtuple", "class": "x", "fields": ["a"], "items": []}, "fields"),
        ({"$": "ordered_dict", "items": [], "attributes": {"update": 1}}, "attribute"),
        ({"$": "ordered_dict", "items": [], "attributes": {"__class__": 1}}, "attribute"),
        ({"$": 3}, "tag"),
    ],
)
def test_each_kind_of_nonsense_is_damage_with_a_reason(node: Any, says: str) -> None:
    """The reason and the path stand in the error, for the person who has to decide."""
    with pytest.raises(DamagedCheckpoint, match=says) as caught:
        typed.decode({"a": [node]}, path="state", checkpoint="c", file="f")
    assert (caught.value.checkpoint, caught.value.file) == ("c", "f")
    assert caught.value.reason.startswith("state['a'][0]: ")


@pytest.mark.parametrize("wrap", [lambda n: [n], lambda n: {"k": n}, lambda n: {"$": "tuple", "items": [n]}])
def test_depth_is_bounded(wrap: Any) -> None:
    """A document of brackets is damage, not a RecursionError."""
    node: Any = 1
    for _ in range(5000):
        node = wrap(node)
    with pytest.raises(DamagedCheckpoint, match="deeper"):
        typed.decode(node)


def test_the_caller_s_errors_come_through() -> None:
    """A StateMismatch of the tensors' code is not turned into damage."""

    def leaf(_node: Any, _live: object, _path: str) -> object:
        raise StateMismatch("shapes differ")

    with pytest.raises(StateMismatch, match="shapes differ"):
        typed.decode({"$": "tuple", "items": [{"$": "tensor", "name": "w"}]}, leaf=leaf)


def test_a_value_that_is_no_json_is_damage() -> None:
    """The walk trusts nothing, not even its own caller."""
    with pytest.raises(DamagedCheckpoint, match="no typed JSON"):
        typed.decode([b"bytes"])
