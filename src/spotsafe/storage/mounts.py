"""On what kind of file system a folder lies, and whether its word can be trusted that bytes are on a disk.

A local store brings every object to the disk before it says so. Some file systems say so too soon: what was written
lies in the memory or on the disk of this very machine, and a cache uploads it when it finds the time. On a machine that
vanishes, that is a checkpoint which was published and is lost.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from spotsafe.storage.open import local_path

_ESCAPED = re.compile(r"\\([0-7]{3})")
_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
# User-space file systems that lie on a disk of this machine and pass a sync on to it.
_FUSE_ON_DISK = frozenset({"fuse.bindfs", "fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuseblk"})
_LOOSE_9P = frozenset({"cache=loose", "cache=fscache", "cache=mmap"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A line of the kernel's table."""

    point: str
    """Where it is mounted."""
    kind: str
    """As the kernel calls it, like ``"ext4"`` or ``"fuse.rclone"``."""
    options: frozenset[str]


def parse_mounts(text: str) -> list[Mount]:
    """The lines of ``/proc/self/mounts``; what does not look like one is left out."""
    fields = (line.split(" ") for line in text.splitlines())
    return [
        Mount(point=_plain(one[1]), kind=one[2], options=frozenset(one[3].split(",")))
        for one in fields
        if len(one) >= 4
    ]


def mount_of(path: str, mounts: Iterable[Mount]) -> Mount | None:
    """The mount on which an absolute path without links lies: the deepest, and of several there the last."""
    found: Mount | None = None
    for one in mounts:
        inside = path == one.point or path.startswith(one.point.rstrip("/") + "/")
        if inside and (found is None or len(one.point) >= len(found.point)):
            found = one
    return found


def doubt_about(mount: Mount) -> str | None:
    """Why a write on this mount may return before it is durable; None if there is no reason to think so."""
    if mount.kind in _MEMORY:
        return f"{mount.point} is memory of this machine ({mount.kind}); checkpoints there are lost with it"
    if mount.kind.startswith("fuse") and mount.kind not in _FUSE_ON_DISK:
        return (
            f"{mount.point} is a user-space file system ({mount.kind}), which may say that a file is written while it "
            "lies in a cache of this machine; give the store's own url (s3://, gs://, abfs://), or mount it without "
            "a write cache"
        )
    if mount.kind == "9p" and mount.options & _LOOSE_9P:
        return f"{mount.point} (9p) is mounted with a write cache; mount it with cache=none"
    return None


def durability_doubt(url: str) -> str | None:
    """Why what is written to a run's url may not be durable, for a local one, as far as the kernel tells."""
    path = local_path(url)
    if path is None:
        return None
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as table:
            mounts = parse_mounts(table.read())
    except OSError:  # no such table on this system: nothing is known
        return None
    mount = mount_of(os.path.realpath(path), mounts)
    return None if mount is None else doubt_about(mount)


def _plain(word: str) -> str:
    """The kernel writes spaces, tabs and backslashes as octal numbers."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), word)
