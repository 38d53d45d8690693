"""What is tried again, how often, and how long it waits: without waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotsafe.errors import (
    StorageError,
    StorageExists,
    StorageFull,
    StorageNotFound,
    StorageRefused,
    StorageShort,
    StorageUnavailable,
)
from spotsafe.storage.local import LocalStore
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store
from spotsafe.testing.faults import CountingStore, FailingStore, LostResponseStore


@pytest.fixture
def disk(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def waits() -> list[float]:
    """The seconds that were waited."""
    return []


def failing(inner: Store, *, times: int, error: Callable[[str], Exception]) -> CountingStore:
    return CountingStore(
        FailingStore(inner, fail=lambda _op, path, number: error(path) if number <= times else None)
    )


def unavailable(path: str) -> Exception:
    return StorageUnavailable("later", path=path)


CALLS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put("new", b"x"),
    "put_large": lambda store: store.put_large("new", memoryview(b"x")),
    "create": lambda store: store.create("new", b"x"),
    "replace": lambda store: store.replace("new", b"x"),
    "read": lambda store: store.read("old", max_bytes=9),
    "read_into": lambda store: store.read_into("old", 0, memoryview(bytearray(1))),
    "size": lambda store: store.size("old"),
    "list": lambda store: store.list(""),
    "names": lambda store: store.names(""),
    "delete": lambda store: store.delete("old"),
    "abort_uploads": lambda store: store.abort_uploads(""),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_operation_is_tried_again(disk: LocalStore, waits: list[float], name: str) -> None:
    """A store that is unavailable twice answers at the third try, for every operation."""
    disk.put("old", b"x")
    inner = failing(disk, times=2, error=unavailable)
    CALLS[name](RetryingStore(inner, attempts=3, sleep=waits.append))
    assert inner.count(name) == 3
    assert len(waits) == 2


@pytest.mark.parametrize("name", CALLS)
def test_the_last_error_is_raised(disk: LocalStore, waits: list[float], name: str) -> None:
    """After the last try the store's own error comes out, not one of the retry library."""
    disk.put("old", b"x")
    inner = failing(disk, times=100, error=unavailable)
    with pytest.raises(StorageUnavailable, match="later"):
        CALLS[name](RetryingStore(inner, attempts=4, sleep=waits.append))
    assert inner.count(name) == 4
    assert len(waits) == 3


@pytest.mark.parametrize(
    "kind",
    [StorageError, StorageNotFound, StorageShort, StorageRefused, StorageFull, StorageExists, ValueError],
)
def test_nothing_else_is_tried_again(disk: LocalStore, waits: list[float], kind: type[Exception]) -> None:
    """An answer is an answer; only no answer is asked for again."""
    inner = failing(disk, times=1, error=lambda _path: kind("no"))
    with pytest.raises(kind):
        RetryingStore(inner, sleep=waits.append).read("old", max_bytes=1)
    assert waits == []


def test_interrupts_go_through(disk: LocalStore, waits: list[float]) -> None:
    """KeyboardInterrupt ends the waiting at once."""

    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    inner = failing(disk, times=100, error=unavailable)
    with pytest.raises(KeyboardInterrupt):
        RetryingStore(inner, sleep=interrupted).names("")
    assert inner.count("names") == 1


def test_waits_grow_and_are_bounded(disk: LocalStore, waits: list[float]) -> None:
    """The n-th wait is random, at most 0.5 s x 2^(n-1), and never over the bound."""
    inner = failing(disk, times=100, error=unavailable)
    with pytest.raises(StorageUnavailable):
        RetryingStore(inner, attempts=12, max_wait_s=4.0, sleep=waits.append).names("")
    assert len(waits) == 11
    for number, wait in enumerate(waits):
        assert 0 <= wait <= min(4.0, 0.5 * 2**number)
    assert len(set(waits)) > 1


def test_one_attempt_never_waits(disk: LocalStore, waits: list[float]) -> None:
    """attempts=1 is no retrying at all."""
    inner = failing(disk, times=1, error=unavailable)
    with pytest.raises(StorageUnavailable):
        RetryingStore(inner, attempts=1, sleep=waits.append).names("")
    assert waits == []


# -- the deadline


