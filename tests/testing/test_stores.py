"""The conformance suite finds stores that are wrong."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from spotsafe.storage.local import LocalStore
from spotsafe.storage.store import Entry
from spotsafe.testing.stores import StoreConformance, aligned_memory, pattern_bytes


class Overwriting(LocalStore):
    def put(self, path: str, data: bytes) -> None:
        self.replace(path, data)


class Racy(LocalStore):
    """Looks and then writes, with every writer past the look before the first one writes."""

    def __init__(self, root: object) -> None:
        super().__init__(str(root))
        self._barrier = threading.Barrier(8)

    def create(self, path: str, data: bytes) -> bool:
        there = path in [entry.path for entry in self.list("")]
        self._barrier.wait(10)
        if not there:
            self.replace(path, data)
        return not there


class Growing(LocalStore):
    """Shows an object while it is being written."""

    def put_large(self, path: str, data: memoryview) -> None:
        full = os.path.join(self.url, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "xb") as file:
            for start in range(0, len(data), 4096):
                file.write(data[start : start + 4096])
                file.flush()


class Short(LocalStore):
    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        data = self.read(path, max_bytes=1 << 40)[offset : offset + len(buffer)]
        buffer[: len(data)] = data


class Unsorted(LocalStore):
    def list(self, folder: str) -> list[Entry]:
        return super().list(folder)[::-1]


class Forgiving(LocalStore):
    """Takes a failure to look for an empty folder, and any error for "not found"."""

    def read(self, path: str, *, max_bytes: int) -> bytes:
        return super().read(path, max_bytes=1 << 40)[:max_bytes]


class Leaking(LocalStore):
    """Shows its temporary files."""

    def names(self, folder: str) -> list[str]:
        return sorted([*super().names(folder), ".tmp-1"])


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        (Overwriting, lambda suite, store: suite.test_put_never_overwrites(store)),
        (Racy, lambda suite, store: suite.test_create_races_have_one_winner(store)),
        (Growing, lambda suite, store: suite.test_nothing_appears_before_it_is_whole(store)),
        (Short, lambda suite, store: suite.test_read_into_past_the_end(store, 4, 2)),
        (Unsorted, lambda suite, store: suite.test_list_and_names(store)),
        (Forgiving, lambda suite, store: suite.test_read_is_bounded(store)),
        (Leaking, lambda suite, store: suite.test_nothing_appears_before_it_is_whole(store)),
    ],
)
def test_a_wrong_store_fails(
    tmp_path: Path, kind: type[LocalStore], run: Callable[[StoreConformance, LocalStore], None]
) -> None:
    """Each fault is found by the test that is there for it, and a right store passes that test."""
    run(StoreConformance(), LocalStore(tmp_path / "right"))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        run(StoreConformance(), kind(tmp_path / "wrong"))


def test_the_fixture_must_be_overridden() -> None:
    """The class alone says what to do."""
    with pytest.raises(NotImplementedError, match="override the fixture"):
        StoreConformance.store.__wrapped__(StoreConformance())


def test_pattern_bytes_repeat_exactly_and_differ_by_place() -> None:
    """The same size and seed give the same bytes on every machine."""
    assert pattern_bytes(100) == pattern_bytes(100)
    assert pattern_bytes(100) != pattern_bytes(100, seed=1)
    assert len({pattern_bytes(4096)[start : start + 16] for start in range(4080)}) == 4080


@pytest.mark.parametrize("shift", [0, 1, 64])
def test_aligned_memory(shift: int) -> None:
    """It holds the data, is writable, and begins where it was asked to."""
    memory = aligned_memory(b"12345", shift=shift)
    assert bytes(memory) == b"12345"
    memory[0] = 0
    assert len(aligned_memory(b"", shift=shift)) == 0
