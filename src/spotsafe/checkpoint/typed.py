"""Python values as JSON that keeps their types: what a checkpoint holds besides tensors. No pickle, no code.

None, bool, text, integers of 64 bits, finite floats, lists, and dicts whose keys are text are the JSON that
everybody knows. Everything else is an object with the member ``"$"``, which says what it is
(``docs/format.md`` lists them all)::

    (1, nan)    {"$": "tuple", "items": [1, {"$": "float", "value": "nan"}]}
    {7: "x"}    {"$": "dict", "items": [[7, "x"]]}

Types come back exactly. A class of the user's own, an Enum or a dataclass, comes back only where the program
holds a value of that class at the same path: nothing is imported because a document says so. Arrays, tensors
and other objects are the caller's, through `leaf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spotsafe.checkpoint import typed_decode, typed_encode
from spotsafe.checkpoint.typed_scalars import TAG
from spotsafe.checkpoint.typed_values import (
    MAX_DEPTH,
    MAX_VALUES,
    MISSING,
    TensorRef,
    Unbound,
    class_id,
    tensor_names,
)
from spotsafe.errors import StateMismatch


def _no_leaf(_value: object, _path: str) -> None:
    return None


def _no_tag(_node: Mapping[str, Any], _live: object, _path: str) -> object:
    return NotImplemented


def encode(value: object, *, path: str, leaf: typed_encode.Leaf = _no_leaf) -> Any:
    """The typed JSON of `value`.

    Args:
        value: a tree of values. Nothing in the result is shared with it.
        path: where the tree is, such as ``scheduler``: the beginning of every path in errors and for `leaf`.
        leaf: called with every value of a class that is not Python's own, and its path. Returns its node,
            or None if it does not know it either. A node of its own has a tag that is not one of ours.

    Raises:
        UnsupportedState: a value that cannot be saved, a cycle, too deep or too large a tree; names the path.
    """
    return typed_encode.Encoder(path=path, leaf=leaf).encode(value)


def decode(
    node: Any,
    *,
    leaf: typed_decode.Leaf = _no_tag,
    live: object = MISSING,
    path: str = "",
    lenient: bool = False,
    checkpoint: str = "",
    file: str = "",
) -> Any:
    """The value whose typed JSON is `node`. Nothing in the result is shared with `node` or `live`.

    Args:
        node: what `strict_json.parse` made of a document; may be hostile.
        leaf: called with every node whose tag is not one of ours (a tensor reference too), and the live value
            at its place (or MISSING) and its path. Returns the value, or NotImplemented for a tag that it does
            not know.
        live: the program's present value at the same place; gives the classes of Enums, dataclasses and
            namedtuples and the factories of defaultdicts. Never changed.
        path: where the tree is; the beginning of every path.
        lenient: give an `Unbound` for an Enum or dataclass without a live counterpart instead of an error;
            for looking at a checkpoint without its program.
        checkpoint: the checkpoint's name, for errors.
        file: the file's name, for errors.

    Raises:
        DamagedCheckpoint: `node` is not what `encode` makes.
        UnsupportedFormat: a tag that nobody knows.
        StateMismatch: an Enum or dataclass that the program has no counterpart of at that path.
    """
    decoder = typed_decode.Decoder(path=path, leaf=leaf, lenient=lenient, checkpoint=checkpoint, file=file)
    try:
        return decoder.decode(node, live)
    except RecursionError:
        problem = (
            f"{path or 'a value'} is nested too deeply for the stack that is left: call from fewer frames"
        )
        raise StateMismatch(problem, problems=[problem]) from None


__all__ = [
    "MAX_DEPTH",
    "MAX_VALUES",
    "MISSING",
    "TAG",
    "TensorRef",
    "Unbound",
    "class_id",
    "decode",
    "encode",
    "tensor_names",
]
