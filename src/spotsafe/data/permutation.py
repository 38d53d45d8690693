"""A keyed permutation of [0, n) in O(1) memory: any part of it can be computed without the rest.

What it is, exactly (this text and the golden vectors in the tests define it; it never changes within one
version of the order):

- `order_key(seed, epoch, stream)` is 32 bytes: BLAKE2b with `digest_size=32`, `person=b"spotsafe.order"`, of
  the three numbers packed as little-endian unsigned 64-bit integers in this order. `seed + epoch` is never
  formed, so seed 0 in epoch 1 and seed 1 in epoch 0 have nothing in common.
- `counter_random(key, i)` is SplitMix64 (Steele, Lea, Flood 2014) addressed by counter: the mix of
  `key + (i + 1) * 0x9E3779B97F4A7C15` modulo 2**64.
- For n <= 2**16: Fisher-Yates. For i from n - 1 down to 1, element i is swapped with element
  `((counter_random(k, i) >> 16) * (i + 1)) >> 48`, with k the first 8 bytes of the key, little-endian.
- For larger n, up to 2**48: 8 rounds of an alternating Feistel network over `b = (n - 1).bit_length()` bits.
  The high part has `b // 2` bits, the low part the rest. Even rounds xor the high part with
  `mix32(low + k[r])`, odd rounds the low part with `mix32(high + k[r])`, each cut to the width of its target;
  `k[r]` is the r-th little-endian 32-bit word of the key; `mix32` is a 32-bit finaliser (constants 0x7FEB352D
  and 0x846CA68B of C. Wellons' "lowbias32"). A result >= n is fed in again until it is below n (cycle
  walking, Black and Rogaway 2002), which keeps it a bijection.

Fisher-Yates for small n because few-bit Feistel networks are measurably biased; 8 rounds because 4 are, too.
All arithmetic has explicit unsigned widths: the result is the same on every platform and numpy version.
"""

from __future__ import annotations

import hashlib
import struct
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

MAX_LENGTH = 1 << 48
"""Largest n: both halves of the network then fit 32 bits with room to spare."""
TABLE_LENGTH = 1 << 16
"""Up to here a real table is shuffled; beyond, values are computed."""
BLOCK = 1 << 15
"""Values computed at once: long enough to hide numpy's cost per call, short enough for the cache."""

_ROUNDS = 8
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Int64s: TypeAlias = npt.NDArray[np.int64]
UInt64s: TypeAlias = npt.NDArray[np.uint64]
_UInt32s: TypeAlias = npt.NDArray[np.uint32]


def order_key(*, seed: int, epoch: int, stream: int = 0) -> bytes:
    """The key of one epoch's permutation, 32 bytes (see the module's text)."""
    return _keyed(seed, epoch, stream, person=b"spotsafe.order", size=32)


def sample_key(*, seed: int, epoch: int, stream: int = 0) -> int:
    """The 64-bit key from which the seeds of an epoch's samples are counted.

    Made like `order_key`, but with `person=b"spotsafe.sample"` and 8 bytes, read as a little-endian integer.
    """
    return int.from_bytes(_keyed(seed, epoch, stream, person=b"spotsafe.sample", size=8), "little")


def _keyed(seed: int, epoch: int, stream: int, *, person: bytes, size: int) -> bytes:
    for name, value in (("seed", seed), ("epoch", epoch), ("stream", stream)):
        if not 0 <= value <= _MASK64:
            raise ValueError(f"{name} must be in [0, 2**64), not {value}")
    return hashlib.blake2b(struct.pack("<QQQ", seed, epoch, stream), digest_size=size, person=person).digest()


