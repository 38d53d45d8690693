"""Reading parts of data files: no block is read that is not needed, and none is used that was not verified."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import local

import numpy as np

from spotsafe.checkpoint.blocks import Block, block_of, check_size, finish, read_block, readers
from spotsafe.checkpoint.index_values import FileEntry, Index
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.read_progress import ReadProgress
from spotsafe.checkpoint.room import room_for
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


def read_ranges(
    store: Store,
    name: CheckpointName,
    indexes: Iterable[Index],
    ranges: Iterable[Range],
    *,
    threads: int = THREADS,
    every_block: bool = False,
    progress: ReadProgress | None = None,
) -> None:
    """Fill every range's memory with verified bytes.

    Besides the ranges themselves this takes the memory of `threads` blocks.

    Args:
        store: the run.
        name: the checkpoint.
        indexes: of the checkpoint; they list every file that a range names.
        ranges: in any order.
        threads: blocks at the same time; with 1 the caller's own thread reads, in a fixed order.
        every_block: verify all blocks of all files, also those that hold nothing of a range.
        progress: is told of each block.

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
    scratch = _Scratch()

    def fill(block: Block, parts: Sequence[Range]) -> None:
        _fill(store, name, block, parts, scratch)
        if progress is not None:
            progress.add(block.size)

    with readers(threads) as pool:
        jobs = [
            pool.submit(fill, block, parts)
            for file in (files if every_block else by_file)
            for block, parts in _blocks(name, *files[file], by_file[file], every=every_block)
        ]
        finish(jobs, progress=progress)


def check_sizes(store: Store, name: CheckpointName, indexes: Iterable[Index], files: Collection[str]) -> None:
    """See that files are as large as their index says, before anybody makes room for their content.

    Raises:
        DamagedCheckpoint: one is not.
        StorageNotFound: one is not there.
        StorageError: the store could not say.
    """
    for entry in (entry for index in indexes for entry in index.files if entry.name in files):
        check_size(store, name, entry)


def _blocks(
    name: CheckpointName, entry: FileEntry, block_size: int, wanted: Sequence[Range], *, every: bool
) -> Iterator[tuple[Block, list[Range]]]:
    parts: Mapping[int, list[Range]] = defaultdict(list)
    if every:
        parts = {number: [] for number in range(len(entry.digests))}
    for one in wanted:
        for number in range(one.start // block_size, -(-(one.start + len(one.memory)) // block_size)):
            parts[number].append(one)
    for number, inside in sorted(parts.items()):
        yield block_of(name, entry, number, block_size=block_size), inside


class _Scratch(local):
    """Memory for one block in each thread that reads. New memory for every block would cost more than reading it."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def of(self, size: int) -> memoryview:
        if len(self._memory) < size:
            self._memory = bytearray(size)
        return memoryview(self._memory)[:size]


def _fill(
    store: Store, name: CheckpointName, block: Block, parts: Sequence[Range], scratch: _Scratch
) -> None:
    if len(parts) == 1:
        at = block.start - parts[0].start
        if at >= 0 and at + block.size <= len(parts[0].memory):
            read_block(store, name, block, parts[0].memory[at : at + block.size])
            return
    with room_for(f"{name}/{block.file}"):
        buffer = scratch.of(block.size)
    read_block(store, name, block, buffer)
    data = np.frombuffer(buffer, dtype=np.uint8)
    for part in parts:
        low = max(block.start, part.start)
        high = min(block.start + block.size, part.start + len(part.memory))
        target = np.frombuffer(part.memory, dtype=np.uint8)  # numpy lets other threads run while it copies
        target[low - part.start : high - part.start] = data[low - block.start : high - block.start]
