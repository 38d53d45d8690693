"""Every storage operation of claim, saves, retention and sweep fails in every way: nothing published is lost.

A scenario is a second attempt on a run in which a first one left published checkpoints and a save that died half
way. The attempt claims and saves four times, so that its operations include the sweep and retention of own and
of foreign checkpoints. For each operation k it is run again with a fault there, in memory; `tests/crashes` does it on
disks and on a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import TypeVar

import pytest

from spotsafe.checkpoint.candidates import by_folder, candidates, look, read_candidate
from spotsafe.checkpoint.layout import CHECKPOINTS, CheckpointName, data_file
from spotsafe.checkpoint.manifest import Manifest
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import StorageError, StorageFull, StorageRefused, StorageUnavailable
from spotsafe.policy.retention import latest
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.testing.faults import CountingStore, FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt, steps_of
from spotsafe.writer.job import SaveResult
from tests.killed import Crash, Killed

pytestmark = pytest.mark.slow

T = TypeVar("T")

SAVES = 4
FIRST_STEPS = (1, 2, 3)


class Journal(WrappingStore):
    """Remembers every checkpoint whose manifest came to be, with what it said."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.published: dict[CheckpointName, Manifest] = {}

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Do, and note a manifest that is there afterwards."""
        result = call()
        folder, _, file = operation.path.rpartition("/")
        name = CheckpointName.parse(folder.rpartition("/")[2])
        if operation.name == "create" and file == "manifest.json" and name is not None:
            manifest = read_candidate(self.inner, name).manifest
            if manifest is not None:
                self.published[name] = manifest
        return result


def begin(inner: Store) -> Journal:
    """A run with three checkpoints of a first attempt that died in the middle of its fourth save."""
    store = Journal(inner)
    first = Attempt(store, keep=latest(3))
    for step in FIRST_STEPS:
        assert first.save(step).published
    half = CheckpointName(1, 4, 4, first.record.nonce)
    store.put_large(half.file(data_file(0, 0)), memoryview(b"half of a save"))
    return store


def second_attempt(store: Store) -> list[SaveResult]:
    """Claim, and save four times; ends where an operation outside a save raises."""
    attempt = Attempt(store, keep=latest(2))
    for save in range(SAVES):
        result = attempt.save(10 + save)
        if isinstance(result.error, Crash):
            raise result.error
    return attempt.results


@cache
def operations() -> int:
    """How many operations the second attempt makes."""
    counting = CountingStore(begin(MemoryStore()))
    results = second_attempt(counting)
    assert all(result.published and result.error is None for result in results)
    assert {"delete", "replace", "abort_uploads", "create"} <= {one.name for one in counting.operations}
    return len(counting.operations)


def published(store: Store) -> list[CheckpointName]:
    """What is published now, newest first."""
    return [one.name for one in candidates(store, look(store))]


def check(journal: Journal) -> None:
    """What must hold in every state: the newest is whole, and nothing is lost but what retention may take."""
    now = published(journal.inner)
    ever = sorted(journal.published, reverse=True)
    assert now[0] == ever[0], "the newest that was ever published is there"
    assert len(now) >= 2, "two are always there"
    assert now[: len(ever[:2])] == ever[:2], "only older ones than the newest two are ever withdrawn"
    for name in now:
        assert verify(journal.inner, name) == [], f"{name} is whole"


def go_on(journal: Journal) -> None:
    """A new attempt must be able to claim, save and clean up, whatever the state."""
    before = published(journal.inner)[0]
    attempt = Attempt(journal, keep=latest(2))
    assert attempt.resumed_from is not None
    assert attempt.resumed_from.name == before
    results = [attempt.save(100), attempt.save(101)]
    assert all(result.published and result.error is None for result in results)
    check(journal)
    assert steps_of(list(candidates(journal, look(journal)))) == [101, 100]
    for name, sizes in by_folder(journal.list(CHECKPOINTS)).items():
        if name.attempt < attempt.record.attempt:
            assert set(sizes) == {name.manifest}, f"no garbage is left in {name}"


def ids(after: bool) -> str:
    return "after" if after else "before"


@pytest.mark.parametrize("after", [False, True], ids=ids)
def test_crash_at_every_operation(after: bool) -> None:
    """Dead before or after operation k, for all k: the invariants hold, and the next attempt goes on."""
    for at in range(1, operations() + 1):
        journal = begin(MemoryStore())
        with suppress(Crash):
            second_attempt(Killed(journal, at=at, after=after))
        check(journal)
        go_on(journal)


@pytest.mark.slow
def test_two_crashes() -> None:
    """A second crash at any operation of the attempt that cleans up after the first one."""
    for first in range(1, operations() + 1, 5):
        for second in range(1 + first % 7, operations() + 1, 7):
            after = bool((first + second) % 2)
            journal = begin(MemoryStore())
            for at in (first, second):
                with suppress(Crash):
                    second_attempt(Killed(journal, at=at, after=after))
            check(journal)
            go_on(journal)


def errors() -> Iterator[Exception]:
    """What a store or the machine may raise."""
    yield StorageUnavailable("down")
    yield StorageRefused("no")
    yield StorageFull("full")
    yield StorageError("odd")
    yield MemoryError()


@pytest.mark.slow
@pytest.mark.parametrize("error", list(errors()), ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("after", [False, True], ids=ids)
def test_error_at_every_operation(error: Exception, after: bool) -> None:
    """An error instead of operation k, or of its answer: no save raises, and later saves succeed."""
    every = 1 if isinstance(error, StorageUnavailable | StorageFull) else 4
    for at in range(1 + after, operations() + 1, every):
        journal = begin(MemoryStore())
        store = Erring(journal, at=at, after=after, error=error)
        results: list[SaveResult] = []
        with suppress(type(error)):
            results = second_attempt(store)
        if not results:
            assert len(published(journal)) == len(FIRST_STEPS), "only looking and claiming may raise"
        assert [result.published for result in results].count(False) <= 1
        assert all(result.published or result.error is error for result in results)
        check(journal)
        go_on(journal)


class Erring(WrappingStore):
    """Raises once, at operation k, before or after doing it."""

    def __init__(self, inner: Store, *, at: int, after: bool, error: Exception) -> None:
        super().__init__(inner)
        self.at, self.after, self.error, self.count = at, after, error, 0

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count, do, and raise if it is this one."""
        self.count += 1
        number = self.count
        if number == self.at and not self.after:
            raise self.error
        result = call()
        if number == self.at:
            raise self.error
        return result


