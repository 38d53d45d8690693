"""How a finished temporary file gets the final name, and only if nobody has it.

`os.link` fails if the name is taken, on every POSIX file system that has it. Shares and user-space file
systems often refuse it; there `renameat2` with `RENAME_NOREPLACE` does the same. Where both are refused, a
look and a plain rename remain: two writers at the same instant may both believe that they were first, the
later one's bytes stay, and the caller has to read back (rule 12 of the design).
"""

from __future__ import annotations

import ctypes
import errno
import os

# Linux, <fcntl.h> and <linux/fs.h>.
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

_REFUSED = frozenset(
    {
        errno.EPERM,
        errno.EACCES,
        errno.EINVAL,
        errno.ENOSYS,
        errno.EOPNOTSUPP,
        errno.EMLINK,
        errno.EXDEV,
    }
)


def place_new(temporary: str, final: str) -> bool:
    """Give `temporary` the name `final` if nothing has it; `temporary` may remain as a second name.

    Returns:
        True if no other writer can have got the name at the same instant; false after a look and a plain
        rename.

    Raises:
        FileExistsError: the name is taken; what has it was not touched.
    """
    for attempt in (_link, rename_noreplace):
        try:
            attempt(temporary, final)
            return True
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
    if os.path.lexists(final):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), final)
    os.rename(temporary, final)
    return False


def rename_noreplace(temporary: str, final: str) -> None:
    """`renameat2` with `RENAME_NOREPLACE`, which Python does not offer.

    Raises:
        OSError: with the call's errno; ENOSYS where the C library does not know it.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), final) from None
    source, target = os.fsencode(temporary), os.fsencode(final)
    if call(_AT_FDCWD, source, _AT_FDCWD, target, ctypes.c_uint(_RENAME_NOREPLACE)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), temporary, None, final)


def _link(temporary: str, final: str) -> None:
    try:
        os.link(temporary, final)
    except FileExistsError:
        # NFS repeats a request whose reply was lost, and then finds the name taken: by ourselves.
        if not _same_file(temporary, final):
            raise


def _same_file(temporary: str, final: str) -> bool:
    try:
        return os.path.samestat(os.lstat(temporary), os.lstat(final))
    except FileNotFoundError:
        return False