def test_no_wait_reaches_the_deadline(disk: LocalStore) -> None:
    """The time is asked for before every wait; a wait that does not fit is not begun."""
    left = 3.0
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal left
        assert seconds < left
        left -= seconds
        waited.append(seconds)

    inner = failing(disk, times=10_000, error=unavailable)
    store = RetryingStore(inner, attempts=10_000, max_wait_s=1.0, deadline=lambda: left, sleep=sleep)
    with pytest.raises(StorageUnavailable):
        store.names("")
    assert left > 0
    assert sum(waited) < 3.0


def test_past_the_deadline_it_is_tried_once(disk: LocalStore, waits: list[float]) -> None:
    """Time that is over still allows the one try that was asked for, and no wait."""
    inner = failing(disk, times=1, error=unavailable)
    with pytest.raises(StorageUnavailable):
        RetryingStore(inner, deadline=lambda: -1.0, sleep=waits.append).names("")
    assert waits == []
    assert RetryingStore(disk, deadline=lambda: -1.0).names("") == []


def test_a_deadline_that_comes_up_while_waiting(disk: LocalStore) -> None:
    """A notice that arrives between two tries counts from then on."""
    answers: Iterator[float | None] = iter([None, None, 0.0])
    waited: list[float] = []
    inner = failing(disk, times=100, error=unavailable)
    with pytest.raises(StorageUnavailable):
        RetryingStore(inner, attempts=9, deadline=lambda: next(answers), sleep=waited.append).names("")
    assert len(waited) == 2


# -- writes whose answer was lost


def test_a_put_whose_answer_was_lost(disk: LocalStore, waits: list[float]) -> None:
    """Our own bytes in the way are success, once the first answer is known to be missing."""
    store = RetryingStore(LostResponseStore(disk), sleep=waits.append)
    store.put("a", b"mine")
    assert disk.read("a", max_bytes=9) == b"mine"
    assert len(waits) == 1


@pytest.mark.parametrize("theirs", [b"else", b"longer", b""])
def test_a_foreign_object_in_the_way(disk: LocalStore, waits: list[float], theirs: bytes) -> None:
    """Another writer's bytes are "exists", also after a lost answer, and stay."""
    disk.put("a", theirs)
    inner = failing(disk, times=1, error=unavailable)
    with pytest.raises(StorageExists):
        RetryingStore(inner, sleep=waits.append).put("a", b"mine")
    assert disk.read("a", max_bytes=9) == theirs


def test_the_same_bytes_without_doubt(disk: LocalStore) -> None:
    """A first try that finds the name taken is a mistake of the caller, whatever the bytes."""
    disk.put("a", b"mine")
    with pytest.raises(StorageExists):
        RetryingStore(disk).put("a", b"mine")


def test_a_large_object_is_compared_in_pieces(
    disk: LocalStore, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every piece counts, the last and incomplete one too."""
    monkeypatch.setattr("spotsafe.storage.retrying._COMPARE", 1000)
    data = bytes(range(256)) * 10
    for position in (0, 999, 1000, 2559):
        path = f"large-{position}"
        other = bytearray(data)
        other[position] ^= 1
        disk.put(path, bytes(other))
        inner = failing(disk, times=1, error=unavailable)
        with pytest.raises(StorageExists):
            RetryingStore(inner, sleep=waits.append).put_large(path, memoryview(data))
    RetryingStore(LostResponseStore(disk), sleep=waits.append).put_large("mine", memoryview(data))
    RetryingStore(LostResponseStore(disk), sleep=waits.append).put_large("empty", memoryview(b""))


@pytest.mark.parametrize("options", [{"attempts": 0}, {"attempts": -1}, {"max_wait_s": -1.0}])
def test_bad_options(disk: LocalStore, options: dict[str, float]) -> None:
    """The message names the option."""
    with pytest.raises(ValueError, match=next(iter(options))):
        RetryingStore(disk, **options)


def test_retries_are_logged(disk: LocalStore, waits: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """Each wait leaves a line with operation, path and reason."""
    caplog.set_level("INFO", logger="spotsafe.storage")
    inner = failing(disk, times=1, error=unavailable)
    RetryingStore(inner, sleep=waits.append).put("a/b", b"x")
    assert len(caplog.messages) == 1
    assert "put a/b: try 1 failed" in caplog.messages[0]
    assert "later" in caplog.messages[0]
