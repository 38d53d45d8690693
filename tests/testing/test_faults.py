"""Stores that go wrong do so exactly where they were told to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spotsafe.errors import StorageFull, StorageNotFound, StorageUnavailable
from spotsafe.storage.local import LocalStore
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation
from spotsafe.testing.faults import (
    CountingStore,
    CrashingStore,
    FailingStore,
    LostResponseStore,
    TearingStore,
    flip_bit,
)


class Crash(BaseException):
    """What stands for the end of the process in a test."""


def crash() -> None:
    raise Crash


@pytest.fixture
def disk(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


STEPS: list[Callable[[Store], object]] = [
    lambda store: store.names(""),
    lambda store: store.put_large("a", memoryview(b"1" * 5000)),
    lambda store: store.create("b", b"2"),
    lambda store: store.read("b", max_bytes=1),
    lambda store: store.delete("a"),
]


def run(store: Store) -> int:
    """Do the steps until one crashes; how many were done."""
    for number, step in enumerate(STEPS):
        try:
            step(store)
        except Crash:
            return number
    return len(STEPS)


def test_counting(disk: LocalStore) -> None:
    """Operations are kept in order, failed ones too, and counted by name."""
    store = CountingStore(disk)
    run(store)
    with pytest.raises(StorageNotFound):
        store.size("none")
    assert [operation.name for operation in store.operations] == [
        "names",
        "put_large",
        "create",
        "read",
        "delete",
        "size",
    ]
    assert store.operations[1] == Operation("put_large", "a")
    assert store.count("size") == 1
    assert store.count("list") == 0


@pytest.mark.parametrize("at", range(1, 6))
def test_crash_before(disk: LocalStore, at: int) -> None:
    """All operations before number `at` happened, this one and later ones did not."""
    store = CrashingStore(disk, at=at, when="before", crash=crash)
    assert run(store) == at - 1
    assert store.count == at
    expected = [[], [], ["a"], ["a", "b"], ["a", "b"]][at - 1]
    assert disk.names("") == expected


@pytest.mark.parametrize("at", range(1, 6))
def test_crash_after(disk: LocalStore, at: int) -> None:
    """The operation number `at` happened, and nothing later did."""
    store = CrashingStore(disk, at=at, when="after", crash=crash)
    assert run(store) == at - 1
    assert disk.names("") == [[], ["a"], ["a", "b"], ["a", "b"], ["b"]][at - 1]


def test_crash_after_an_operation_that_failed(disk: LocalStore) -> None:
    """A look for what is not there is an operation too, and the process can end right after it."""
    store = CrashingStore(disk, at=1, when="after", crash=crash)
    with pytest.raises(Crash):
        store.read("nothing", max_bytes=1)


def test_a_crash_that_is_never_reached(disk: LocalStore) -> None:
    """Fewer operations than `at`: nothing happens, and the count says how many there were."""
    store = CrashingStore(disk, at=6, crash=crash)
    assert run(store) == 5
    assert store.count == 5


def test_one_crash_over_all_threads(disk: LocalStore) -> None:
    """The count runs over all threads, so exactly one of them crashes."""
    crashes = []
    store = CrashingStore(disk, at=50, crash=lambda: crashes.append(1))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: store.put(str(number), b"x"), range(100)))
    assert len(crashes) == 1
    assert store.count == 100


def test_the_default_crash_ends_the_process(tmp_path: Path) -> None:
    """No `finally`, no exit handler: exit code 9 at once."""
    code = (
        "import sys; from spotsafe.storage.local import LocalStore;"
        "from spotsafe.testing.faults import CrashingStore;"
        "store = CrashingStore(LocalStore(sys.argv[1]), at=2, when='after')\n"
        "try:\n    store.put('a', b'x'); store.put('b', b'x'); store.put('c', b'x')\n"
        "finally:\n    print('cleaned up')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 9
    assert done.stdout == ""
    assert LocalStore(tmp_path).names("") == ["a", "b"]


@pytest.mark.parametrize(("at", "when"), [(0, "before"), (-1, "after"), (1, "during")])
def test_bad_crashes(disk: LocalStore, at: int, when: str) -> None:
    """A crash that could never come is refused."""
    with pytest.raises(ValueError, match=r"counted from 1|must be"):
        CrashingStore(disk, at=at, when=when)  # type: ignore[arg-type]  # what is tested


def test_failing(disk: LocalStore) -> None:
    """The function sees name, path and number, and its error is raised instead of the operation."""
    seen = []

    def fail(name: str, path: str, number: int) -> Exception | None:
        seen.append((name, path, number))
        return StorageFull("full", path=path) if number == 2 else None

    store = FailingStore(disk, fail=fail)
    store.put("a", b"x")
    with pytest.raises(StorageFull):
        store.put("b", b"x")
    store.put("c", b"x")
    assert seen == [("put", "a", 1), ("put", "b", 2), ("put", "c", 3)]
    assert disk.names("") == ["a", "c"]


def test_lost_responses(disk: LocalStore) -> None:
    """The write happened, nobody was told, and the budget is kept."""
    store = LostResponseStore(disk, times=2)
    for path in ("a", "b"):
        with pytest.raises(StorageUnavailable, match=f"put {path} was lost"):
            store.put(path, b"x")
    store.put("c", b"x")
    assert disk.names("") == ["a", "b", "c"]


def test_lost_responses_of_chosen_operations(disk: LocalStore) -> None:
    """By default only writes lose their answers; a failed operation keeps its own error."""
    store = LostResponseStore(disk, times=9)
    assert store.names("") == []
    store = LostResponseStore(disk, times=1, operations={"size"})
    store.put("a", b"x")
    with pytest.raises(StorageNotFound):
        store.size("none")
    with pytest.raises(StorageUnavailable):
        store.size("a")
    assert store.size("a") == 1


def test_tearing(disk: LocalStore) -> None:
    """So many reads are wrong in one bit, then all are right; the object stays as it was."""
    disk.put("a", b"12345")
    store = TearingStore(disk, reads=2)
    assert store.read("a", max_bytes=5) == b"12\x3245"
    buffer = bytearray(5)
    store.read_into("a", 0, memoryview(buffer))
    assert bytes(buffer) == b"12\x3245"
    assert store.read("a", max_bytes=5) == b"12345"
    assert disk.read("a", max_bytes=5) == b"12345"


def test_tearing_of_chosen_paths(disk: LocalStore) -> None:
    """Only what matches is hit, and in the way that was given."""
    disk.put("a", b"1")
    disk.put("b", b"1")

    def zero(data: memoryview) -> None:
        data[:] = bytes(len(data))

    store = TearingStore(disk, reads=9, matches=lambda path: path == "b", damage=zero)
    assert store.read("a", max_bytes=1) == b"1"
    assert store.read("b", max_bytes=1) == b"\0"


def test_flip_bit_of_nothing() -> None:
    """Empty bytes cannot be damaged, which is no error."""
    flip_bit(memoryview(bytearray()))


def test_faults_around_faults(disk: LocalStore) -> None:
    """Wrappers compose: the counter inside sees what the crash outside let through."""
    counting = CountingStore(disk)
    store = CrashingStore(FailingStore(counting, fail=lambda *_: None), at=2, crash=crash)
    assert run(store) == 1
    assert counting.count("names") == 1
    assert store.url == disk.url
