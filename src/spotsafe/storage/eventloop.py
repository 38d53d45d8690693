"""An event loop of a store's own, on a thread of its own.

fsspec runs every asynchronous file system of a process on one shared loop. A data loader's blocking callback
there would hold up checkpoints, so a store does not share it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref


def private_loop(owner: object) -> asyncio.AbstractEventLoop:
    """A running event loop that stops and closes when `owner` is gone, or the process ends."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="spotsafe-storage", daemon=True).start()
    weakref.finalize(owner, _stop, loop, os.getpid())
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(loop: asyncio.AbstractEventLoop, pid: int) -> None:
    # A forked child inherits this call, but not the thread; the loop's wake-up pipe is its parent's.
    if pid == os.getpid() and not loop.is_closed():
        loop.call_soon_threadsafe(loop.stop)
