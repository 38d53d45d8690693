"""Digests: xxh3_128 of the blocks of data files, SHA-256 of the small files.

xxh3 finds every accident at memory speed; it is no defence against an attacker. SHA-256 costs too much for
the data of a large model, and nothing for an index.
"""

from __future__ import annotations

import hashlib

import xxhash

ALGORITHM = "xxh3_128"
"""Name of the block digest, as it stands in an index."""
BLOCK = 16 << 20
"""Bytes of a block, unless an index says otherwise."""
DIGEST_CHARS = 32
"""Length of a block digest in hexadecimal."""


def block_count(size: int, *, block_size: int = BLOCK) -> int:
    """How many blocks a file of `size` bytes has; the last may be shorter. An empty file has none."""
    return -(-size // block_size)


def new_block_digest() -> xxhash.xxh3_128:
    """A digest of one block that is fed piece by piece; `hexdigest` then gives what `block_digest` gives."""
    return xxhash.xxh3_128()


def block_digest(data: memoryview | bytes) -> str:
    """Digest of one block: 32 lowercase hexadecimal characters, most significant byte first."""
    return xxhash.xxh3_128_hexdigest(data)


def block_digests(data: memoryview | bytes, *, block_size: int = BLOCK) -> tuple[str, ...]:
    """Digests of the consecutive blocks of a whole file.

    Args:
        data: the file's bytes, contiguous; nothing is copied.
        block_size: bytes of each block but the last.

    Raises:
        ValueError: `block_size` is not positive.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be positive, not {block_size}")
    view = memoryview(data).cast("B")
    return tuple(block_digest(view[at : at + block_size]) for at in range(0, len(view), block_size))


def sha256_hex(data: memoryview | bytes) -> str:
    """SHA-256 of `data`: 64 lowercase hexadecimal characters."""
    return hashlib.sha256(data).hexdigest()
