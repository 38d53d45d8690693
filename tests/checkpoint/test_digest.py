"""Digests: fixed values, whole coverage, no copies."""

from __future__ import annotations

import hashlib
import mmap

import pytest
from hypothesis import given, settings, strategies as st

from spotsafe.checkpoint.digest import (
    BLOCK,
    DIGEST_CHARS,
    block_count,
    block_digest,
    block_digests,
    sha256_hex,
)


def test_the_algorithm_is_xxh3_of_128_bits() -> None:
    """Values published for the algorithm (seed 0); a library that changed them would orphan every checkpoint."""
    assert block_digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert block_digest(b"a") == "a96faf705af16834e6c632b61e964e1f"
    assert len(block_digest(b"abc")) == DIGEST_CHARS


@given(st.binary(max_size=200), st.integers(1, 64))
@settings(max_examples=100)
def test_there_is_one_digest_for_each_block_and_no_byte_is_left_out(data: bytes, block_size: int) -> None:
    """The last block may be shorter; an empty file has none."""
    digests = block_digests(data, block_size=block_size)
    assert len(digests) == block_count(len(data), block_size=block_size)
    pieces = [data[at : at + block_size] for at in range(0, len(data), block_size)]
    assert digests == tuple(map(block_digest, pieces))


@pytest.mark.parametrize(
    ("size", "count"), [(0, 0), (1, 1), (BLOCK, 1), (BLOCK + 1, 2), (5 * BLOCK, 5), (1 << 50, 1 << 26)]
)
def test_the_number_of_blocks_is_the_size_rounded_up(size: int, count: int) -> None:
    """At and around the edges."""
    assert block_count(size) == count


def test_every_flipped_bit_changes_its_block_and_no_other() -> None:
    """What verify relies on to name the place of damage."""
    data = bytes(range(48))
    before = block_digests(data, block_size=16)
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            after = block_digests(bytes(damaged), block_size=16)
            assert [a != b for a, b in zip(before, after, strict=True)] == [
                n == position // 16 for n in range(3)
            ]


def test_views_of_mapped_memory_are_taken_as_they_are() -> None:
    """The arena is a mapping, and its views have any item size."""
    with mmap.mmap(-1, 8192) as mapping:
        mapping[:4] = b"spot"
        with memoryview(mapping) as view, view[:4096].cast("Q") as words:
            assert block_digests(words, block_size=1000) == block_digests(bytes(view[:4096]), block_size=1000)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_must_be_positive(block_size: int) -> None:
    """A mistake of the caller."""
    with pytest.raises(ValueError, match="positive"):
        block_digests(b"x", block_size=block_size)


def test_sha256_is_the_standard_one() -> None:
    """Lowercase hexadecimal."""
    assert sha256_hex(b"abc") == hashlib.sha256(b"abc").hexdigest()
    assert sha256_hex(memoryview(b"abc")) == sha256_hex(b"abc")
