"""Stores without create-if-absent: found by what they do, and then nothing of a possible other writer is deleted."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from spotsafe.checkpoint.attempts import AttemptRecord, encode_record, newer_attempt, read_attempt
from spotsafe.checkpoint.candidates import candidates, look
from spotsafe.checkpoint.claim import claim, is_exclusive
from spotsafe.checkpoint.layout import CheckpointName, attempt_record, data_file
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import StorageFull, StorageUnavailable
from spotsafe.identity import Identity
from spotsafe.policy.retention import latest
from spotsafe.storage.local import LocalStore
from spotsafe.storage.open import open_store
from spotsafe.storage.remote import FsspecStore
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store, creates_exclusively
from spotsafe.testing.faults import CountingStore, CrashingStore, FailingStore, LostResponseStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt, steps_of
from tests.killed import Crash
from tests.servers import Server

ME = Identity.of_this_process(environ={}, argv=["train.py"])


class Unknown(MemoryStore):
    """An honest store that does not say so."""

    exclusive = None


class Lying(MemoryStore):
    """Creates over what is there and says that it was not, as servers do that ignore conditions."""

    exclusive = None

    def create(self, path: str, data: bytes) -> bool:
        self.objects[path] = bytes(data)
        return True


class Refusing(Lying):
    """Says that it refused, and has overwritten all the same."""

    def create(self, path: str, data: bytes) -> bool:
        fresh = path not in self.objects
        self.objects[path] = bytes(data)
        return fresh


class Racy(MemoryStore):
    """Looks and then writes, and says so."""

    exclusive = False


def take(store: Store) -> AttemptRecord:
    return claim(store, listing=look(store), identity=ME, newest_seen=None, wall=1.0)


# Finding out


@pytest.mark.parametrize(
    ("kind", "answer", "asked"),
    [
        (MemoryStore, True, []),
        (Racy, False, []),
        (Unknown, True, ["create", "read"]),
        (Lying, False, ["create", "replace"]),
        (Refusing, False, ["create", "read", "replace"]),
    ],
)
def test_what_a_store_says_counts_else_what_it_does(
    kind: type[MemoryStore], answer: bool, asked: list[str]
) -> None:
    """One trial where the store does not know; afterwards the record is ours in any case."""
    store = kind()
    record = take(store)
    counting = CountingStore(store)

    assert is_exclusive(counting, record) is answer
    assert [operation.name for operation in counting.operations] == asked
    assert read_attempt(store, record.attempt) == record


def test_a_store_that_does_not_answer_the_trial_is_an_error() -> None:
    """Could not find out is neither yes nor no."""
    store = Unknown()
    record = take(store)
    failing = FailingStore(store, fail=lambda *_: StorageUnavailable("down"))
    with pytest.raises(StorageUnavailable):
        is_exclusive(failing, record)


def test_a_trial_that_stays_does_not_take_the_number_from_us() -> None:
    """It may arrive late, or the store may lose what is given back: nobody else was there."""

    class Forgetful(Lying):
        def replace(self, path: str, data: bytes) -> None:
            pass

    store = Forgetful()
    record = take(store)
    before = store.objects[attempt_record(record.attempt)]
    assert not is_exclusive(store, record)
    assert store.objects[attempt_record(record.attempt)] != before
    assert newer_attempt(store, record.attempt, nonce=record.nonce) is None


@pytest.mark.parametrize("kind", [Unknown, Lying])
def test_every_answer_of_claim_and_trial_may_be_lost(kind: type[MemoryStore]) -> None:
    """With one more try the verdict is the same; without, it is an error, and the next start goes on."""
    for name in ("names", "read", "create", "replace"):
        store = kind()
        losing = RetryingStore(LostResponseStore(store, operations={name}), sleep=lambda _: None)
        record = take(losing)
        assert is_exclusive(losing, record) is (kind is Unknown), name
        assert read_attempt(store, record.attempt) == record
        for times in (1, 2, 3):
            broken = LostResponseStore(store, operations={name}, times=times)
            with suppress(StorageUnavailable):
                is_exclusive(broken, take(broken))
            after = take(store)
            assert is_exclusive(store, after) is (kind is Unknown)
            assert read_attempt(store, after.attempt) == after


def test_wrappers_say_what_the_inner_store_says() -> None:
    """Retrying or counting changes nothing about who wins."""
    for kind, said in ((MemoryStore, True), (Racy, False), (Unknown, None)):
        assert creates_exclusively(RetryingStore(CountingStore(kind()))) is said
    assert creates_exclusively(LocalStoreWithoutAWord()) is None  # type: ignore[arg-type]  # only this is asked


class LocalStoreWithoutAWord:
    """A store of somebody else, older than the question."""


def test_a_local_folder_knows_after_the_first_create(tmp_path: Path) -> None:
    """Links or an exclusive rename decide it; the trial costs nothing."""
    store = LocalStore(tmp_path)
    assert store.exclusive is None
    record = take(store)
    assert store.exclusive is True
    counting = CountingStore(store)
    assert is_exclusive(counting, record)
    assert counting.operations == []


def test_a_file_system_without_links_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some shares and FUSE systems offer neither: there two may believe that they won."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("spotsafe.storage.placing.rename_noreplace", refuse)
    store = RetryingStore(LocalStore(tmp_path))

    assert not is_exclusive(store, take(store))


def test_fsspec_says_where_it_looks_and_then_writes(tmp_path: Path) -> None:
    """A sequential trial would be passed by these, though two writers at once both win."""
    assert creates_exclusively(FsspecStore(f"file://{tmp_path}/run")) is False
    assert creates_exclusively(FsspecStore("memory://single-writer")) is None
    memory = FsspecStore("memory://single-writer")
    assert is_exclusive(memory, take(memory))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "honest"),
    [
        ("seaweedfs", True),
        ("fake_gcs", True),
        ("azurite", True),
        ("rclone_s3", False),
        ("gcp_emulator", False),
    ],
)
def test_real_servers(server: str, honest: bool, request: pytest.FixtureRequest) -> None:
    """Those that ignore conditions are found without knowing their name; those that honour them are trusted."""
    there: Server = request.getfixturevalue(server)
    with closing(FsspecStore(there.url(f"{uuid.uuid4().hex}/run"), **there.options)) as store:
        record = take(store)

        assert is_exclusive(store, record) is honest
        assert read_attempt(store, record.attempt) == record


@pytest.mark.slow
@pytest.mark.parametrize(("server", "honest"), [("seaweedfs", True), ("rclone_s3", False)])
def test_real_servers_by_the_client_that_a_url_gets(
    server: str, honest: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same by boto3 and obstore, as a session opens its url."""
    there: Server = request.getfixturevalue(server)
    for name, value in there.env.items():
        monkeypatch.setenv(name, value)
    store = open_store(there.url(f"{uuid.uuid4().hex}/run"))
    record = take(store)

    assert is_exclusive(store, record) is honest
    assert read_attempt(store, record.attempt) == record


