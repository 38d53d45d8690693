"""numpy arrays as nodes: their dtype in words, their numbers as a tensor.

What torch has a dtype for becomes such a tensor; text, dates, structures and other byte orders become bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from spotsafe.checkpoint import dtypes
from spotsafe.checkpoint.strict_json import is_text
from spotsafe.errors import StateMismatch

Json = Any
"""A value that `json` can write."""
Array = np.ndarray[Any, Any]

_TEXT = re.compile(r"(\(\d+,(?:\d+(?:,\d+)*)?\))?([^(),]+)")
"""A type string, behind the shape of a field that is an array itself: ``<f8``, ``(2,)<f8``, ``(2,3)<f8``."""


def dtype_node(dtype: np.dtype[Any]) -> Json | None:
    """A dtype in words; None if its values are references, or bytes that only its library understands."""
    if dtype.hasobject:
        return None
    if dtype.names is None:
        return dtype.str if np.dtype(dtype.str) == dtype else None
    fields = [(name, *dtype.fields[name]) for name in dtype.names] if dtype.fields else []
    formats = [_format(field[1]) for field in fields]
    titled = any(len(field) > 3 for field in fields)
    if titled or None in formats or not all(map(is_text, dtype.names)):
        return None
    return {
        "names": list(dtype.names),
        "formats": formats,
        "offsets": [field[2] for field in fields],
        "itemsize": dtype.itemsize,
    }


def _format(dtype: np.dtype[Any]) -> Json | None:
    if dtype.subdtype is None:
        return dtype_node(dtype)
    base, shape = dtype.subdtype
    node = dtype_node(base)
    return str(shape).replace(" ", "") + node if isinstance(node, str) else None


def dtype_of(node: Json) -> np.dtype[Any]:
    """The dtype that `dtype_node` put into words.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    if isinstance(node, str):
        found = _TEXT.fullmatch(node)
        if found is None or np.dtype(found[2]).hasobject or np.dtype(found[2]).str != found[2]:
            raise ValueError(f"{node[:40]!r} is no dtype of numbers, text or dates")
        return np.dtype(node)
    formats = [dtype_of(one) for one in node["formats"]]
    return np.dtype(
        {
            "names": node["names"],
            "formats": formats,
            "offsets": node["offsets"],
            "itemsize": node["itemsize"],
        }
    )


def to_tensor(array: Array) -> torch.Tensor:
    """The array's numbers as a tensor, in its own memory where that is possible; else its bytes."""
    plain = np.ascontiguousarray(array).reshape(array.shape)
    if not plain.flags.writeable:
        plain = plain.copy()
    if plain.dtype.isnative and plain.dtype.kind in "?bBiufc" and dtypes.find(plain.dtype.name):
        return torch.from_numpy(plain)
    return torch.from_numpy(np.frombuffer(bytearray(plain.tobytes()), dtype=np.uint8))


def from_bytes(node: Mapping[str, Json], data: Array, path: str) -> Array:
    """A new array of the node's dtype and shape.

    Args:
        node: what `dtype_node` and the shape were written into, as ``dtype`` and ``shape``.
        data: its bytes, row-major, as flat uint8.
        path: where it is, for the error.

    Raises:
        StateMismatch: the node describes no array of these bytes, or one that this numpy does not know.
    """
    try:
        dtype, shape = dtype_of(node["dtype"]), tuple(node["shape"])
        if data.size != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{data.size} bytes are no array of {dtype} and shape {shape}")
        array = np.empty(shape, dtype=dtype)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        problem = f"{path}: no array that numpy {np.__version__} can hold: {error}"
        raise StateMismatch(problem, problems=[problem]) from error
    if array.nbytes:
        array.reshape(-1).view(np.uint8)[...] = data
    return array
