"""Frozen files: written once, referred to while their bytes hold, and never lost to a checkpoint that needs them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec import structs

from spotsafe.checkpoint.candidates import by_folder, candidates, look, read_candidate
from spotsafe.checkpoint.index_values import FileEntry
from spotsafe.checkpoint.layout import CHECKPOINTS, CheckpointName, frozen_file
from spotsafe.checkpoint.manifest import Marker
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import StorageError, StorageNotFound, StorageRefused, StorageUnavailable
from spotsafe.events import DeleteRefused, Event, FileWritten, Warned
from spotsafe.policy.retention import latest
from spotsafe.storage.local import LocalStore
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.testing.faults import CountingStore, FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Arrays, Attempt
from spotsafe.testing.sinks import RecordingSink
from spotsafe.writer.job import Held, SaveResult
from spotsafe.writer.lending import RENEW_S, HeldFiles
from tests.writer.test_crashes import Crash, Journal, Killed

T = TypeVar("T")

FIRST, SECOND = frozen_file(0, 0), frozen_file(0, 1)


def base(*values: int) -> list[Arrays]:
    """One file of frozen weights for each value."""
    return [{f"base{n}": np.full((64, 8), value, dtype=np.float32)} for n, value in enumerate(values)]


def files_in(store: Store, name: CheckpointName) -> list[str]:
    """Base names of what lies in a checkpoint's folder."""
    return [entry.path.rpartition("/")[2] for entry in store.list(name.folder)]


def there(store: Store) -> list[CheckpointName]:
    """What is published, oldest first; each one is whole."""
    names = [one.name for one in candidates(store, look(store))][::-1]
    for name in names:
        assert verify(store, name) == [], name
    return names


def lent_by(store: Store, name: CheckpointName) -> dict[str, str]:
    """File -> owner of each reference of a published checkpoint."""
    manifest = read_candidate(store, name).manifest
    assert manifest is not None
    return {one.file: one.checkpoint for one in manifest.references}


# Referring


def test_the_second_save_refers() -> None:
    """Nothing of the frozen files is written again, staged or not, and the reference is to the owner's folder."""
    store, events = MemoryStore(), list[Event]()
    attempt = Attempt(store, keep=latest(100), emit=events.append)
    first = attempt.save(1, frozen=base(1, 2))
    assert {FIRST, SECOND} <= set(files_in(store, first.name))
    assert lent_by(store, first.name) == {}
    for staged in (True, False, False):
        events.clear()
        result = attempt.save(2, frozen=base(1, 2), staged_frozen=staged)
        assert result.published
        assert lent_by(store, result.name) == dict.fromkeys((FIRST, SECOND), str(first.name))
        written = [event for event in events if isinstance(event, FileWritten)]
        assert not {FIRST, SECOND}.intersection(event.file for event in written)
        assert result.total_bytes == sum(event.total_bytes for event in written)
    assert len(there(store)) == 4


def test_only_the_changed_file_is_written_again() -> None:
    """Digests decide: the other file is still referred to."""
    store = MemoryStore()
    attempt = Attempt(store, keep=latest(100))
    first = attempt.save(1, frozen=base(1, 2)).name
    second = attempt.save(2, frozen=base(1, 3)).name
    third = attempt.save(3, frozen=base(1, 3), staged_frozen=False).name
    assert lent_by(store, second) == {FIRST: str(first)}
    assert SECOND in files_in(store, second)
    assert lent_by(store, third) == {FIRST: str(first), SECOND: str(second)}
    assert there(store) == [first, second, third]


def test_a_resumed_attempt_refers_to_an_earlier_attempts_files() -> None:
    """Also to those that the checkpoint resumed from only refers to; once it has read the manifest as published."""
    store = MemoryStore()
    one = Attempt(store, keep=latest(1))
    owner = one.save(1, frozen=base(1)).name
    origin = one.save(2, frozen=base(1)).name
    counting = CountingStore(store)
    two = Attempt(counting, keep=latest(1))
    counting.operations.clear()
    result = two.save(3, frozen=base(1))
    assert lent_by(store, result.name) == {FIRST: str(owner)}
    made = [(operation.name, operation.path) for operation in counting.operations]
    assert made.index(("read", origin.manifest)) < made.index(("size", owner.file(FIRST)))
    for step in (4, 5, 6):
        assert two.save(step, frozen=base(1), staged_frozen=False).published
    assert there(store) == [two.results[-2].name, two.results[-1].name]
    assert files_in(store, owner) == [FIRST, "manifest.json"]
    assert read_candidate(store, owner).marker == Marker(state="retired", in_use=(FIRST,))
    assert files_in(store, origin) == ["manifest.json"]


