"""Reading parts of data files: no block is read that is not needed, and none is used that was not verified."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from spotsafe.checkpoint.digest import block_digest
from spotsafe.checkpoint.index_values import FileEntry, Index
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.errors import DamagedCheckpoint, StorageShort
from spotsafe.storage.store import Store

THREADS = 8
"""Blocks read and digested at the same time."""


@dataclass(frozen=True, slots=True)
class Range:
    """Consecutive bytes of a data file, and the memory that they go to."""

    file: str
    start: int
    memory: memoryview
    """Flat and writable; its length is that of the range."""


@dataclass(frozen=True, slots=True)
class _Block:
    """One digest's bytes of a file."""

    path: str
    file: str
    start: int
    size: int
    digest: str


def read_ranges(
    store: Store,
    name: CheckpointName,
    indexes: Iterable[Index],
    ranges: Iterable[Range],
    *,
    threads: int = THREADS,
) -> None:
    """Fill every range's memory with verified bytes.

    Besides the ranges themselves this takes the memory of `threads` blocks.

    Args:
        store: the run.
        name: the checkpoint.
        indexes: of the checkpoint; they list every file that a range names.
        ranges: in any order.
        threads: blocks at the same time.

    Raises:
        DamagedCheckpoint: bytes differ from what was published, also at a second read.
        StorageNotFound: a file is not there.
        StorageError: it could not be read.
    """
    files = {entry.name: (entry, index.block_size) for index in indexes for entry in index.files}
    by_file: dict[str, list[Range]] = defaultdict(list)
    for one in ranges:
        if len(one.memory):
            by_file[one.file].append(one)
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="spotsafe-read") as pool:
        jobs = [
            pool.submit(_fill, store, name, block, parts)
            for file, wanted in by_file.items()
            for block, parts in _blocks(name, *files[file], wanted)
        ]
        try:
            for job in jobs:
                job.result()
        finally:
            for job in jobs:
                job.cancel()


def check_sizes(store: Store, name: CheckpointName, indexes: Iterable[Index], files: Collection[str]) -> None:
    """See that files are as large as their index says, before anybody makes room for their content.

    Raises:
        DamagedCheckpoint: one is not.
        StorageNotFound: one is not there.
        StorageError: the store could not say.
    """
    for entry in (entry for index in indexes for entry in index.files if entry.name in files):
        path = entry.path(name)
        if store.size(path) != entry.size and (size := store.size(path)) != entry.size:
            reason = f"has {size} bytes, not {entry.size}"
            raise DamagedCheckpoint(checkpoint=str(name), file=entry.shown(), reason=reason)


def _blocks(
    name: CheckpointName, entry: FileEntry, block_size: int, wanted: Sequence[Range]
) -> Iterator[tuple[_Block, list[Range]]]:
    parts: Mapping[int, list[Range]] = defaultdict(list)
    for one in wanted:
        for number in range(one.start // block_size, -(-(one.start + len(one.memory)) // block_size)):
            parts[number].append(one)
    path = entry.path(name)
    for number, inside in sorted(parts.items()):
        start = number * block_size
        size = min(block_size, entry.size - start)
        yield _Block(path, entry.shown(), start, size, entry.digests[number]), inside


def _fill(store: Store, name: CheckpointName, block: _Block, parts: Sequence[Range]) -> None:
    first = parts[0]
    at = block.start - first.start
    if at >= 0 and at + block.size <= len(first.memory) and len(parts) == 1:
        _read(store, name, block, first.memory[at : at + block.size])
        return
    buffer = memoryview(bytearray(block.size))
    _read(store, name, block, buffer)
    for part in parts:
        low = max(block.start, part.start)
        high = min(block.start + block.size, part.start + len(part.memory))
        part.memory[low - part.start : high - part.start] = buffer[low - block.start : high - block.start]


def _read(store: Store, name: CheckpointName, block: _Block, buffer: memoryview) -> None:
    reason = ""
    where = f"bytes {block.start} to {block.start + block.size}"
    for _ in range(2):  # what a second read sees too is damage
        try:
            store.read_into(block.path, block.start, buffer)
        except StorageShort as error:
            reason = f"is too short: {where} cannot be read ({error})"
            continue
        if block_digest(buffer) == block.digest:
            return
        reason = f"{where} are not what was published"
    raise DamagedCheckpoint(checkpoint=str(name), file=block.file, reason=reason)
