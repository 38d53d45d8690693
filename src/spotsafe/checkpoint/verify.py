"""Verifying a checkpoint: every digest, every size, every header, with bounded memory.

A difference is believed after a second read, so that one bad answer of a network or a disk is no verdict.
What the store cannot answer is not damage: it propagates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from spotsafe.checkpoint.blocks import block_of, check_size, read_block
from spotsafe.checkpoint.candidates import Candidate, read_candidate, read_index
from spotsafe.checkpoint.dtypes import require
from spotsafe.checkpoint.image import header_bytes, parse_header
from spotsafe.checkpoint.index import FileEntry, Index
from spotsafe.checkpoint.layout import MANIFEST, CheckpointName
from spotsafe.checkpoint.manifest import Part
from spotsafe.checkpoint.ranges import Range, read_ranges
from spotsafe.checkpoint.room import room_for
from spotsafe.errors import DamagedCheckpoint, StorageNotFound, UnsupportedFormat, UnsupportedState
from spotsafe.storage.store import Store

_FIRST = 8
"""Bytes of a safetensors file that say how long its header is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something in a checkpoint that is not as it was published."""

    file: str
    reason: str


Tensors = Counter[tuple[int, int, str, tuple[int, ...]]]
"""Place, bytes, dtype and shape of each tensor in a file."""
Good = dict[tuple[str, int, tuple[str, ...]], Tensors]
"""Path, block size and digests of files that were read and are as they should be -> what their headers list."""


def verify(store: Store, name: CheckpointName, *, good: Good | None = None) -> list[Fault]:
    """Read a whole checkpoint and compare it with its digests.

    Memory is bounded by one digest block and one index or header.

    Args:
        store: the run.
        name: the checkpoint.
        good: files that need not be read again, for several checkpoints that refer to the same ones; updated in
            place.

    Returns:
        Every fault, in the order in which a reader would meet them; empty if the checkpoint is whole.

    Raises:
        StorageError: the store could not answer; nothing is known.
        UnsupportedFormat: a newer spotsafe wrote it.
    """
    candidate = read_candidate(store, name)
    if isinstance(candidate.fault, UnsupportedFormat):
        raise candidate.fault
    if candidate.manifest is None:
        fault = candidate.fault
        reason = fault.reason if isinstance(fault, DamagedCheckpoint) else candidate.reason
        return [Fault(file=MANIFEST, reason=reason)]
    known: Good = {} if good is None else good
    return [
        fault for part in candidate.manifest.parts for fault in _part_faults(store, candidate, part, known)
    ]


def _part_faults(store: Store, candidate: Candidate, part: Part, good: Good) -> Iterator[Fault]:
    try:
        index = read_index(store, candidate, part)
    except StorageNotFound:
        yield Fault(file=part.file, reason="is missing")
        return
    except DamagedCheckpoint as error:
        yield Fault(file=part.file, reason=error.reason)
        return
    for file in index.files:
        yield from _file_faults(store, candidate.name, index, file, good)


def _file_faults(
    store: Store, name: CheckpointName, index: Index, file: FileEntry, good: Good
) -> Iterator[Fault]:
    key, shown = (file.path(name), index.block_size, file.digests), file.shown()
    try:
        check_size(store, name, file)
        if key not in good:
            header, bad = _read_blocks(store, name, index, file)
            if bad:
                more = f", and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
                yield Fault(file=shown, reason=bad[0] + more)
                return
            good[key] = _stored(header, file)
        if good[key] != _expected(index, file.name):
            yield Fault(file=shown, reason="its header lists other tensors than the index")
    except StorageNotFound:
        yield Fault(file=shown, reason="is missing")
    except DamagedCheckpoint as error:
        yield Fault(file=shown, reason=error.reason)
    except UnsupportedState as error:
        yield Fault(file=shown, reason=str(error))


def _read_blocks(
    store: Store, name: CheckpointName, index: Index, file: FileEntry
) -> tuple[bytearray, list[str]]:
    """The file's header, verified, and why each block that differs also at a second read is not as published."""
    header, bad = bytearray(), []
    with room_for(f"{name}/{file.shown()}"):
        buffer = memoryview(bytearray(min(index.block_size, file.size)))
    for number in range(len(file.digests)):
        block = block_of(name, file, number, block_size=index.block_size)
        try:
            read_block(store, name, block, buffer[: block.size])
        except DamagedCheckpoint as error:
            bad.append(error.reason)
            continue
        if number == 0:
            first = bytes(buffer[:_FIRST])
            header = bytearray(buffer[: header_bytes(first, file_size=file.size)])
    if bad or not file.size:
        return header, bad
    missing = header_bytes(bytes(header[:_FIRST]), file_size=file.size) - len(header)
    if missing:  # a header of more than a block
        header += bytes(missing)
        read_ranges(store, name, [index], [Range(file.name, 0, memoryview(header))], threads=1)
    return header, bad


def _stored(header: bytearray, file: FileEntry) -> Tensors:
    stored = parse_header(bytes(header), file_size=file.size)
    return Counter((one.start, one.nbytes, one.dtype_code, one.shape) for one in stored.values())


def _expected(index: Index, file: str) -> Tensors:
    expected: Tensors = Counter()
    for tensor in index.tensors:
        dtype = require(tensor.dtype, path=tensor.name)
        for piece in tensor.slices:
            if piece.file == file:
                expected[piece.start, piece.nbytes, dtype.code, dtype.stored_shape(piece.lengths)] += 1
    return expected
