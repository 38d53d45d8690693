"""The permutation is a bijection, and exactly the one that its module's text describes."""

from __future__ import annotations

import hashlib
import random
import struct

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from spotsafe.data.permutation import (
    BLOCK,
    MAX_LENGTH,
    TABLE_LENGTH,
    Permutation,
    counter_random,
    order_key,
    sample_key,
)

KEY = order_key(seed=7, epoch=3)


# -- an independent implementation of the text, one value at a time, without numpy -----------------------------


def reference_key(seed: int, epoch: int, stream: int, *, person: bytes, size: int) -> bytes:
    packed = b"".join(value.to_bytes(8, "little") for value in (seed, epoch, stream))
    return hashlib.blake2b(packed, digest_size=size, person=person).digest()


def reference_counter(key: int, counter: int) -> int:
    x = (key + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def reference_mix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) % 2**32
    x = ((x ^ (x >> 15)) * 0x846CA68B) % 2**32
    return x ^ (x >> 16)


def reference_value(n: int, key: bytes, position: int) -> int:
    """One value of a large permutation."""
    bits = (n - 1).bit_length()
    low_bits = bits - bits // 2
    rounds = struct.unpack("<8I", key)
    value = position
    while True:
        high, low = value >> low_bits, value % (1 << low_bits)
        for r, k in enumerate(rounds):
            if r % 2 == 0:
                high ^= reference_mix32((low + k) % 2**32) % (1 << (bits // 2))
            else:
                low ^= reference_mix32((high + k) % 2**32) % (1 << low_bits)
        value = (high << low_bits) + low
        if value < n:
            return value


def reference_table(n: int, key: bytes) -> list[int]:
    """All values of a small permutation."""
    k = int.from_bytes(key[:8], "little")
    values = list(range(n))
    for i in range(n - 1, 0, -1):
        j = ((reference_counter(k, i) >> 16) * (i + 1)) >> 48
        values[i], values[j] = values[j], values[i]
    return values


def test_keys_are_those_of_the_text() -> None:
    """Both keys are the described hashes."""
    for numbers in ((0, 0, 0), (1, 2, 3), (2**64 - 1, 10**6, 5)):
        seed, epoch, stream = numbers
        order = reference_key(seed, epoch, stream, person=b"spotsafe.order", size=32)
        sample = reference_key(seed, epoch, stream, person=b"spotsafe.sample", size=8)
        assert order_key(seed=seed, epoch=epoch, stream=stream) == order
        assert sample_key(seed=seed, epoch=epoch, stream=stream) == int.from_bytes(sample, "little")


def test_counter_random_is_that_of_the_text() -> None:
    """Also across a wrap of the 64-bit arithmetic, and from any start."""
    for key in (0, 1, 2**64 - 1, sample_key(seed=0, epoch=0)):
        assert counter_random(key, start=5, stop=9).tolist() == [
            reference_counter(key, c) for c in range(5, 9)
        ]


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1000, TABLE_LENGTH - 1, TABLE_LENGTH])
def test_small_permutations_are_those_of_the_text(n: int) -> None:
    """Fisher-Yates as described, up to the largest table."""
    assert Permutation(n, KEY).block(0, n).tolist() == reference_table(n, KEY)


@pytest.mark.parametrize(
    "n",
    [
        TABLE_LENGTH + 1,
        100_003,
        2**17,
        2**20 + 1,
        10**9,
        2**31,
        2**32 - 1,
        2**32 + 1,
        10**12,
        2**47 + 1,
        MAX_LENGTH,
    ],
)
def test_large_permutations_are_those_of_the_text(n: int) -> None:
    """The network as described, at the start, the end and random positions."""
    p = Permutation(n, KEY)
    draw = random.Random(n)
    for position in [0, 1, n - 1, *(draw.randrange(n) for _ in range(50))]:
        assert p[position] == reference_value(n, KEY, position)


# Frozen after the statistical tests had passed; computed by the implementation above, not by the one under test.
# They never change: a run that any version saved goes on with the same samples.
GOLDEN_KEY = "7930c326db39c2a956d538b827d364c16e7029b135feb3011648dc98cd8f92b7"  # seed 7, epoch 3, stream 0
GOLDEN = {
    1: [0],
    2: [1, 0],
    10: [2, 0, 7, 3, 5, 9, 6, 4],
    1000: [109, 191, 431, 739, 454, 698, 644, 4],
    65536: [16764, 26799, 17038, 8373, 14951, 6784, 34517, 21969],
    65537: [21280, 52854, 63606, 31148, 24362, 43833, 36510, 55337],
    10**6: [16778, 915329, 549438, 807700, 425630, 393850, 619451, 345963],
    10**9: [292227131, 511971384, 565552524, 825423136, 371484658, 522064120, 396669806, 385128731],
    2**32 + 1: [2325754862, 119776749, 3907975673, 2780228615, 1063965738, 2350660280, 3539497045, 583042576],
    10**12: [526223778630, 889462053400, 508444155380, 832667802020, 896656906603, 669697179430],
    2**48: [225071329560782, 209819672429674, 92705970986449, 2954730128655, 23302130732748, 185723858599306],
}
GOLDEN_SEEDS = [18383388060478100568, 14075738504015052834, 1130699942902109309, 1063037335542769624]


