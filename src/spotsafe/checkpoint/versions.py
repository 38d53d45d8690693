"""Which format a file is in, and whether this code may believe that it understands it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from spotsafe.errors import UnsupportedFormat

FORMAT = 1
"""Version of the on-disk format that this code writes, and the highest that it reads."""
REFERENCES = "references"
"""Requirement of a manifest or index that refers to files of other checkpoints."""
KNOWN = frozenset({REFERENCES})
"""Requirements that this code meets."""
VERSION: Mapping[str, Any] = MappingProxyType({"format": FORMAT, "requires": []})
"""The members that every document of this version has."""


def check_version(members: object, *, file: str, checkpoint: str) -> dict[str, Any]:
    """The members of a document, if this code understands them.

    Args:
        members: the parsed document.
        file: its path, for the error.
        checkpoint: the checkpoint's name, for the error.

    Raises:
        UnsupportedFormat: a higher format, or a requirement that is not in `KNOWN`.
        ValueError: no format at all.
    """
    if type(members) is not dict:
        raise ValueError("not a JSON object")
    version, requires = members.get("format"), members.get("requires")
    if type(version) is not int or version < 1:
        raise ValueError("has no format number")
    if type(requires) is not list or any(type(item) is not str for item in requires):
        raise ValueError("has no list of requirements")
    unknown = [item for item in requires if item not in KNOWN]
    if version > FORMAT or unknown:
        raise unsupported([f"format {version}", *unknown], file=file, checkpoint=checkpoint)
    return members


def members_of_version(*, references: bool) -> dict[str, Any]:
    """The first members of a document: its format, and what its reader must understand.

    Args:
        references: whether it refers to files of other checkpoints.
    """
    return {**VERSION, "requires": [REFERENCES]} if references else dict(VERSION)


def check_references_required(members: Mapping[str, Any], *, references: bool) -> None:
    """See that a document which refers to other checkpoints says so where older readers look.

    Raises:
        ValueError: it does not.
    """
    if references and REFERENCES not in members["requires"]:
        raise ValueError("refers to other checkpoints without requiring it")


def unsupported(found: Sequence[str], *, file: str, checkpoint: str) -> UnsupportedFormat:
    """The error about a file that says something this version does not know.

    Args:
        found: what it says.
        file: its path.
        checkpoint: the checkpoint's name.
    """
    words = ", ".join(word[:40] for word in found[:10])
    message = f"{file} was written by a newer spotsafe ({words}); upgrade spotsafe to use it"
    return UnsupportedFormat(message, checkpoint=checkpoint, found=words)
