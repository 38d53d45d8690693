"""A user-space file system for tests: a folder seen through the kernel's FUSE, without what a test takes away.

Run as ``python passthrough.py BEHIND POINT [no-link] [no-noreplace] [no-direct] [no-folder-sync]``.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from typing import Any

import mfusepy

_STAT = (
    "st_atime_ns",
    "st_mtime_ns",
    "st_ctime_ns",
    "st_mode",
    "st_nlink",
    "st_size",
    "st_uid",
    "st_gid",
    "st_ino",
)
_NOREPLACE = 1


class Passthrough(mfusepy.Operations):
    """Hands everything on to a folder.

    Args:
        behind: the folder.
        without: what the file system does not have; see the words above.
    """

    use_ns = True

    def __init__(self, behind: str, without: frozenset[str]) -> None:
        self._behind = behind
        self._without = without
        self._renaming = threading.Lock()

    def _at(self, path: str) -> str:
        return self._behind + path

    def _refuse(self, word: str, number: int) -> None:
        if word in self._without:
            raise mfusepy.FuseOSError(number)

    def getattr(self, path: str | None, fh: int | None = None) -> dict[str, Any]:
        # An open file that has no name any more has no path either.
        found = os.fstat(fh) if path is None and fh is not None else os.lstat(self._at(path or ""))
        return {name.removesuffix("_ns"): getattr(found, name) for name in _STAT}

    def readdir(self, path: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
        here = self.getattr(path)
        with os.scandir(self._at(path)) as entries:
            # A name without a number is one that was deleted, to whoever lists.
            found = [(one.name, one.is_dir(follow_symlinks=False), one.inode()) for one in entries]
        kinds = [
            (name, {"st_mode": 0o40000 if is_dir else 0, "st_ino": ino}, 0) for name, is_dir, ino in found
        ]
        return [(".", here, 0), ("..", here, 0), *kinds]

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._at(target))
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def link(self, target: str, source: str) -> int:
        self._refuse("no-link", errno.EPERM)
        os.link(self._at(source), self._at(target))
        return 0

    def rename(self, old: str, new: str, flags: int = 0) -> int:
        if flags:
            self._refuse("no-noreplace", errno.EINVAL)
        if flags & ~_NOREPLACE:
            raise mfusepy.FuseOSError(errno.EINVAL)
        with self._renaming:
            if flags and os.path.lexists(self._at(new)):
                raise mfusepy.FuseOSError(errno.EEXIST)
            os.rename(self._at(old), self._at(new))
        return 0

    def create(self, path: str, mode: int, flags: int = 0) -> int:
        fd = os.open(self._at(path), flags & ~os.O_DIRECT | os.O_CREAT, mode)
        if flags & os.O_DIRECT and "no-direct" in self._without:
            os.close(fd)  # the file is there, as on many such file systems
            raise mfusepy.FuseOSError(errno.EINVAL)
        return fd

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            self._refuse("no-direct", errno.EINVAL)
        return os.open(self._at(path), flags & ~os.O_DIRECT)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path) if fh is None else fh, length)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        (os.fdatasync if datasync else os.fsync)(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._refuse("no-folder-sync", errno.EOPNOTSUPP)
        return 0


class Mount(mfusepy.FUSE):
    """The library forgets the flags of a rename, and would go over what is there."""

    def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
        return self.operations.rename(os.fsdecode(old), os.fsdecode(new), flags)


if __name__ == "__main__":
    behind, point, *words = sys.argv[1:]
    Mount(
        Passthrough(behind, frozenset(words)),
        point,
        foreground=True,
        fsname="spotsafe-tests",
        subtype="passthrough",
        hard_remove=True,
        use_ino=True,
        attr_timeout=0,
        entry_timeout=0,
    )
