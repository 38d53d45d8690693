"""Memory for what a checkpoint says it holds: refused in words where there can be none.

A checkpoint is untrusted data, and a sparse file of a terabyte takes no room on a disk. Most systems promise more
memory than they have and kill whoever uses it, so what can never fit is refused before it is asked for. What might
fit is tried: nobody's resume fails for a guess.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from spotsafe.errors import NotEnoughMemory
from spotsafe.human import size
from spotsafe.machine import meminfo, memory_groups


def check_room(needed: int, *, what: str, capacity: int | None = None) -> None:
    """Refuse what this machine, or this container, could not hold if it did nothing else.

    Args:
        needed: bytes.
        what: which needs them, for people.
        capacity: bytes of all memory; asked of the system by default.

    Raises:
        NotEnoughMemory: it can never fit.
    """
    most = memory_capacity() if capacity is None else capacity
    if most is not None and needed > most:
        raise NotEnoughMemory(
            f"{what} needs {size(needed)} of memory, and there are {size(most)} in all. Use a machine with more, "
            "or `spotsafe.load(url, names)` for a part of a checkpoint"
        )


@contextmanager
def room_for(what: str, *, by_torch: bool = False) -> Iterator[None]:
    """Say which file it is that the system grants no memory for.

    Args:
        what: the file, and the checkpoint it is of.
        by_torch: whether the body does nothing but ask torch for memory, which says no by a RuntimeError.

    Raises:
        NotEnoughMemory: the body got none.
    """
    try:
        yield
    except NotEnoughMemory:
        raise
    except (MemoryError, RuntimeError) as error:
        if not (by_torch or isinstance(error, MemoryError)):
            raise
        raise NotEnoughMemory(
            f"there is not enough memory for {what}: {str(error) or 'none is left'}. Nothing was taken for damaged"
        ) from error


def memory_capacity() -> int | None:
    """All memory that this process could ever have, swap included, in bytes; None where the system does not say."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    if total <= 0:
        return None
    return min([total, *(group.limit for group in memory_groups())]) + (meminfo("SwapTotal") or 0)
