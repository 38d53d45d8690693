"""The arena: one block of host memory that is byte for byte the files of a save."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import sys
import threading
import weakref

from spotsafe.descriptors import File, close_if, file_at
from spotsafe.machine import touch

PAGE = 4096
_WORTH_TOUCHING = 16 << 20
_AT_ONCE = 32 << 20
"""Bytes that are touched by one call: meanwhile no thread of the process can map or unmap memory."""

_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_shared: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class Arena:
    """Memory, aligned to pages, outside the allocators of Python and torch.

    Pages take no memory until they are first written, and keep what they took until the arena is closed: the
    cost of saving is this block and does not grow from save to save. A larger state needs a new arena.

    Args:
        size: bytes wanted; rounded up to whole pages.
        shared: whether another process is to read it too; only where `can_share` says that this works.

    Attributes:
        size: bytes there are.
        view: all of it, writable. Valid until `close`.
        number: tells it from every other arena of this process.
        fd: of shared memory, the descriptor that another process can map; else None.

    Raises:
        MemoryError: the system does not grant so much.
        ValueError: a negative size.
    """

    def __init__(self, size: int, *, shared: bool = False) -> None:
        if size < 0:
            raise ValueError(f"an arena cannot have {size} bytes")
        self.size = max(-(-size // PAGE), 1) * PAGE
        self.number = next(_numbers)
        self.fd: int | None = None
        try:
            self._map = mmap.mmap(
                -1, self.size
            )  # also of shared memory, of which the system would promise any amount
            if shared:
                self._map.close()
                self.fd, self._map = _shared_map(self.size)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no {self.size} bytes of memory to stage a save in: {error}") from error
        if hasattr(mmap, "MADV_DONTFORK"):
            # Loader workers are forked. One that outlives us must not hold this memory, nor disturb O_DIRECT.
            self._map.madvise(mmap.MADV_DONTFORK)
            _maps.add(self._map)
        self._pid = os.getpid()
        self._touching: threading.Thread | None = None
        self._over = threading.Event()
        self.view = memoryview(self._map)
        if self.fd is not None:
            _shared[self.number] = self
            self._file = file_at(self.fd)
            self._closing = weakref.finalize(self, _close_here, self.fd, self._file, self._pid)
            self._closing.atexit = False

    def descriptor(self) -> int:
        """`fd`, to be given to another process.

        Raises:
            OSError: the program has closed it, and what is open there by now, if anything, is something else.
        """
        if self.fd is None or file_at(self.fd) != self._file:
            raise OSError(
                errno.EBADF, f"the program has closed descriptor {self.fd}, shared memory of spotsafe"
            )
        return self.fd

    def touch(self) -> None:
        """Let the pages be there before they are needed, in the background; where that cannot be done, nothing.

        The first write to a page takes several times as long as the next one.
        """
        if self._touching is not None or self.size < _WORTH_TOUCHING or sys.platform != "linux":
            return
        self._touching = threading.Thread(
            target=_touch, args=(self._map, self.size, self._over), name="spotsafe-touch", daemon=True
        )
        try:
            self._touching.start()
        except BaseException as error:  # Ctrl-C too: nobody knows whether there is a thread to wait for
            self._touching = None
            if not isinstance(error, RuntimeError):  # no thread to be had
                raise

    def close(self) -> None:
        """Give the memory back: at once, or as soon as the last array over it is gone. Nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        self._over.set()
        if self._touching is not None:
            self._touching.join()
        if self.fd is not None:
            self._closing()
            self.fd = None
        with contextlib.suppress(BufferError):  # somebody still looks at it: it goes with the last of them
            self.view.release()
            self._map.close()


def can_share() -> bool:
    """Whether this system has memory that can be handed to another process by a descriptor, and by nothing else."""
    return hasattr(os, "memfd_create") and os.path.isdir(_OPEN_FILES)


def shared_arena(view: memoryview) -> Arena | None:
    """The shared arena that a view shows from its beginning; None if it is other memory."""
    for arena in list(_shared.values()):
        if arena.fd is not None and view.obj is arena._map:  # noqa: SLF001 - of this module
            return arena
    return None


def open_numbers() -> frozenset[int]:
    """The numbers of the shared arenas of this process that are not closed."""
    return frozenset(arena.number for arena in list(_shared.values()) if arena.fd is not None)


def _touch(memory: mmap.mmap, size: int, over: threading.Event) -> None:
    """Held by this thread, the memory stays mapped."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for start in range(0, size, _AT_ONCE):
        if over.is_set() or not touch(address + start, min(_AT_ONCE, size - start)):
            return


_OPEN_FILES = "/proc/self/fd"


def _shared_map(size: int) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create("spotsafe-arena", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        if sys.version_info >= (3, 13):
            return fd, mmap.mmap(fd, size, trackfd=False)
        found = mmap.mmap(fd, size)
        _hide_copies(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd, found


def _hide_copies(fd: int) -> None:
    """Let the descriptor that `mmap` keeps for itself mean nothing: a forked child would hold the memory by it.

    It cannot be closed, for its number would soon be that of another file, which `mmap` would close one day.
    """
    wanted = os.fstat(fd)
    nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for other in map(int, os.listdir(_OPEN_FILES)):
            with contextlib.suppress(OSError):
                if other != fd and os.path.samestat(os.fstat(other), wanted):
                    os.dup2(nothing, other, inheritable=False)
    finally:
        os.close(nothing)


def _close_here(fd: int, file: File | None, pid: int) -> None:
    if os.getpid() == pid:
        close_if(file, fd)


def _keep_in_child() -> None:
    """A forked child does not have the memory. Unmapping it there would tear away what lies in its place by now.

    That is what happens when the child's collector finds an arena in a cycle, so here none is ever let go of. The
    descriptors of shared memory are closed: through them a worker would keep what its trainer has given back.
    """
    for one in list(_maps):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    for arena in list(_shared.values()):
        fd, arena.fd = arena.fd, None
        if fd is not None:
            close_if(arena._file, fd)  # noqa: SLF001 - of this module


os.register_at_fork(after_in_child=_keep_in_child)