def test_no_reference_to_what_was_never_published() -> None:
    """Files of a save that failed are written again, and those of a withdrawn checkpoint that nobody vouches for."""
    store = MemoryStore()
    down = FailingStore(
        store,
        fail=lambda name, path, number: (
            StorageUnavailable("down") if name == "create" and path.endswith("manifest.json") else None
        ),
    )
    attempt = Attempt(down, keep=latest(9))
    failed = attempt.save(1, frozen=base(1))
    assert not failed.published
    assert failed.frozen
    other = Attempt(store, keep=latest(9))
    stale = Held(
        checkpoint=str(failed.name),
        seen_in=str(failed.name),
        size=failed.frozen[0].size,
        digests=failed.frozen[0].digests,
        age_s=0.0,
    )
    result = other.save(2, frozen=base(1), held=lambda _: stale)
    assert lent_by(store, result.name) == {}
    unstaged = other.save(3, frozen=base(1), held=lambda _: stale, staged_frozen=False)
    assert isinstance(unstaged.error, StorageNotFound)


def test_a_file_that_is_gone_is_written_anew() -> None:
    """Of any size but its own, or missing: the store is asked, and what is at hand is written."""
    store = MemoryStore()
    attempt = Attempt(store, keep=latest(9))
    owner = attempt.save(1, frozen=base(1)).name
    good = store.objects.pop(owner.file(FIRST))
    lost = attempt.save(2, frozen=base(1), staged_frozen=False)
    assert isinstance(lost.error, StorageNotFound)
    assert "the next save writes it again" in str(lost.error)
    store.objects[owner.file(FIRST)] = good[:-1]
    again = attempt.save(3, frozen=base(1))
    assert again.published
    assert lent_by(store, again.name) == {}
    assert verify(store, again.name) == []


def test_no_answer_about_a_file_is_not_gone() -> None:
    """The save fails; nothing is guessed."""
    down: list[str] = []
    silent = FailingStore(
        MemoryStore(),
        fail=lambda name, path, number: (
            StorageUnavailable("down") if name == "size" and path in down else None
        ),
    )
    attempt = Attempt(silent, keep=latest(9))
    owner = attempt.save(1, frozen=base(1)).name
    down.append(owner.file(FIRST))
    assert isinstance(attempt.save(2, frozen=base(1)).error, StorageUnavailable)
    down.clear()
    assert lent_by(silent, attempt.save(3, frozen=base(1)).name) == {FIRST: str(owner)}


def test_a_file_is_renewed_after_a_day_of_run_time() -> None:
    """The age counts over attempts, in run time; the old file goes when nobody needs it any more."""
    store = MemoryStore()
    one = Attempt(store, keep=latest(2))
    owner = one.save(1, frozen=base(1)).name
    one.now = RENEW_S * 0.6
    middle = one.save(2, frozen=base(1)).name
    two = Attempt(store, keep=latest(2))
    two.now = RENEW_S * 0.3
    assert lent_by(store, two.save(3, frozen=base(1)).name) == {FIRST: str(owner)}
    two.now = RENEW_S * 0.8
    fresh = two.save(4, frozen=base(1)).name
    assert lent_by(store, fresh) == {}
    last = two.save(5, frozen=base(1)).name
    assert lent_by(store, last) == {FIRST: str(fresh)}
    assert there(store) == [fresh, last]
    assert files_in(store, owner) == files_in(store, middle) == ["manifest.json"]


def test_what_is_held() -> None:
    """Only frozen files, by name, under their owner; unexpected changes are told."""
    now = 0.0
    held = HeldFiles(lambda: now, renew_s=100.0)
    name, owner = CheckpointName(1, 2, 3, "00000000"), CheckpointName(1, 1, 1, "00000000")
    mine = FileEntry(name=FIRST, size=5, digests=("0" * 32,))
    lent = FileEntry(name=SECOND, size=6, digests=("1" * 32,), checkpoint=str(owner), age_s=40.0)
    held.note(name, [mine, lent, FileEntry(name="data-00000-000.safetensors", size=1, digests=())])
    now = 50.0
    assert held.get(FIRST) == Held(
        checkpoint=str(name), seen_in=str(name), size=5, digests=mine.digests, age_s=50.0
    )
    assert held.get(SECOND) == Held(
        checkpoint=str(owner), seen_in=str(name), size=6, digests=lent.digests, age_s=90.0
    )
    assert held.get("data-00000-000.safetensors") is None
    now = 60.0
    assert held.get(SECOND) is None
    result = SaveResult(name=name, published=True, healthy=True, total_bytes=0, write_s=0.0)
    assert held.note_result(replace(result, published=False, frozen=(lent,))) == []
    assert held.get(FIRST) is not None
    changed = structs.replace(mine, digests=("2" * 32,))
    assert held.note_result(
        replace(result, frozen=(changed, structs.replace(lent, checkpoint=None, age_s=0.0)))
    ) == [FIRST]


# Retention


