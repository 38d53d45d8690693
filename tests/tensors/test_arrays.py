"""Arrays as nodes: what can be written comes back equal, the rest is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from spotsafe.errors import StateMismatch
from spotsafe.tensors.arrays import dtype_node, dtype_of, from_bytes, to_tensor

DTYPES = [
    *("?", "i1", ">i4", "<u8", "<f2", ">c16", "S5", "<U3", ">U3", "<M8[25s]", ">m8[ns]", "V7"),
    [("a", "<i4"), ("b", ">f8", (2, 3)), ("c", [("x", "u1"), ("y", "V3")])],
    {"names": ["late", "early"], "formats": ["<u2", "u1"], "offsets": [6, 1], "itemsize": 16},
    {"names": ["whole", "low"], "formats": ["<u4", "<u2"], "offsets": [0, 0]},
]


@pytest.mark.parametrize("described", DTYPES, ids=str)
def test_dtypes_are_the_same_in_words(described: Any) -> None:
    """Through JSON and back: byte order, fields, offsets and gaps."""
    dtype = np.dtype(described)
    node = json.loads(json.dumps(dtype_node(dtype)))
    back = dtype_of(node)
    assert np.dtype(node) == dtype  # as an independent reader would do it
    assert back == dtype
    assert (back.itemsize, back.fields) == (dtype.itemsize, dtype.fields)


@pytest.mark.parametrize(
    "described",
    [
        object,
        [("a", "f8"), ("b", object)],
        [(("a title", "a"), "f8")],
        [("a", [("b", object)], (2,))],
        [("a", [("b", "f8")], (2,))],
        [("\ud800", "f8")],
    ],
    ids=repr,
)
def test_dtypes_that_have_no_words(described: Any) -> None:
    """References, titles, names that are no text, and fields that are arrays of structures."""
    assert dtype_node(np.dtype(described)) is None


@pytest.mark.parametrize(
    "node",
    [
        "|O",
        "f8,i4",
        "float64",
        "nonsense",
        "(2)<f8",
        {"names": ["a"], "formats": ["|O"], "offsets": [0], "itemsize": 8},
        {"names": ["a"], "formats": ["<f8"], "offsets": [4], "itemsize": 8},
        {"names": ["a"], "formats": ["<f8"]},
        {"names": ["a"], "formats": [f"({1 << 40},)<f8"], "offsets": [0], "itemsize": 8},
        {"names": ["a", "a"], "formats": ["u1", "u1"], "offsets": [0, 1], "itemsize": 2},
    ],
    ids=repr,
)
def test_nodes_that_describe_no_array(node: Any) -> None:
    """Whatever a document says, it is an error with the place, and no memory is asked for."""
    with pytest.raises(StateMismatch, match="there: no array"):
        from_bytes({"dtype": node, "shape": [1]}, np.zeros(8, np.uint8), "there")


def test_bytes_that_do_not_fit_are_refused_before_memory_is_asked_for() -> None:
    """A shape of petabytes is compared with the bytes first."""
    with pytest.raises(StateMismatch, match="8 bytes"):
        from_bytes({"dtype": "<f8", "shape": [1 << 50]}, np.zeros(8, np.uint8), "there")


def test_numbers_share_the_arrays_memory() -> None:
    """What torch can hold is not copied before it is staged, unless it is read-only or strided."""
    array = np.arange(6.0)
    assert to_tensor(array).data_ptr() == array.ctypes.data
    assert to_tensor(array[::2]).tolist() == [0, 2, 4]
    array.flags.writeable = False
    assert to_tensor(array).data_ptr() != array.ctypes.data
