"""An index file's members as typed values: strictly read, and fast if the file is as this package writes it.

The way by dicts, `strict_json` and then types, takes half a second for fifty thousand tensors. A typed parser takes a
tenth of that, but ignores what it does not know and lets the last of equal keys win. So what it found is taken only if
writing it gives the very bytes that were read; any other file is read by way of dicts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spotsafe.checkpoint import strict_json
from spotsafe.checkpoint.index_values import FileEntry, TensorEntry
from spotsafe.checkpoint.versions import check_version


class _Members(msgspec.Struct, kw_only=True):
    """In the order in which they are written."""

    format: int
    requires: tuple[str, ...]
    rank: int
    algorithm: str
    block_size: int
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]


class Document(_Members, kw_only=True):
    """The members of an index; unknown ones are ignored."""

    state: dict[str, Any]
    session: Any


class _Written(_Members, kw_only=True):
    """The same, with the trees as they stand there: they have no types."""

    state: msgspec.Raw
    session: msgspec.Raw


def read_document(data: bytes, *, file: str, checkpoint: str) -> Document:
    """The members of an index file.

    Args:
        data: the whole file.
        file: its path, for the error.
        checkpoint: the checkpoint's name, for the error.

    Raises:
        ValueError: it is not strict JSON, or a member is missing or of another type.
        UnsupportedFormat: a newer spotsafe wrote it.
    """
    proven = _proven(data)
    if proven is None:
        members = check_version(strict_json.parse(data), file=file, checkpoint=checkpoint)
        return msgspec.convert(members, Document)
    version = {"format": proven.format, "requires": list(proven.requires)}
    check_version(version, file=file, checkpoint=checkpoint)
    return proven


def _proven(data: bytes) -> Document | None:
    """The members, if they are written as these bytes and no others; None if that was not shown."""
    try:
        written = msgspec.json.decode(data, type=_Written)
        if not strict_json.is_written_as(written, data):
            return None
        state, session = (
            strict_json.parse(bytes(tree), around=1) for tree in (written.state, written.session)
        )
    except (msgspec.MsgspecError, ValueError, ArithmeticError, RecursionError):
        return None
    if type(state) is not dict:
        return None
    members = {name: getattr(written, name) for name in _Members.__struct_fields__}
    return Document(**members, state=state, session=session)
