"""How bytes get into an open file, and how files and folders get onto the disk.

`O_DIRECT` writes straight from page-aligned memory: no copy into the page cache, and a sixth of the processor
time. Where a file system refuses it, the same calls write through the cache.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

PAGE = 4096
"""Alignment in bytes that `O_DIRECT` needs of address, offset and length on every common file system."""
DIRECT_FROM = 1024 * 1024
"""Bytes from which `O_DIRECT` pays: below, the copy costs less than the wait."""
CHUNK = 16 * 1024 * 1024
"""Bytes handed to one system call."""

_DIRECT_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
# Some network and user-space file systems have no such call on folders; their folders need none.
_FOLDER_SYNC_UNKNOWN = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})


def flat(data: memoryview) -> memoryview:
    """The same memory as one row of bytes."""
    return data if data.format == "B" and data.ndim == 1 else data.cast("B")


def window(offset: int, buffer: memoryview) -> memoryview:
    """The buffer of a read, as one row of bytes.

    Raises:
        ValueError: the offset (bytes) is negative.
    """
    if offset < 0:
        raise ValueError(f"offset must not be negative: {offset}")
    return flat(buffer)


def is_page_aligned(data: memoryview) -> bool:
    """Whether the memory begins at a multiple of `PAGE`."""
    import numpy as np  # noqa: PLC0415 - a tenth of a second that only writers of large data should pay

    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data) % PAGE == 0


def open_new(path: str, *, direct: bool = False) -> int:
    """Descriptor of a new file, opened for writing; an existing one is an error.

    Args:
        path: the file.
        direct: ask for `O_DIRECT`, and do without where it is refused.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    if direct:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _DIRECT_REFUSED:
                raise
            # A file system may create the file and only then refuse to open it this way.
            if os.path.lexists(path):
                os.unlink(path)
    return os.open(path, flags, 0o666)


def write_all(fd: int, data: memoryview) -> None:
    """Write all of `data` at the descriptor's position, however little a single call takes."""
    done = 0
    while done < len(data):
        done += os.write(fd, data[done : done + CHUNK])


def write_aligned(fd: int, data: memoryview) -> None:
    """Write all of `data`, page-aligned memory, at the start of a file that may be open with `O_DIRECT`.

    The last, incomplete page goes through a padded copy, and the padding is cut off again. If the file system
    refuses a direct write after all, the rest is written through the page cache.
    """
    whole = len(data) // PAGE * PAGE
    try:
        write_all(fd, data[:whole])
        if whole < len(data):
            page = mmap.mmap(-1, PAGE)
            page[: len(data) - whole] = data[whole:]
            write_all(fd, memoryview(page))
    except OSError as error:
        if error.errno not in _DIRECT_REFUSED:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        write_all(fd, data[os.lseek(fd, 0, os.SEEK_CUR) :])
    os.ftruncate(fd, len(data))


def sync_folder(folder: str) -> None:
    """Return when the names in a folder are on the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _FOLDER_SYNC_UNKNOWN:
            raise
    finally:
        os.close(fd)