# Superseded


@pytest.fixture
def run() -> tuple[Lying, AttemptRecord]:
    store = Lying()
    return store, take(store)


def test_superseded_when_the_own_record_is_anothers(run: tuple[Lying, AttemptRecord]) -> None:
    """Two starts took one number: whoever's nonce is not there any more has lost."""
    store, mine = run
    assert newer_attempt(store, 1, nonce=mine.nonce) is None
    other = dataclasses.replace(mine, nonce="ffffffff")
    store.objects[attempt_record(1)] = encode_record(other)

    assert newer_attempt(store, 1, nonce=mine.nonce) == 1
    assert newer_attempt(store, 1, nonce=other.nonce) is None
    assert newer_attempt(store, 1) is None, "with create-if-absent nobody has to look"


@pytest.mark.parametrize("damage", [None, b"", b"{}"])
def test_superseded_when_the_own_record_cannot_be_told(
    run: tuple[Lying, AttemptRecord], damage: bytes | None
) -> None:
    """Gone or damaged: whoever cannot prove that the number is his deletes nothing."""
    store, mine = run
    if damage is None:
        del store.objects[attempt_record(1)]
    else:
        store.objects[attempt_record(1)] = damage
    assert newer_attempt(store, 1, nonce=mine.nonce) == 1


def test_superseded_by_the_next_number_as_ever(run: tuple[Lying, AttemptRecord]) -> None:
    """A later start counts on every store."""
    store, mine = run
    take(store)
    assert newer_attempt(store, 1, nonce=mine.nonce) == 2


def test_a_store_that_cannot_say_is_an_error(run: tuple[Lying, AttemptRecord]) -> None:
    """No answer about the own record is not "it is ours"."""
    store, mine = run
    failing = FailingStore(
        store, fail=lambda name, path, number: StorageUnavailable("down") if path.endswith("1.json") else None
    )
    with pytest.raises(StorageUnavailable):
        newer_attempt(failing, 1, nonce=mine.nonce)


# Deleting


def never(_attempt: int) -> bool:
    return False


def always(_attempt: int) -> bool:
    return True


def whole(store: Store) -> list[int]:
    """The steps that are published and whole, newest first."""
    found = [one for one in candidates(store, look(store)) if not verify(store, one.name)]
    return steps_of(found)


def two_starts_with_one_number() -> tuple[Lying, Attempt, Attempt]:
    """On a store that ignores conditions both believe that they are attempt 1."""
    store = Lying()
    first = Attempt(store, keep=latest(2), ended=never)
    second_view = Lying()  # it looked before the first had claimed
    second = Attempt(second_view, keep=latest(2), ended=never)
    store.objects[attempt_record(1)] = second_view.objects[attempt_record(1)]
    second._uploader._store = second._uploader._tidying._store = store
    return store, first, second


