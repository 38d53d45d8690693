"""Reading parts of data files: no block is read that is not needed, and none is used that was not verified."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from threading import local
from typing import Any

import numpy as np

from spotsafe.checkpoint.blocks import Block, block_of, check_size, finish, read_block, readers
from spotsafe.checkpoint.index_values import FileEntry, Index
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.read_progress import ReadProgress
from spotsafe.checkpoint.room import room_for
from spotsafe.machine import touch
from spotsafe.storage.store import Store, reads_in_place

THREADS = 8
"""Blocks read and digested at the same time."""
_STRAIGHT = 256 << 10
"""Bytes, on the average, from which on a call for each place costs less than the copy from one."""
_TOUCHED = 64 << 10
"""Bytes of memory from which on it is touched before it is filled: see `machine.touch`."""


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
    inside = sorted((_inside(block, part) for part in parts), key=itemgetter(0))
    for _, memory in inside:
        if len(memory) >= _TOUCHED:
            touch(_bytes(memory).ctypes.data, len(memory))
    with room_for(f"{name}/{block.file}"):
        buffers = _straight(block, inside, scratch)
        if buffers is not None and (len(buffers) == 1 or _pays(store, block, len(buffers))):
            read_block(store, name, block, *buffers)
            return
        whole = scratch.of(block.size)
    read_block(store, name, block, whole)
    data = _bytes(whole)
    for start, memory in inside:
        _bytes(memory)[:] = data[start : start + len(memory)]


def _inside(block: Block, part: Range) -> tuple[int, memoryview]:
    """The bytes of a block that belong to a range: offset in the block, and their memory."""
    low = max(block.start, part.start)
    high = min(block.start + block.size, part.start + len(part.memory))
    return low - block.start, part.memory[low - part.start : high - part.start]


def _straight(
    block: Block, inside: Sequence[tuple[int, memoryview]], scratch: _Scratch
) -> list[memoryview] | None:
    """Buffers that take the whole block, one behind the other; None if two ask for the same bytes."""
    buffers, at = [], 0
    for start, memory in [*inside, (block.size, memoryview(b""))]:
        if start < at:
            return None
        if start > at:  # nobody asks for these, but they have to be right too
            buffers.append(scratch.of(start - at))
        if len(memory):
            buffers.append(memory)
        at = start + len(memory)
    return buffers


def _pays(store: Store, block: Block, count: int) -> bool:
    return reads_in_place(store) and count * _STRAIGHT <= block.size


def _bytes(memory: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """As numpy has it, which lets other threads run while it copies."""
    return np.frombuffer(memory, dtype=np.uint8)
