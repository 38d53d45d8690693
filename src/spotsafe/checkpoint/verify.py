"""Verifying a checkpoint: every digest, every size, every header, with bounded memory.

A difference is believed after a second read, so that one bad answer of a network or a disk is no verdict.
What the store cannot answer is not damage: it propagates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from spotsafe.checkpoint.candidates import Candidate, read_candidate, read_index
from spotsafe.checkpoint.digest import block_digest
from spotsafe.checkpoint.dtypes import require
from spotsafe.checkpoint.image import header_bytes, parse_header
from spotsafe.checkpoint.index import FileEntry, Index
from spotsafe.checkpoint.layout import MANIFEST, CheckpointName
from spotsafe.checkpoint.manifest import Part
from spotsafe.errors import (
    DamagedCheckpoint,
    StorageNotFound,
    StorageShort,
    UnsupportedFormat,
    UnsupportedState,
)
from spotsafe.storage.store import Store

_FIRST = 8
"""Bytes of a safetensors file that say how long its header is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something in a checkpoint that is not as it was published."""

    file: str
    reason: str


Good = set[tuple[str, int, tuple[str, ...]]]
"""Path, block size and digests of files that were read and are as they should be."""


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
    known = set() if good is None else good
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
    path, shown = file.path(name), file.shown()
    try:
        size = store.size(path)
        if size != file.size:
            yield Fault(file=shown, reason=f"has {size} bytes, not {file.size}")
            return
        key, blocks = (path, index.block_size, file.digests), range(len(file.digests))
        if key in good:
            blocks = range(0)
        bad = [block for block in blocks if not _block_is_good(store, path, index, file, block)]
        if not bad:
            good.add(key)
        if bad:
            yield Fault(file=shown, reason=_where(bad, block_size=index.block_size, size=file.size))
        else:
            yield from _header_faults(store, path, index, file)
    except StorageNotFound:
        yield Fault(file=shown, reason="is missing")
    except StorageShort:
        yield Fault(file=shown, reason=f"ends before its {file.size} bytes")


def _block_is_good(store: Store, path: str, index: Index, file: FileEntry, block: int) -> bool:
    start = block * index.block_size
    buffer = memoryview(bytearray(min(index.block_size, file.size - start)))
    for _ in range(2):
        store.read_into(path, start, buffer)
        if block_digest(buffer) == file.digests[block]:
            return True
    return False


def _where(bad: list[int], *, block_size: int, size: int) -> str:
    first = bad[0] * block_size
    length = min(block_size, size - first)
    more = f", and {len(bad) - 1} more blocks" if len(bad) > 1 else ""
    return f"differs from its digest in the {length} bytes from {first}{more}"


def _header_faults(store: Store, path: str, index: Index, file: FileEntry) -> Iterator[Fault]:
    first = bytearray(min(_FIRST, file.size))
    store.read_into(path, 0, memoryview(first))
    try:
        header = bytearray(header_bytes(bytes(first), file_size=file.size))
        store.read_into(path, 0, memoryview(header))
        stored = parse_header(bytes(header), file_size=file.size)
        found = Counter((one.start, one.nbytes, one.dtype_code, one.shape) for one in stored.values())
        if found != _expected(index, file.name):
            yield Fault(file=file.shown(), reason="its header lists other tensors than the index")
    except DamagedCheckpoint as error:
        yield Fault(file=file.shown(), reason=error.reason)
    except UnsupportedState as error:
        yield Fault(file=file.shown(), reason=str(error))


def _expected(index: Index, file: str) -> Counter[tuple[int, int, str, tuple[int, ...]]]:
    expected: Counter[tuple[int, int, str, tuple[int, ...]]] = Counter()
    for tensor in index.tensors:
        dtype = require(tensor.dtype, path=tensor.name)
        for piece in tensor.slices:
            if piece.file == file:
                expected[piece.start, piece.nbytes, dtype.code, dtype.stored_shape(piece.lengths)] += 1
    return expected
