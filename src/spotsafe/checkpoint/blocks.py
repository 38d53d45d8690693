"""Reading the bytes of one digest, and believing them: the one place where data that was published is verified."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from spotsafe.checkpoint.digest import new_block_digest
from spotsafe.checkpoint.index_values import FileEntry
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.read_progress import ReadProgress
from spotsafe.errors import DamagedCheckpoint, StorageShort
from spotsafe.storage.store import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Block:
    """One digest's bytes of a data file."""

    path: str
    file: str
    """For people: the file's name, with that of its checkpoint if it is referred to."""
    start: int
    """Offset in the file in bytes."""
    size: int
    """In bytes."""
    digest: str


def block_of(name: CheckpointName, entry: FileEntry, number: int, *, block_size: int) -> Block:
    """Block `number`, from 0, of a file of the checkpoint `name`."""
    start = number * block_size
    size = min(block_size, entry.size - start)
    return Block(entry.path(name), entry.shown(), start, size, entry.digests[number])


def check_size(store: Store, name: CheckpointName, entry: FileEntry) -> None:
    """See that a file is as large as its index says, before anybody makes room for it.

    A longer file may hold all the right bytes, but it is not the one that was published.

    Raises:
        DamagedCheckpoint: it is not, also at a second look.
        StorageNotFound: it is not there.
        StorageError: the store could not say.
    """
    path = entry.path(name)
    if store.size(path) != entry.size and (size := store.size(path)) != entry.size:
        reason = f"has {size} bytes, not {entry.size}"
        raise DamagedCheckpoint(checkpoint=str(name), file=entry.shown(), reason=reason)


def read_block(store: Store, name: CheckpointName, block: Block, *buffers: memoryview) -> None:
    """Fill buffers, which one behind the other have the block's size, with its verified bytes.

    What was read is digested before the next of them is filled: those that nobody asks for may be the same memory.

    Raises:
        DamagedCheckpoint: the bytes differ from what was published, or end too soon, also at a second read.
        StorageNotFound: the file is not there.
        StorageError: it could not be read.
    """
    assert sum(map(len, buffers)) == block.size
    reason = ""
    where = f"bytes {block.start} to {block.start + block.size}"
    for _ in range(2):  # what a second read over sees too is damage
        digest, at = new_block_digest(), block.start
        try:
            for buffer in buffers:
                store.read_into(block.path, at, buffer)
                digest.update(buffer)
                at += len(buffer)
        except StorageShort as error:
            reason = f"is too short: {where} cannot be read ({error})"
            continue
        if digest.hexdigest() == block.digest:
            return
        reason = f"{where} are not what was published"
    raise DamagedCheckpoint(checkpoint=str(name), file=block.file, reason=reason)


def finish(jobs: Sequence[Future[None]], *, progress: ReadProgress | None = None) -> None:
    """Wait for all of them; the first error in their order is raised, and what has not begun then never does."""
    try:
        for job in jobs:
            if progress is not None:
                progress.wait_for(job)
            job.result()
    finally:
        for job in jobs:
            job.cancel()


class _InTurn(Executor):
    """Does each job at once, in the thread that hands it in."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - a future holds whatever its job raised
            future.set_exception(error)
        return future


def readers(threads: int) -> Executor:
    """Threads that read; with 1 the caller's own, in a fixed order."""
    if threads == 1:
        return _InTurn()
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix="spotsafe-read")