@pytest.mark.slow
def test_lost_response_at_every_operation_with_retries() -> None:
    """With the retry layer in between, a lost answer anywhere is not even noticed."""
    for at in range(1, operations() + 1):
        journal = begin(MemoryStore())
        lossy = Erring(journal, at=at, after=True, error=StorageUnavailable("the answer was lost"))
        results = second_attempt(RetryingStore(lossy, sleep=lambda seconds: None))
        assert all(result.published and result.error is None for result in results)
        check(journal)
        go_on(journal)


@pytest.mark.slow
def test_outage_from_every_operation_on() -> None:
    """A store that stops answering at operation k and comes back for the next attempt."""
    down = StorageUnavailable("down")
    for at in range(1, operations() + 1):
        journal = begin(MemoryStore())
        store = FailingStore(journal, fail=lambda name, path, number, at=at: down if number >= at else None)
        with suppress(StorageUnavailable):
            for result in second_attempt(store):
                assert result.error is None or result.error is down
        check(journal)
        go_on(journal)


def test_store_that_may_not_delete() -> None:
    """Without the right to delete or replace, saves go on and everything that was published stays."""
    journal = begin(MemoryStore())
    refused = StorageRefused("locked")
    store = FailingStore(
        journal, fail=lambda name, path, number: refused if name in {"delete", "replace"} else None
    )
    assert all(result.published and result.error is None for result in second_attempt(store))
    assert published(journal) == sorted(journal.published, reverse=True)
    check(journal)


class Interfering(WrappingStore):
    """Starts another attempt right before operation k, and remembers what was changed in each checkpoint."""

    def __init__(self, journal: Journal, *, at: int) -> None:
        super().__init__(journal)
        self.journal, self.at = journal, at
        self.other: Attempt | None = None
        self.operations: list[Operation] = []

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count, interfere, do."""
        self.operations.append(operation)
        if len(self.operations) == self.at:
            self.other = Attempt(self.journal, keep=latest(2))
        return call()


def test_superseded_at_every_operation() -> None:
    """A newer attempt that appears before operation k: whoever has seen it deletes nothing, and it goes on."""
    for at in range(1, operations() + 1):
        journal = begin(MemoryStore())
        store = Interfering(journal, at=at)
        mine = Attempt(store, keep=latest(2))
        quiet = True
        for save in range(SAVES):
            begun = len(store.operations)
            appeared = store.other is not None
            result = mine.save(10 + save)
            deleted = [one for one in store.operations[begun:] if one.name in {"delete", "replace"}]
            assert result.published
            assert result.error is None
            assert not (result.superseded_by and deleted)
            quiet = quiet and not (appeared and deleted)
            assert result.superseded_by or not appeared or newest_of(store).record.attempt == 2
        other = newest_of(store)
        for name in published(journal):
            assert verify(journal, name) == []
        if other.record.attempt > mine.record.attempt:
            assert quiet, "nothing is deleted by a save that began after the newer attempt"
            assert other.resumed_from is not None
            assert verify(journal, other.resumed_from.name) == []
            assert other.save(50).published
            assert published(journal)[0] == other.results[0].name


def newest_of(store: Interfering) -> Attempt:
    """The other attempt, which is there by now."""
    assert store.other is not None
    return store.other