def counter_random(key: int, *, start: int, stop: int) -> UInt64s:
    """64 random bits for each counter in [start, stop); all different under one key."""
    x = np.arange(start, stop, dtype=np.uint64)
    x += np.uint64(1)
    x *= np.uint64(_GOLDEN)
    x += np.uint64(key & _MASK64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


class Permutation:
    """A bijection of [0, n) onto itself, fixed by its key.

    Memory is at most 512 KB (the table of a small n, made when first used); nothing is made for a large n.
    Making one costs nothing, and any block costs the same wherever it lies.

    Args:
        n: how many values, 0 to 2**48.
        key: 32 bytes from `order_key`.
    """

    __slots__ = ("_key", "_n", "_table")

    def __init__(self, n: int, key: bytes) -> None:
        if not 0 <= n <= MAX_LENGTH:
            raise ValueError(f"a permutation has 0 to 2**48 values, not {n}")
        if len(key) != 32:
            raise ValueError(f"the key has 32 bytes, not {len(key)}")
        self._n = n
        self._key = key
        self._table: Int64s | None = None

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, position: int) -> int:
        """The value at one position. For many, `block` is a thousand times cheaper per value."""
        if not 0 <= position < self._n:
            raise IndexError(f"position {position} is outside [0, {self._n})")
        return int(self.block(position, position + 1)[0])

    def block(self, start: int, stop: int) -> Int64s:
        """The values at positions [start, stop), as a new array."""
        if not 0 <= start <= stop <= self._n:
            raise IndexError(f"[{start}, {stop}) is not inside [0, {self._n})")
        if self._n <= TABLE_LENGTH:
            return np.array(self._whole()[start:stop])
        values = np.empty(stop - start, dtype=np.int64)
        for first in range(start, stop, BLOCK):
            last = min(first + BLOCK, stop)
            values[first - start : last - start] = _feistel_block(first, last, n=self._n, key=self._key)
        return values

    def _whole(self) -> Int64s:
        if self._table is None:
            self._table = _fisher_yates(self._n, self._key)
        return self._table


def _fisher_yates(n: int, key: bytes) -> Int64s:
    random = counter_random(int.from_bytes(key[:8], "little"), start=0, stop=n)
    sizes = np.arange(1, n + 1, dtype=np.uint64)
    partners = (((random >> np.uint64(16)) * sizes) >> np.uint64(48)).tolist()
    values = list(range(n))
    for i in range(n - 1, 0, -1):
        j = partners[i]
        values[i], values[j] = values[j], values[i]
    return np.array(values, dtype=np.int64)


def _feistel_block(start: int, stop: int, *, n: int, key: bytes) -> UInt64s:
    values = np.arange(start, stop, dtype=np.uint64)
    bits = (n - 1).bit_length()
    _encrypt(values, bits=bits, key=key)
    limit = np.uint64(n)
    outside = np.flatnonzero(values >= limit)
    while outside.size:
        again = values[outside]
        _encrypt(again, bits=bits, key=key)
        values[outside] = again
        outside = outside[again >= limit]
    return values


def _encrypt(values: UInt64s, *, bits: int, key: bytes) -> None:
    """One pass of the Feistel network over [0, 2**bits), in place."""
    low_bits = bits - bits // 2
    low_mask = np.uint32((1 << low_bits) - 1)
    high_mask = np.uint32((1 << (bits // 2)) - 1)
    low = (values & np.uint64(low_mask)).astype(np.uint32)
    high = (values >> np.uint64(low_bits)).astype(np.uint32)
    mixed = np.empty_like(low)
    shifted = np.empty_like(low)
    keys = struct.unpack(f"<{_ROUNDS}I", key)
    for r in range(0, _ROUNDS, 2):
        _mix32(low, keys[r], mixed, shifted)
        mixed &= high_mask
        high ^= mixed
        _mix32(high, keys[r + 1], mixed, shifted)
        mixed &= low_mask
        low ^= mixed
    np.copyto(values, high)
    values <<= np.uint64(low_bits)
    values |= low


def _mix32(source: _UInt32s, key: int, out: _UInt32s, shifted: _UInt32s) -> None:
    """`out = mix32(source + key)`; `shifted` is scratch space, so that nothing is allocated."""
    np.add(source, np.uint32(key), out=out)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        np.right_shift(out, np.uint32(shift), out=shifted)
        out ^= shifted
        out *= np.uint32(factor)
    np.right_shift(out, np.uint32(16), out=shifted)
    out ^= shifted
