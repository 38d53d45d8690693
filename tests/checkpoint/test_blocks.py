"""One block: believed when its digest is right, and damage only after a second read over."""

from __future__ import annotations

import pytest

from spotsafe.checkpoint.blocks import Block, block_of, check_size, read_block
from spotsafe.checkpoint.digest import block_digests
from spotsafe.checkpoint.index_values import FileEntry
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.errors import DamagedCheckpoint, StorageNotFound
from spotsafe.testing.faults import TearingStore
from spotsafe.testing.memory import MemoryStore

NAME = CheckpointName(1, 2, 3, "0123abcd")
DATA = bytes(range(250))
ENTRY = FileEntry(name="data-00000-000.safetensors", size=250, digests=block_digests(DATA, block_size=100))


@pytest.fixture
def store() -> MemoryStore:
    """One data file of two and a half blocks."""
    store = MemoryStore()
    store.put(ENTRY.path(NAME), DATA)
    return store


def block(number: int) -> Block:
    return block_of(NAME, ENTRY, number, block_size=100)


@pytest.mark.parametrize(("number", "start", "size"), [(0, 0, 100), (1, 100, 100), (2, 200, 50)])
def test_where_a_block_lies(store: MemoryStore, number: int, start: int, size: int) -> None:
    """The last one is what is left."""
    one, buffer = block(number), bytearray(size)
    read_block(store, NAME, one, memoryview(buffer))

    assert (one.start, one.size) == (start, size)
    assert bytes(buffer) == DATA[start : start + size]


def test_a_second_read_is_believed(store: MemoryStore) -> None:
    """What was torn on the way once is no damage; twice, it is."""
    buffer = memoryview(bytearray(100))
    read_block(TearingStore(store, reads=1, matches=lambda _: True), NAME, block(0), buffer)
    with pytest.raises(DamagedCheckpoint, match="bytes 0 to 100 are not what was published"):
        read_block(TearingStore(store, reads=2, matches=lambda _: True), NAME, block(0), buffer)


def test_a_file_that_ends_too_soon(store: MemoryStore) -> None:
    """Damage, which says which bytes are missing."""
    store.objects[ENTRY.path(NAME)] = DATA[:-1]
    with pytest.raises(DamagedCheckpoint, match="bytes 200 to 250 cannot be read"):
        read_block(store, NAME, block(2), memoryview(bytearray(50)))


@pytest.mark.parametrize("data", [DATA[:-1], DATA + b"x", b""])
def test_another_size_is_another_file(store: MemoryStore, data: bytes) -> None:
    """Longer too, though all the right bytes are in it."""
    check_size(store, NAME, ENTRY)
    store.objects[ENTRY.path(NAME)] = data
    with pytest.raises(DamagedCheckpoint, match=f"has {len(data)} bytes, not 250"):
        check_size(store, NAME, ENTRY)


def test_a_missing_file_is_not_damage() -> None:
    """Who reads looks again: it may have been retired meanwhile."""
    with pytest.raises(StorageNotFound):
        check_size(MemoryStore(), NAME, ENTRY)
    with pytest.raises(StorageNotFound):
        read_block(MemoryStore(), NAME, block(0), memoryview(bytearray(100)))