def test_golden_vectors() -> None:
    """The order of a given key is the same for ever, on every platform."""
    assert KEY.hex() == GOLDEN_KEY
    for n, first in GOLDEN.items():
        assert Permutation(n, KEY).block(0, len(first)).tolist() == first
    assert counter_random(sample_key(seed=7, epoch=3), start=0, stop=4).tolist() == GOLDEN_SEEDS


# -- bijection -------------------------------------------------------------------------------------------------


def test_every_small_size_is_a_bijection() -> None:
    """For all n up to 600, under two keys, each value comes exactly once."""
    for n in range(1, 601):
        for epoch in range(2):
            values = Permutation(n, order_key(seed=n, epoch=epoch)).block(0, n)
            assert (np.sort(values) == np.arange(n)).all()


@pytest.mark.parametrize("power", range(1, 19))
def test_sizes_around_powers_of_two_are_bijections(power: int) -> None:
    """Sizes 2^k - 1, 2^k and 2^k + 1, where a wrong number of bits loses values."""
    for n in (2**power - 1, 2**power, 2**power + 1):
        seen = np.zeros(n, dtype=bool)
        seen[Permutation(n, KEY).block(0, n)] = True
        assert seen.all()


@pytest.mark.parametrize("n", [10**9, 2**30 + 1, 2**32, 10**12, 2**40 - 1, MAX_LENGTH])
def test_huge_sizes_repeat_no_value_and_stay_in_range(n: int) -> None:
    """Blocks from the start, the middle and the end share no value and none is outside [0, n)."""
    p = Permutation(n, KEY)
    starts = (0, n // 3 // BLOCK * BLOCK + 17, n - BLOCK)
    values = np.concatenate([p.block(start, start + BLOCK) for start in starts])
    assert len(np.unique(values)) == len(values)
    assert values.min() >= 0
    assert values.max() < n


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3 * BLOCK * 2), data=st.data())
def test_a_block_is_the_same_however_it_is_asked_for(n: int, data: st.DataObject) -> None:
    """Any cut of the range gives the same values, as do single positions."""
    p = Permutation(n, order_key(seed=n, epoch=1))
    start = data.draw(st.integers(0, n - 1))
    stop = data.draw(st.integers(start, min(n, start + 2 * BLOCK)))
    middle = data.draw(st.integers(start, stop))
    whole = p.block(start, stop)
    assert whole.dtype == np.int64
    assert (whole == np.concatenate([p.block(start, middle), p.block(middle, stop)])).all()
    assert p[start] == Permutation(n, order_key(seed=n, epoch=1))[start]


def test_a_returned_block_can_be_changed_without_harm() -> None:
    """What a caller does to a block does not change the permutation."""
    p = Permutation(100, KEY)
    first = p.block(0, 100)
    expected = first.tolist()
    first[:] = 0
    assert p.block(0, 100).tolist() == expected


def test_memory_does_not_grow_with_the_size() -> None:
    """A permutation of 10^12 keeps nothing."""
    p = Permutation(10**12, KEY)
    p.block(0, 10)
    assert p._table is None


# -- what is refused -------------------------------------------------------------------------------------------


def test_bad_arguments_are_refused() -> None:
    """Sizes, keys and numbers outside their range."""
    for n in (-1, MAX_LENGTH + 1):
        with pytest.raises(ValueError, match="0 to 2"):
            Permutation(n, KEY)
    with pytest.raises(ValueError, match="32 bytes"):
        Permutation(10, b"short")
    for number in (-1, 2**64):
        with pytest.raises(ValueError, match="seed must be"):
            order_key(seed=number, epoch=0)
        with pytest.raises(ValueError, match="epoch must be"):
            order_key(seed=0, epoch=number)


def test_positions_outside_are_refused() -> None:
    """Like a sequence, but without negative positions, which would hide mistakes."""
    p = Permutation(10, KEY)
    for position in (-1, 10):
        with pytest.raises(IndexError, match="outside"):
            p[position]
    for start, stop in ((-1, 2), (5, 11), (6, 5)):
        with pytest.raises(IndexError, match="not inside"):
            p.block(start, stop)
    assert Permutation(0, KEY).block(0, 0).tolist() == []
    assert len(p) == 10
