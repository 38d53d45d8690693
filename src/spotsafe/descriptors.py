"""Descriptors that are kept for long, in a process whose program may close all there are.

Programs that turn into daemons do (``os.closerange(3, ...)``). The number of such a descriptor is soon that of a file
of the program's own: to close it would take that away, and to use it would mix two things up.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class File:
    """What is open at a descriptor: equal ones are the same file."""

    device: int
    inode: int


def file_at(descriptor: int) -> File | None:
    """What is open there; None if nothing is."""
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return File(found.st_dev, found.st_ino)


def close_if(file: File | None, descriptor: int) -> None:
    """Close a descriptor if this file is still open there."""
    if file is not None and file_at(descriptor) == file:
        with contextlib.suppress(OSError):
            os.close(descriptor)
