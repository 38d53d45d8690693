"""Parts of files: only the blocks that are needed, all of them verified."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from spotsafe.checkpoint import ranges
from spotsafe.checkpoint.digest import block_digests
from spotsafe.checkpoint.index import FileEntry, Index
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.ranges import Range, check_sizes, read_ranges
from spotsafe.errors import DamagedCheckpoint, StorageNotFound
from spotsafe.storage.local import LocalStore
from spotsafe.testing.faults import TearingStore
from spotsafe.testing.memory import MemoryStore

NAME = CheckpointName(1, 1, 1, "0a1b2c3d")
FILE = "data-00000-000.safetensors"
DATA = bytes(range(100))


@dataclass
class CountingStore(MemoryStore):
    """Remembers which bytes were asked for."""

    asked: list[tuple[int, int]] = field(default_factory=list)

    def __init__(self) -> None:
        super().__init__()
        self.asked = []

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.asked.append((offset, len(buffer)))
        super().read_into(path, offset, buffer)


@pytest.fixture
def store() -> CountingStore:
    store = CountingStore()
    store.put(NAME.file(FILE), DATA)
    return store


def index(data: bytes = DATA) -> Index:
    entry = FileEntry(name=FILE, size=len(data), digests=block_digests(data, block_size=30))
    return Index(rank=0, block_size=30, files=(entry,), tensors=())


def read(store: MemoryStore, *spans: tuple[int, int]) -> list[bytes]:
    found = [Range(FILE, start, memoryview(bytearray(end - start))) for start, end in spans]
    read_ranges(store, NAME, [index()], found, threads=1)
    return [bytes(one.memory) for one in found]


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 100)],
        [(0, 30)],
        [(29, 31)],
        [(95, 100)],
        [(5, 65), (65, 100), (0, 5)],
        [(10, 40), (20, 50), (10, 40)],
        [(7, 7)],
        [],
    ],
)
def test_every_range_is_filled(store, spans):
    """Inside one block, over several, next to each other, overlapping, empty: each gets its own bytes."""
    assert read(store, *spans) == [DATA[start:end] for start, end in spans]


def test_only_the_blocks_that_are_needed_are_read(store):
    """Two ranges of one block cost one read, and blocks without a range none."""
    read(store, (31, 33), (40, 59), (90, 91))

    assert sorted(store.asked) == [(30, 30), (90, 10)]


@pytest.fixture
def near(store, monkeypatch):
    """A store whose reads cost only their bytes; however small, they are worth a call."""
    monkeypatch.setattr(ranges, "_STRAIGHT", 1)
    store.in_place = True
    return store


def test_a_near_store_is_read_straight_into_every_place(near):
    """Nothing is copied; what lies between two ranges is read too, for the digest is the block's."""
    spans = [(31, 33), (40, 59), (33, 35), (90, 91)]

    assert read(near, *spans) == [DATA[start:end] for start, end in spans]
    assert sorted(near.asked) == [
        (30, 1), (31, 2), (33, 2), (35, 5), (40, 19), (59, 1),
        (90, 1), (91, 9),
    ]  # fmt: skip


@pytest.mark.parametrize("spans", [[(10, 40), (20, 50)], [(30, 60), (30, 60)], [(0, 100), (5, 6)]])
def test_ranges_that_overlap_are_filled_from_a_near_store_too(near, spans):
    """Bytes that two ask for are read once and copied."""
    assert read(near, *spans) == [DATA[start:end] for start, end in spans]


def test_many_small_places_are_filled_from_one_read(near, monkeypatch):
    """Where a call would cost more than the copy."""
    monkeypatch.setattr(ranges, "_STRAIGHT", 10)
    read(near, (30, 35), (35, 40), (40, 60))
    read(near, (60, 62), (62, 64), (64, 70), (70, 90))

    assert sorted(near.asked) == [(30, 5), (35, 5), (40, 20), (60, 30)]


@pytest.mark.parametrize("at", [30, 44, 45, 59])
def test_a_flipped_bit_is_found_in_every_place_of_a_near_store(near, at):
    """In what was asked for, before it, between and behind."""
    near.replace(NAME.file(FILE), DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :])
    with pytest.raises(DamagedCheckpoint, match="bytes 30 to 60 are not what was published"):
        read(near, (44, 46), (50, 55))


def test_one_bad_answer_of_a_near_store_is_no_damage(near):
    """The whole block is read again, and digested from its beginning."""
    torn = TearingStore(near, matches=lambda _: True)
    assert torn.in_place
    assert read(torn, (31, 33), (40, 60)) == [DATA[31:33], DATA[40:60]]
    assert near.asked == [(30, 1), (31, 2), (33, 7), (40, 20)] * 2


def test_new_memory_is_touched_and_holds_what_was_read(tmp_path):
    """Of a local store, in parts that begin and end anywhere in a page."""
    data = random.Random(7).randbytes(1 << 20)
    store, size = LocalStore(tmp_path), len(data)
    store.put(NAME.file(FILE), data)
    entry = FileEntry(name=FILE, size=size, digests=block_digests(data, block_size=1 << 19))
    spans = [(0, 70_001), (70_001, 600_000), (600_100, size)]
    found = [Range(FILE, start, memoryview(np.empty(end - start, np.uint8))) for start, end in spans]
    read_ranges(store, NAME, [Index(rank=0, block_size=1 << 19, files=(entry,), tensors=())], found)

    assert [bytes(one.memory) for one in found] == [data[start:end] for start, end in spans]


@pytest.mark.parametrize("at", [30, 45, 59])
def test_a_flipped_bit_in_a_needed_block_is_found(store, at):
    """Also where it lies beside the bytes that were asked for: the digest is the block's."""
    store.replace(NAME.file(FILE), DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :])

    assert read(store, (0, 30)) == [DATA[:30]]
    with pytest.raises(DamagedCheckpoint, match="bytes 30 to 60 are not what was published") as caught:
        read(store, (44, 46))
    assert caught.value.file == FILE


def test_one_bad_answer_is_no_damage(store):
    """A difference is believed after a second read."""
    answers = [bytes(30), DATA[:30]]

    def lie(path: str, offset: int, buffer: memoryview) -> None:
        buffer[:] = answers.pop(0)

    store.read_into = lie  # type: ignore[method-assign]

    assert read(store, (0, 30)) == [DATA[:30]]


def test_a_short_file_is_damage_and_a_missing_one_is_not(store):
    """A file that is gone may mean that the checkpoint is; the caller finds out."""
    store.replace(NAME.file(FILE), DATA[:50])
    with pytest.raises(DamagedCheckpoint, match="too short"):
        read(store, (55, 60))

    store.delete(NAME.file(FILE))
    with pytest.raises(StorageNotFound):
        read(store, (55, 60))


def test_sizes_are_compared_before_anybody_makes_room(store):
    """An index that speaks of a terabyte is refused by the size of the file alone."""
    check_sizes(store, NAME, [index()], {FILE})
    huge = FileEntry(name=FILE, size=1 << 40, digests=("0" * 32,))

    with pytest.raises(DamagedCheckpoint, match="has 100 bytes, not 1099511627776"):
        check_sizes(store, NAME, [Index(rank=0, block_size=1 << 41, files=(huge,), tensors=())], {FILE})
