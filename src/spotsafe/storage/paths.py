"""Which paths an object may have, and which names belong to files that are not objects yet."""

from __future__ import annotations

import secrets

TEMPORARY = ".tmp-"
"""How the name of a file begins that is still being written. Never shown, never an object's name."""


def check_path(path: str) -> str:
    """`path` itself, if it names an object inside a run.

    Raises:
        ValueError: it is empty, absolute, leaves the run, or uses a reserved name.
    """
    if not path:
        raise ValueError("an object's path must not be empty")
    return check_folder(path)


def check_folder(folder: str) -> str:
    """`folder` itself, if it names a folder inside a run; ``""`` is the run itself.

    Raises:
        ValueError: it is absolute, leaves the run, or uses a reserved name.
    """
    if not folder:
        return folder
    if "\0" in folder:
        raise ValueError(f"a path must not hold a NUL character: {folder!r}")
    for part in folder.split("/"):
        if part in {"", ".", ".."}:
            raise ValueError(
                f"a path must be relative to the run, without empty parts, '.' or '..': {folder!r}; "
                "write it like 'attempts/000001.json'"
            )
        if is_temporary(part):
            raise ValueError(f"names that begin with {TEMPORARY!r} are reserved: {folder!r}")
    return folder


def is_temporary(name: str) -> bool:
    """Whether a base name is that of a file still being written."""
    return name.startswith(TEMPORARY)


def temporary_name() -> str:
    """A base name for a file to be written that nobody else uses."""
    return TEMPORARY + secrets.token_hex(8)
