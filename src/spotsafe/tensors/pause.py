"""Python's garbage collector, paused for a moment."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Run no garbage collection inside.

    A capture makes some ten thousand small objects and frees none. The collections that this sets off walk the whole
    program, find nothing, and take twice as long as the capture itself.
    """
    enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if enabled:
            gc.enable()
