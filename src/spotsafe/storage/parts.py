"""Into which parts a large object is cut, for writing and for reading. Values only.

S3 takes at most 10,000 parts of 5 MiB to 5 GiB each; only the last may be smaller. Parts of 16 MiB keep eight
connections busy; larger objects get larger parts, with a tenth of the count to spare.
"""

from __future__ import annotations

from dataclasses import dataclass

MEBIBYTE = 1024 * 1024
PART = 16 * MEBIBYTE
"""Bytes of a part, as long as there are not too many."""
MIN_PART = 5 * MEBIBYTE
"""Bytes that every part but the last must have."""
MAX_PART = 5 * 1024 * MEBIBYTE
"""Bytes that no part may exceed."""
MAX_PARTS = 10_000
"""Parts that an object may have."""

_COMFORTABLE = 9_000


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an object."""

    number: int
    """Counted from 1."""
    start: int
    """Bytes before it."""
    length: int
    """Bytes."""


def part_size(size: int) -> int:
    """Bytes of every part but the last, for an object of `size` bytes; whole mebibytes.

    Raises:
        ValueError: a negative size, or more than 10,000 parts of 5 GiB can hold.
    """
    if not 0 <= size <= MAX_PARTS * MAX_PART:
        raise ValueError(
            f"an object of {size} bytes cannot be stored: from 0 to {MAX_PARTS} parts of {MAX_PART} bytes can"
        )
    wanted = -(-size // _COMFORTABLE)
    return min(max(PART, -(-wanted // MEBIBYTE) * MEBIBYTE), MAX_PART)


def cut(size: int, *, piece: int | None = None) -> tuple[Part, ...]:
    """The parts of an object of `size` bytes, in order and without a gap; none if it is empty.

    Args:
        size: bytes of the whole.
        piece: bytes of every part but the last; by default `part_size`.
    """
    length = part_size(size) if piece is None else piece
    return tuple(
        Part(number, start, min(length, size - start))
        for number, start in enumerate(range(0, size, length), start=1)
    )
