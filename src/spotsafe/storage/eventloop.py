"""An event loop of a store's own, on a thread of its own.

fsspec runs every asynchronous file system of a process on one shared loop. A data loader's blocking callback
there would hold up checkpoints, so a store does not share it. And fsspec's way of waiting takes a request that was
cancelled for one that returned None, and goes on with a request whose caller was interrupted; ours does neither.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Goodbye = Callable[[], Awaitable[None]]

# How long the end of the process waits for connections to be closed, in seconds.
_CLOSING_S = 2.0


class PrivateLoop:
    """A running event loop that stops and closes when `owner` is gone, or the process ends.

    Attributes:
        loop: the loop itself.
        goodbyes: coroutine functions that are run, in order, before the loop stops: they close connections.
    """

    def __init__(self, owner: object) -> None:
        self.loop = asyncio.new_event_loop()
        self.goodbyes: list[Goodbye] = []
        self._thread = threading.Thread(target=_run, args=(self.loop,), name="spotsafe-storage", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(owner, _stop, self.loop, self._thread, self.goodbyes, os.getpid())

    def close(self) -> None:
        """Cancel what is under way, say goodbye, stop, and wait for that; a second call does nothing."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSING_S)

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float | None = None) -> T:
        """The result of a coroutine that runs on the loop; called from any thread but the loop's.

        An exception in this thread, such as an interrupt, cancels the coroutine.

        Raises:
            TimeoutError: it took longer than `timeout_s` seconds and was cancelled, or something else
                cancelled it.
        """
        job = _Job(coroutine, timeout_s)
        try:
            return asyncio.run_coroutine_threadsafe(job.run(), self.loop).result()
        except concurrent.futures.CancelledError:
            raise TimeoutError("the request was cancelled; what became of it is not known") from None
        except BaseException:
            self.loop.call_soon_threadsafe(job.cancel)
            raise


async def gather(jobs: Iterable[Callable[[], Awaitable[None]]], *, at_once: int) -> None:
    """Do all jobs, so many at a time. The first that fails ends the others, which have ended when it is raised."""
    waiting = iter(jobs)

    async def work() -> None:
        for job in waiting:
            await job()

    workers = [asyncio.ensure_future(work()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


class _Job(Generic[T]):
    """A coroutine that can be cancelled at any moment: an interrupt may come while it is being handed over."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None) -> None:
        self._coroutine = coroutine
        self._timeout_s = timeout_s
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False

    async def run(self) -> T:
        self._task = asyncio.current_task()
        if self._is_cancelled:
            raise asyncio.CancelledError
        try:
            return await asyncio.wait_for(self._coroutine, self._timeout_s)
        except asyncio.TimeoutError as error:
            # Before Python 3.11 asyncio's is not the built-in one.
            raise TimeoutError(str(error) or "no answer came in time") from error

    def cancel(self) -> None:
        """Called on the loop; nothing happens if the job is done."""
        self._is_cancelled = True
        if self._task is None:
            self._coroutine.close()
        else:
            self._task.cancel()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _stop(
    loop: asyncio.AbstractEventLoop, thread: threading.Thread, goodbyes: list[Goodbye], pid: int
) -> None:
    # A forked child inherits this call, but not the thread; the loop's wake-up pipe is its parent's.
    if pid != os.getpid() or loop.is_closed():
        return
    asyncio.run_coroutine_threadsafe(_leave(goodbyes, loop), loop)
    if not threading.main_thread().is_alive():  # the process ends, and would take the loop's thread with it
        thread.join(_CLOSING_S)


async def _leave(goodbyes: list[Goodbye], loop: asyncio.AbstractEventLoop) -> None:
    try:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        while goodbyes:
            with suppress(Exception):  # to have been rude is no reason to fail
                await asyncio.wait_for(goodbyes.pop(0)(), _CLOSING_S)
        await asyncio.sleep(0)  # transports that were closed just now take leave in the next round
    finally:
        loop.stop()
