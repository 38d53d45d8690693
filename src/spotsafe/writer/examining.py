"""One look at a staged file that gives both its digests and what in it is not finite.

Memory is read once: what was just digested lies in the processor's cache when it is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from spotsafe.checkpoint.digest import BLOCK, new_block_digest
from spotsafe.writer.health import Scan, is_finite, neighbours, scan
from spotsafe.writer.job import HealthSpan, StagedFile

CHUNK = 512 << 10
"""Bytes looked at in one go: they and what is made of them fit into the cache of one core."""
_FLOATS = {"float32": "<f4", "complex64": "<f4", "float64": "<f8", "complex128": "<f8"}


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found in one file."""

    digests: tuple[str, ...]
    """Of its blocks, as in an index."""
    scan: Scan


@dataclass(frozen=True, slots=True)
class _Run:
    """Spans of one dtype that lie side by side; offsets in the file in bytes."""

    start: int
    end: int
    dtype: str
    spans: Sequence[HealthSpan]


def examine(file: StagedFile, *, arena: memoryview, spans: Iterable[HealthSpan]) -> Examined:
    """Digest a file and search it for NaN and infinity.

    Args:
        file: where it lies.
        arena: all staged bytes.
        spans: what is to be searched in the file.

    Raises:
        ValueError: a span that is no whole number of values, or lies outside the file.
    """
    data = arena[file.arena_offset : file.arena_offset + file.size]
    runs = list(_runs(file, spans))
    digests: list[str] = []
    suspects: set[int] = set()
    ahead = 0
    with np.errstate(all="ignore"):  # of the NaNs that are looked for
        for block in range(0, len(data), BLOCK):
            digest = new_block_digest()
            for start in range(block, min(block + BLOCK, len(data)), CHUNK):
                end = min(start + CHUNK, block + BLOCK, len(data))
                digest.update(data[start:end])
                while ahead < len(runs) and runs[ahead].end <= start:
                    ahead += 1
                suspects.update(_suspects(runs, ahead, data, start, end))
            digests.append(digest.hexdigest())
    found = scan([span for at in sorted(suspects) for span in runs[at].spans], arena=arena)
    return Examined(tuple(digests), found)


def spans_by_file(
    files: Sequence[StagedFile], spans: Iterable[HealthSpan]
) -> Iterator[tuple[StagedFile, list[HealthSpan]]]:
    """Each file with the spans that lie in it.

    Args:
        files: in the order of the arena.
        spans: in any order.

    Raises:
        ValueError: a span that begins in none of them.
    """
    ordered = sorted(spans, key=attrgetter("arena_offset"))
    at = 0
    for file in files:
        inside: list[HealthSpan] = []
        while at < len(ordered) and ordered[at].arena_offset < file.arena_offset + file.size:
            inside.append(ordered[at])
            at += 1
        yield file, inside
    if at < len(ordered):
        raise ValueError(f"{ordered[at].tensor} lies in no file of the save")


def _runs(file: StagedFile, spans: Iterable[HealthSpan]) -> Iterator[_Run]:
    for inside in neighbours(spans):
        first, last = inside[0], inside[-1]
        start, end = (
            first.arena_offset - file.arena_offset,
            last.arena_offset + last.nbytes - file.arena_offset,
        )
        if start < 0 or end > file.size:
            raise ValueError(
                f"{last.tensor}: {last.nbytes} bytes at {last.arena_offset} are outside {file.name}"
            )
        yield _Run(start, end, first.dtype, inside)


def _suspects(runs: Sequence[_Run], first: int, data: memoryview, start: int, end: int) -> Iterator[int]:
    """Of the runs from `first` on, those with a value in this part of the file that may not be finite."""
    for at in range(first, len(runs)):
        run = runs[at]
        if run.start >= end:
            return
        if not _surely_finite(data[max(run.start, start) : min(run.end, end)], run.dtype):
            yield at


def _surely_finite(piece: memoryview, dtype: str) -> bool:
    """False for what is not finite, and for what cannot be told here: whoever is told looks again, exactly."""
    word = _FLOATS.get(dtype)
    try:
        if word is None:
            return is_finite(piece, dtype=dtype)
        # The extremes of values with a NaN are NaN, and are found in half of the time of a look at the bits.
        values = np.frombuffer(piece, dtype=word)
        return math.isfinite(np.maximum.reduce(values)) and math.isfinite(np.minimum.reduce(values))
    except ValueError:  # a value across the edge of two chunks
        return False
