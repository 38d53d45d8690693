"""Searching staged bytes for NaN and infinity, by bit patterns, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from spotsafe.checkpoint.manifest import Health
from spotsafe.writer.job import HealthSpan

CHUNK = 1 << 20
"""Bytes looked at in one go: what the scan needs beside the arena is a few times this."""
NAMES = 100
"""Names that a manifest lists at most."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    """A value is not finite if, of its bits, those in `mask` are exactly `match`."""

    word: str
    mask: int
    match: int


def _exponent(word: str, mask: int) -> _Pattern:
    return _Pattern(word, mask, mask)


_PATTERNS = {
    "float64": _exponent("<u8", 0x7FF0_0000_0000_0000),
    "float32": _exponent("<u4", 0x7F80_0000),
    "float16": _exponent("<u2", 0x7C00),
    "bfloat16": _exponent("<u2", 0x7F80),
    "complex128": _exponent("<u8", 0x7FF0_0000_0000_0000),
    "complex64": _exponent("<u4", 0x7F80_0000),
    "complex32": _exponent("<u2", 0x7C00),
    "float8_e5m2": _exponent("u1", 0x7C),
    "float8_e4m3fn": _exponent("u1", 0x7F),  # no infinity; the largest pattern is NaN
    "float8_e8m0fnu": _exponent("u1", 0xFF),
    "float8_e4m3fnuz": _Pattern("u1", 0xFF, 0x80),  # no infinity; what would be -0 is NaN
    "float8_e5m2fnuz": _Pattern("u1", 0xFF, 0x80),
}
"""By torch's names. What is not here has no value that is not finite: integers, bool, float4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Names with at least one value that is not finite."""

    state: frozenset[str]
    """Trainable parameters and moments."""
    buffers: frozenset[str]

    def __or__(self, other: Scan) -> Scan:
        return Scan(state=self.state | other.state, buffers=self.buffers | other.buffers)

    def health(self, *, before: frozenset[str]) -> Health:
        """The verdict: unhealthy if a parameter or a moment is not finite that was finite `before`."""
        return Health(
            healthy=self.state <= before,
            nonfinite=tuple(sorted(self.state)[:NAMES]),
            nonfinite_buffers=tuple(sorted(self.buffers)[:NAMES]),
        )


def scan(spans: Iterable[HealthSpan], *, arena: memoryview) -> Scan:
    """Look at every span of the arena.

    Raises:
        ValueError: a span that is no whole number of values, or lies outside the arena.
    """
    state: set[str] = set()
    buffers: set[str] = set()
    for run in neighbours(spans):
        if len(run) > 1 and is_finite(_staged(run[0], run[-1], arena), dtype=run[0].dtype):
            continue
        for span in run:
            found = buffers if span.role == "buffer" else state
            if span.tensor not in found and not is_finite(_staged(span, span, arena), dtype=span.dtype):
                found.add(span.tensor)
    return Scan(state=frozenset(state), buffers=frozenset(buffers))


def neighbours(spans: Iterable[HealthSpan]) -> Iterator[list[HealthSpan]]:
    """Spans of one type that lie side by side: thousands of small ones are looked at in one go."""
    run: list[HealthSpan] = []
    end = size = 0
    for span in sorted(spans, key=attrgetter("arena_offset")):
        if run and (span.arena_offset != end or span.dtype != run[0].dtype or size + span.nbytes > CHUNK):
            yield run
            run, size = [], 0
        run.append(span)
        end, size = span.arena_offset + span.nbytes, size + span.nbytes
    if run:
        yield run


def _staged(first: HealthSpan, last: HealthSpan, arena: memoryview) -> memoryview:
    end = last.arena_offset + last.nbytes
    if first.arena_offset < 0 or end > len(arena):
        raise ValueError(f"{last.tensor}: {last.nbytes} bytes at {last.arena_offset} are outside the arena")
    return arena[first.arena_offset : end]


def is_finite(data: memoryview | bytes, *, dtype: str) -> bool:
    """Whether `data` holds neither NaN nor infinity.

    Args:
        data: values of the type, one after another.
        dtype: as torch names it, without ``torch.``.

    Raises:
        ValueError: not a whole number of values.
    """
    pattern = _PATTERNS.get(dtype)
    if pattern is None:
        return True
    words: npt.NDArray[Any] = np.frombuffer(data, dtype=pattern.word)
    mask, match = words.dtype.type(pattern.mask), words.dtype.type(pattern.match)
    step = CHUNK // words.itemsize
    scratch = np.empty(min(step, words.size), dtype=words.dtype)
    for start in range(0, words.size, step):
        chunk = words[start : start + step]
        masked = np.bitwise_and(chunk, mask, out=scratch[: chunk.size])
        # A mask leaves no value larger than itself, and looking for the largest is faster than comparing.
        bad = masked.max() == match if mask == match else (masked == match).any()
        if bad:
            return False
    return True
