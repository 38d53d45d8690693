"""The arena: one block of host memory that is byte for byte the files of a save."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

PAGE = 4096

_maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


class Arena:
    """Anonymous memory, aligned to pages, outside the allocators of Python and torch.

    Pages take no memory until they are first written, and keep what they took until the arena is closed: the
    cost of saving is this block and does not grow from save to save. A larger state needs a new arena.

    Args:
        size: bytes wanted; rounded up to whole pages.

    Attributes:
        size: bytes there are.
        view: all of it, writable. Valid until `close`.

    Raises:
        MemoryError: the system does not grant so much.
        ValueError: a negative size.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"an arena cannot have {size} bytes")
        self.size = max(-(-size // PAGE), 1) * PAGE
        try:
            self._map = mmap.mmap(-1, self.size)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"no {self.size} bytes of memory to stage a save in: {error}") from error
        if hasattr(mmap, "MADV_DONTFORK"):
            # Loader workers are forked. One that outlives us must not hold this memory, nor disturb O_DIRECT.
            self._map.madvise(mmap.MADV_DONTFORK)
            _maps.add(self._map)
        self._pid = os.getpid()
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Give the memory back: at once, or as soon as the last array over it is gone. Nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(BufferError):  # somebody still looks at it: it goes with the last of them
            self.view.release()
            self._map.close()


def _keep_in_child() -> None:
    """A forked child does not have the memory. Unmapping it there would tear away what lies in its place by now.

    That is what happens when the child's collector finds an arena in a cycle, so here none is ever let go of.
    """
    for one in list(_maps):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


os.register_at_fork(after_in_child=_keep_in_child)
