"""Every size that S3 can hold is cut into parts that S3 takes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from spotsafe.storage.parts import MAX_PART, MAX_PARTS, MEBIBYTE, MIN_PART, PART, cut, part_size

GIB = 1024 * MEBIBYTE
LARGEST = MAX_PART * MAX_PARTS

SIZES = [
    0,
    1,
    MIN_PART - 1,
    MIN_PART,
    MIN_PART + 1,
    PART - 1,
    PART,
    PART + 1,
    MAX_PART - 1,
    MAX_PART,
    MAX_PART + 1,
    50 * 10**9,
    9000 * PART,
    9000 * PART + 1,
    5 * 10**12,
    LARGEST - 1,
    LARGEST,
]


def check(size: int) -> None:
    parts = cut(size)
    assert len(parts) <= MAX_PARTS
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert sum(part.length for part in parts) == size
    end = 0
    for part in parts:
        assert part.start == end
        assert 0 < part.length <= MAX_PART
        end += part.length
    assert all(part.length >= MIN_PART for part in parts[:-1])
    assert len({part.length for part in parts[:-1]}) <= 1


@pytest.mark.parametrize("size", SIZES)
def test_the_limits(size: int) -> None:
    """Around every limit the parts are legal, in order, and hold every byte once."""
    check(size)


@given(st.integers(0, LARGEST))
def test_any_size(size: int) -> None:
    """What holds at the limits holds between them."""
    check(size)


@pytest.mark.parametrize(
    ("size", "expected", "count"),
    [
        (0, PART, 0),
        (PART, PART, 1),
        (2 * GIB, PART, 128),
        (50 * 10**9, PART, 2981),
        (5 * 10**12, 530 * MEBIBYTE, 8997),
        (LARGEST, MAX_PART, MAX_PARTS),
    ],
)
def test_how_large_parts_are(size: int, expected: int, count: int) -> None:
    """Small parts as long as there are at most 9,000 of them, then larger ones."""
    assert part_size(size) == expected
    assert len(cut(size)) == count


@pytest.mark.parametrize("size", [-1, LARGEST + 1])
def test_sizes_that_no_object_can_have(size: int) -> None:
    """The message names the limits."""
    with pytest.raises(ValueError, match="10000 parts"):
        cut(size)


def test_pieces_of_a_chosen_size() -> None:
    """A reader chooses the size itself."""
    assert [(part.start, part.length) for part in cut(10, piece=4)] == [(0, 4), (4, 4), (8, 2)]
