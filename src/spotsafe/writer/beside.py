"""Work on staged bytes beside their writing: digests and the search for NaN cost no time of their own.

Both leave the interpreter's lock and read memory that nobody changes, while the thread that writes waits for a disk
or a network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

WORTH_IT = 8 << 20
"""Bytes from which threads are made: below, the work takes less time than they do."""
_THREADS = 2

Begin = Callable[[Callable[[], Any]], "Future[Any]"]


@contextmanager
def beside(total_bytes: int) -> Iterator[Begin]:
    """Gives a function that begins work and returns its future; at the end nothing goes on any more.

    Args:
        total_bytes: how much there is to work on. For little, the work is done at once.
    """
    if total_bytes < WORTH_IT:
        yield _at_once
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="spotsafe-digest") as pool:
        try:
            yield pool.submit
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _at_once(work: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except Exception as error:  # noqa: BLE001 - a future holds whatever its work raised
        done.set_exception(error)
    return done