def test_an_own_checkpoint_that_lends_becomes_a_marker_until_it_lends_no_more() -> None:
    """Its other files go at once; the marker goes with the last file."""
    store = MemoryStore()
    attempt = Attempt(store, keep=latest(2))
    owner = attempt.save(1, frozen=base(1, 2)).name
    attempt.save(2, frozen=base(1, 2))
    attempt.save(3, frozen=base(1, 3))
    assert files_in(store, owner) == [FIRST, SECOND, "manifest.json"]
    assert read_candidate(store, owner).marker == Marker(state="retired", in_use=(FIRST, SECOND))
    attempt.save(4, frozen=base(1, 3))
    assert files_in(store, owner) == [FIRST, "manifest.json"]
    assert read_candidate(store, owner).marker == Marker(state="retired", in_use=(FIRST,))
    attempt.save(5, frozen=base(5, 3))
    attempt.save(6, frozen=base(5, 3))
    assert files_in(store, owner) == []
    assert there(store) == [attempt.results[-2].name, attempt.results[-1].name]


@pytest.mark.parametrize("refused", ["delete", "replace"])
def test_refused_deletes_lose_nothing(refused: str) -> None:
    """What cannot be withdrawn or trimmed stays whole."""
    store, sink = MemoryStore(), RecordingSink()
    locked = FailingStore(
        store, fail=lambda name, path, number: StorageRefused("no") if name == refused else None
    )
    for _ in range(2):
        attempt = Attempt(locked, keep=latest(1), emit=sink.emit)
        for step in range(1, 7):
            result = attempt.save(step, frozen=base(step // 3, step // 2))
            assert result.published
            assert result.error is None
            there(store)
    assert sink.of(DeleteRefused)


def test_an_older_attempts_undecided_save_keeps_what_it_may_refer_to() -> None:
    """As long as its name cannot be decided, nobody knows; everything that can be referred to stays."""
    store = MemoryStore()
    one = Attempt(store, keep=latest(1))
    owner = one.save(1, frozen=base(1)).name
    half = CheckpointName(1, 9, 9, one.record.nonce)
    store.put(half.file("index-00000.json"), b"?")
    refusing = FailingStore(
        store,
        fail=lambda name, path, number: (
            StorageError("no") if name == "create" and path == half.manifest else None
        ),
    )
    sink = RecordingSink()
    two = Attempt(refusing, keep=latest(1), emit=sink.emit)
    for step in (11, 12, 13):
        assert two.save(step, frozen=base(2)).error is None
    assert files_in(store, owner) == [FIRST, "manifest.json"]
    assert read_candidate(store, owner).marker == Marker(state="retired", in_use=(FIRST,))
    assert [event.path for event in sink.of(DeleteRefused)] == [half.folder]
    three = Attempt(store, keep=latest(1))
    three.save(21, frozen=base(2))
    assert files_in(store, owner) == ["manifest.json"]


def test_a_damaged_manifest_beside_a_lender() -> None:
    """It blocks nothing, and what readable ones refer to stays."""
    store, sink = MemoryStore(), RecordingSink()
    attempt = Attempt(store, keep=latest(2), emit=sink.emit)
    owner = attempt.save(1, frozen=base(1)).name
    second = attempt.save(2, frozen=base(1)).name
    store.objects[second.manifest] = b"?"
    for step in (3, 4):
        attempt._uploader._tidying._known.clear()  # as in a later attempt, which has to read it
        attempt.save(step, frozen=base(1))
    assert [verify(store, one.name) for one in attempt.results[-2:]] == [[], []]
    assert files_in(store, owner) == [FIRST, "manifest.json"]
    assert "index-00000.json" in files_in(store, second)
    assert len(sink.of(Warned)) == 1


# Crashes

SAVES = 5


def content(save: int) -> list[Arrays]:
    """The second file changes once on the way."""
    return base(1, 2 + (save >= 2))


def begin(inner: Store) -> Journal:
    """A first attempt with three checkpoints, of which the last two refer to the first."""
    journal = Journal(inner)
    first = Attempt(journal, keep=latest(3))
    for step in (1, 2, 3):
        assert first.save(step, frozen=base(1, 2)).published
    return journal


def second_attempt(store: Store) -> list[SaveResult]:
    """Claim, and save: staged once, then only referred to, then one file anew."""
    attempt = Attempt(store, keep=latest(2))
    for save in range(SAVES):
        result = attempt.save(10 + save, frozen=content(save), staged_frozen=save in {0, 2})
        if isinstance(result.error, Crash):
            raise result.error
    return attempt.results


def operations() -> list[Operation]:
    """What the second attempt does."""
    counting = CountingStore(begin(MemoryStore()))
    results = second_attempt(counting)
    assert all(result.published and result.error is None for result in results)
    return counting.operations


def go_on(journal: Journal, *, changed: bool) -> None:
    """Whatever the state: everything published is whole, a new attempt goes on from the newest, no garbage is left."""
    before = there(journal.inner)
    assert before[-1] == max(journal.published)
    attempt = Attempt(journal, keep=latest(2))
    assert attempt.resumed_from is not None
    assert attempt.resumed_from.name == before[-1]
    frozen = base(7, 8) if changed else base(1, 3)
    for step in (100, 101):
        result = attempt.save(step, frozen=frozen)
        assert result.published
        assert result.error is None
        there(journal.inner)
    assert there(journal.inner) == [result.name for result in attempt.results]
    needed = {path for name in there(journal.inner) for path in _needed(journal.inner, name)}
    for name, sizes in by_folder(journal.list(CHECKPOINTS)).items():
        if name.attempt < attempt.record.attempt:
            assert set(sizes) <= {name.manifest, *needed}, f"no garbage is left in {name}"


def _needed(store: Store, name: CheckpointName) -> list[str]:
    manifest = read_candidate(store, name).manifest
    assert manifest is not None
    return [one.path for one in manifest.references]


def crash(at: int, *, after: bool) -> None:
    """Dead before or after operation `at`: no published checkpoint lacks a file, and the run goes on."""
    journal = begin(MemoryStore())
    with suppress(Crash):
        second_attempt(Killed(journal, at=at, after=after))
    go_on(journal, changed=bool(at % 2))


def test_crash_at_some_operations() -> None:
    """Every seventh: the slow test has all."""
    made = operations()
    assert {"delete", "replace", "size"} <= {one.name for one in made}
    for at in range(1, len(made) + 1, 7):
        crash(at, after=bool(at % 2))


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_crash_at_every_operation(after: bool) -> None:
    """For all k, on a state with files of its own and two that are referred to."""
    for at in range(1, len(operations()) + 1):
        crash(at, after=after)


@pytest.mark.slow
def test_crash_on_a_local_disk(tmp_path: Path) -> None:
    """The same on files and folders, at every fifth operation."""
    for at in range(1, len(operations()) + 1, 5):
        journal = begin(LocalStore(tmp_path / str(at)))
        with suppress(Crash):
            second_attempt(Killed(journal, at=at, after=bool(at % 2)))
        go_on(journal, changed=bool(at % 3))


class Erring(WrappingStore):
    """Raises once, at operation k, before or after doing it."""

    def __init__(self, inner: Store, *, at: int, after: bool) -> None:
        super().__init__(inner)
        self.at, self.after, self.count = at, after, 0

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count, do, and raise if it is this one."""
        self.count += 1
        number = self.count
        if number == self.at and not self.after:
            raise StorageUnavailable("down")
        result = call()
        if number == self.at:
            raise StorageUnavailable("the answer was lost")
        return result


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_lost_operation_or_response_at_every_operation(after: bool) -> None:
    """An outage of one operation: the attempt goes on, and everything published is whole throughout."""
    for at in range(1, len(operations()) + 1):
        journal = begin(MemoryStore())
        with suppress(StorageUnavailable):
            second_attempt(Erring(journal, at=at, after=after))
        go_on(journal, changed=bool(at % 2))


class Superseding(WrappingStore):
    """Right before operation k a newer attempt starts, saves so often that it deletes, and ends."""

    def __init__(self, journal: Journal, *, at: int, saves: int, other_weights: bool) -> None:
        super().__init__(journal)
        self.journal, self.at, self.saves, self.count = journal, at, saves, 0
        self.other_weights = other_weights
        self.other: Attempt | None = None

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        """Count, interfere, do."""
        self.count += 1
        if self.count == self.at:
            self.other = Attempt(self.journal, keep=latest(1))
            for save in range(self.saves):
                frozen = base(5 + save, 6) if self.other_weights else base(1, 3 if self.at % 2 else 2)
                self.other.save(50 + save, frozen=frozen)
        return call()


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "other_weights"), [(1, True), (4, True), (1, False), (4, False)])
def test_superseded_at_every_operation(saves: int, other_weights: bool) -> None:
    """A newer attempt that comes, saves and deletes before operation k of the older one, for all k.

    It writes other weights and deletes what the older one refers to, or refers itself to what that one deletes.
    """
    for at in range(1, len(operations()) + 1):
        journal = begin(MemoryStore())
        store = Superseding(journal, at=at, saves=saves, other_weights=other_weights)
        mine = Attempt(store, keep=latest(2))
        for save in range(SAVES):
            try:
                result = mine.save(10 + save, frozen=content(save), staged_frozen=save in {0, 2})
            except StorageNotFound:
                break  # what it resumes from is gone already: it would look and choose again
            there(journal.inner)
            if result.superseded_by or result.error:
                break
        other: Any = store.other
        if other is not None:
            assert there(journal.inner)[-1] == other.results[-1].name or other.record.attempt == 2