def test_two_starts_with_one_number() -> None:
    """The one whose record was overwritten publishes what it has, is superseded and deletes nothing; and the other
    deletes nothing of the first one, though it is the newest."""
    store, first, second = two_starts_with_one_number()
    for step in (1, 2, 3, 4):
        result = first.save(step)
        assert (result.published, result.superseded_by) == (True, 1)
    assert sorted(whole(store)) == [1, 2, 3, 4]
    for step in (5, 6, 7, 8):
        result = second.save(step)
        assert (result.published, result.superseded_by) == (True, None)

    there = {(name.nonce, name.step) for name in look(store).names}
    assert {step for nonce, step in there if nonce == first.record.nonce} == {1, 2, 3, 4}
    assert {step for nonce, step in there if nonce == second.record.nonce} == {7, 8}


def begin() -> Lying:
    """A first attempt that left three checkpoints and half a save."""
    store = Lying()
    first = Attempt(store, keep=latest(100))
    for step in (1, 2, 3):
        first.save(step)
    store.put(CheckpointName(1, 4, 4, first.record.nonce).file(data_file(0, 0)), b"half")
    return store


@pytest.mark.parametrize("ended", [never, always])
def test_only_what_attempts_with_a_recorded_end_left_is_deleted(ended: Callable[[int], bool]) -> None:
    """Sweep and retention leave alone what may still have a writer."""
    store = begin()
    attempt = Attempt(store, keep=latest(2), ended=ended)
    for step in (10, 11, 12):
        assert attempt.save(step).error is None

    assert whole(store) == ([12, 11] if ended is always else [12, 11, 3, 2, 1])
    half = [entry for entry in store.list("checkpoints") if entry.size == 4]
    assert bool(half) == (ended is never)


def test_asking_whether_it_ended_may_fail() -> None:
    """Then nothing is deleted; the checkpoint is published all the same."""

    def fail(_attempt: int) -> bool:
        raise StorageUnavailable("down")

    store = begin()
    attempt = Attempt(store, keep=latest(2), ended=fail)
    result = attempt.save(10)
    assert result.published
    assert isinstance(result.error, StorageUnavailable)
    assert whole(store) == [10, 3, 2, 1]


def test_a_manifest_that_came_after_the_listing_is_not_overwritten() -> None:
    """An attempt published and ended while we swept: its name is looked at again before it is decided."""
    store = Lying()
    first = Attempt(store, keep=latest(100))
    second = Attempt(store, keep=latest(100), ended=always)
    late = first.save(7).name
    manifest = store.objects.pop(late.manifest)

    def ended(_attempt: int) -> bool:
        store.objects[late.manifest] = manifest
        return True

    second._uploader._tidying._ended = ended
    assert second.save(10).error is None
    assert whole(store) == [10, 7]


@pytest.mark.parametrize("kind", [StorageUnavailable, StorageFull])
def test_a_failed_save_whose_manifest_may_arrive_late_keeps_its_files(kind: type[Exception]) -> None:
    """Nothing refuses a late manifest here, so what it names must be there; the sweep after our end removes it."""
    store = Lying()
    attempt = Attempt(store, keep=latest(100), ended=always)
    failing = FailingStore(
        store,
        fail=lambda name, path, _: (
            kind("down") if (name, path[-13:]) == ("create", "manifest.json") else None
        ),
    )
    attempt._uploader._store = failing
    failed = attempt.save(1)
    attempt._uploader._store = store
    assert attempt.save(2).error is None
    assert failed.error is not None
    assert len(store.list(failed.name.folder)) == 3

    assert Attempt(store, keep=latest(100), ended=always).save(3).error is None
    assert len(store.list(failed.name.folder)) == 1


def crash() -> None:
    raise Crash


def crashes() -> Iterator[tuple[int, Any]]:
    for at in range(1, 120):
        for when in ("before", "after"):
            yield at, when


@pytest.mark.slow
def test_crash_at_every_operation() -> None:
    """On a store that ignores conditions too: the newest is whole, and the next attempt goes on."""
    for at, when in crashes():
        store = begin()
        before = whole(store)[0]
        crashing = CrashingStore(store, at=at, when=when, crash=crash)
        with suppress(Crash):
            record_and_save(crashing)
        assert whole(store)[0] >= before
        assert [one.name for one in candidates(store, look(store)) if verify(store, one.name)] == []
        again = Attempt(store, keep=latest(2), ended=always)
        assert again.save(100).error is None
        assert whole(store)[0] == 100
        if crashing.count < at:
            break
    else:
        pytest.fail("not all operations were tried")


def record_and_save(store: Store) -> None:
    attempt = Attempt(store, keep=latest(2), ended=always)
    assert not is_exclusive(store, attempt.record)
    for step in (10, 11, 12):
        error = attempt.save(step, files=1).error
        if isinstance(error, Crash):
            raise error
