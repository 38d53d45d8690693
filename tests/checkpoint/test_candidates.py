"""Looking at a run: the order is that of numbers, garbage is ignored, and damage is told from absence."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from spotsafe.checkpoint import sealed
from spotsafe.checkpoint.candidates import (
    Decoded,
    by_folder,
    candidates,
    look,
    missing_from,
    read_candidate,
    read_index,
    read_many,
)
from spotsafe.checkpoint.index import Index
from spotsafe.checkpoint.layout import CheckpointName, data_file, frozen_file, index_file
from spotsafe.checkpoint.manifest import MAX_BYTES, Marker, Reference, encode_marker
from spotsafe.errors import (
    DamagedCheckpoint,
    StorageError,
    StorageNotFound,
    StorageRefused,
    StorageUnavailable,
    UnsupportedFormat,
)
from spotsafe.policy.retention import latest
from spotsafe.storage.store import Entry
from spotsafe.testing.faults import CountingStore, FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt, steps_of

NONCE = "00000000"


def run_with(*steps: int) -> tuple[MemoryStore, list[CheckpointName]]:
    """A run whose first attempt published these steps, all kept; the names as saved."""
    store = MemoryStore()
    attempt = Attempt(store, keep=latest(100))
    return store, [attempt.save(step).name for step in steps]


def test_empty_folder() -> None:
    """Where nothing is, nothing is seen, and the next attempt is the first."""
    listing = look(MemoryStore())
    assert (listing.attempts, listing.published, listing.names, listing.highest) == ((), frozenset(), (), 0)


@pytest.mark.parametrize("kind", ["attempts", "checkpoints"])
@pytest.mark.parametrize("error", [StorageUnavailable("down"), StorageRefused("no"), StorageError("odd")])
def test_failed_look_is_never_an_empty_run(kind: str, error: StorageError) -> None:
    """A listing that fails is an error, whichever of the two it is."""
    store, _ = run_with(1)
    failing = FailingStore(store, fail=lambda name, path, number: error if path == kind else None)
    with pytest.raises(type(error)):
        look(failing)


def test_attempts_are_listed_before_checkpoints() -> None:
    """Whoever sees the mark of a publish must see the checkpoint: its manifest was there first."""
    store = CountingStore(MemoryStore())
    look(store)
    assert [operation.path for operation in store.operations] == ["attempts", "checkpoints"]


@pytest.mark.parametrize("seed", range(5))
def test_order_is_that_of_integers(seed: int) -> None:
    """Attempt, step and save decide, by number: never the names as text or the order of creation."""
    steps = [9, 10, 99, 100, 9_000, 10_000, 999_999_999, 1_000_000_000, 20_000_000_000]
    names = [CheckpointName(1, step, 1, NONCE) for step in steps]
    names += [CheckpointName(1, 20_000_000_000, save, NONCE) for save in (2, 9_999, 10_000)]
    names += [CheckpointName(attempt, 1, 1, NONCE) for attempt in (2, 999_999, 1_000_000)]
    store = MemoryStore()
    for name in random.Random(seed).sample(names, len(names)):
        store.put(f"{name.folder}/x", b"")
    assert list(look(store).names) == names[::-1]


@pytest.mark.parametrize(
    "garbage",
    [
        "notes",
        "checkpoint-final",
        "step_-1",
        "step_1e3",
        "handpicked",
        "a1-s1-1-00000000",
        "a000001-s000000001-0001-0000000",
        "a000001-s000000001-0001-0000000G",
        "a000001-s000000001-0001-00000000.tmp",
        "a0000001-s000000001-0001-00000000",
        "A000001-s000000001-0001-00000000",
        ".DS_Store",
        "a\u0661\u0661\u0661\u0661\u0661\u0661-s000000001-0001-00000000",
    ],
)
def test_foreign_names_are_ignored(garbage: str) -> None:
    """A stray folder or file never wins, never counts, and is no error."""
    store, names = run_with(5)
    store.put(f"checkpoints/{garbage}/manifest.json", b"{}")
    store.put(f"checkpoints/{garbage}.json", b"{}")
    store.put(f"attempts/{garbage}.json", b"{}")
    store.put(f"attempts/{garbage}.published", b"{}")
    listing = look(store)
    assert list(listing.names) == names
    assert (listing.attempts, listing.published, listing.highest) == ((1,), frozenset({1}), 1)
    assert list(by_folder(store.list("checkpoints"))) == names


def test_what_a_candidate_can_be() -> None:
    """Published, never begun, abandoned and retired are told apart."""
    store, (good, *others) = run_with(1, 2, 3, 4)
    for name in others:
        del store.objects[name.manifest]
    store.put(others[1].manifest, encode_marker(Marker(state="abandoned")))
    store.put(others[2].manifest, encode_marker(Marker(state="retired")))
    found = [read_candidate(store, name) for name in (good, *others)]
    assert [one.absent for one in found] == [False, True, True, True]
    assert [one.reason for one in found] == ["", "never published", "abandoned", "retired"]
    assert steps_of(found) == [1]


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def oversized(data: bytes) -> bytes:
    return data + b" " * MAX_BYTES


def other_type(data: bytes) -> bytes:
    members = sealed.unseal(data, max_bytes=MAX_BYTES)
    return sealed.seal({**members, "parts": "none"})


DAMAGES: list[Callable[[bytes], bytes]] = [
    truncated,
    oversized,
    other_type,
    lambda data: b"",
    lambda data: b"[]",
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_manifest_is_a_fault_not_absence(damage: Callable[[bytes], bytes]) -> None:
    """A manifest that is truncated, empty, too large, of another type or not JSON is there, and damaged."""
    store, (name,) = run_with(1)
    store.objects[name.manifest] = damage(store.objects[name.manifest])
    found = read_candidate(store, name)
    assert isinstance(found.fault, DamagedCheckpoint)
    assert not found.absent
    assert str(name) in found.reason
    assert [one.name for one in candidates(store, look(store))] == [name]


def test_newer_format_is_a_fault_of_its_own() -> None:
    """A manifest of a newer version is readable as such, so that a start can stop."""
    store, (name,) = run_with(1)
    members = sealed.unseal(store.objects[name.manifest], max_bytes=MAX_BYTES)
    store.objects[name.manifest] = sealed.seal({**members, "requires": ["delta"]})
    assert isinstance(read_candidate(store, name).fault, UnsupportedFormat)


def test_storage_error_is_no_fault() -> None:
    """A manifest that could not be read is neither damaged nor absent."""
    store, (name,) = run_with(1)
    failing = FailingStore(store, fail=lambda method, path, number: StorageUnavailable("down"))
    with pytest.raises(StorageUnavailable):
        read_candidate(failing, name)
    with pytest.raises(StorageUnavailable):
        read_many(failing, [name, name])


def test_candidates_are_read_lazily_and_newest_first() -> None:
    """A start that takes the newest reads one manifest only."""
    store, names = run_with(1, 2, 3)
    counting = CountingStore(store)
    first = next(candidates(counting, look(store)))
    assert first.name == names[-1]
    assert counting.count("read") == 1


def test_absent_ones_are_no_candidates() -> None:
    """What was never published, abandoned or retired is passed without a word."""
    store, names = run_with(1, 2, 3)
    del store.objects[names[2].manifest]
    store.objects[names[1].manifest] = encode_marker(Marker(state="retired"))
    assert [one.name for one in candidates(store, look(store))] == [names[0]]


def test_many_are_read_in_the_order_asked() -> None:
    """Reading at the same time does not shuffle."""
    store, names = run_with(*range(20))
    assert [one.name for one in read_many(store, names)] == names
    assert read_many(store, []) == []


def test_index_is_compared_with_the_manifest() -> None:
    """An index is believed only if it has the size and the digest that were published."""
    store, (old, new) = run_with(1, 2)
    candidate = read_candidate(store, new)
    assert candidate.manifest is not None
    part = candidate.manifest.parts[0]
    path = new.file(index_file(0))
    assert read_index(store, candidate, part).session == {"step": 2}
    good = store.objects[path]
    for bad in (good[:-1], good + b" ", store.objects[old.file(index_file(0))]):
        store.objects[path] = bad
        with pytest.raises(DamagedCheckpoint, match=index_file(0)):
            read_index(store, candidate, part)
    del store.objects[path]
    with pytest.raises(StorageNotFound):
        read_index(store, candidate, part)


def test_an_index_that_is_read_twice_is_decoded_once() -> None:
    """But read and compared each time: what became of its bytes meanwhile is seen. Others are not taken for it."""
    store, (old, new) = run_with(1, 2)
    decoded: Decoded = {}

    def read(name: CheckpointName) -> Index:
        candidate = read_candidate(store, name)
        assert candidate.manifest is not None
        return read_index(store, candidate, candidate.manifest.parts[0], decoded=decoded)

    first = read(new)
    assert read(new) is first
    assert read(old) is not first
    assert (read(old).session, first.session) == ({"step": 1}, {"step": 2})
    store.objects[new.file(index_file(0))] = store.objects[old.file(index_file(0))]
    with pytest.raises(DamagedCheckpoint, match=index_file(0)):
        read(new)


def test_what_a_listing_shows_to_be_missing() -> None:
    """A missing or short file is seen from the sizes alone."""
    store, (name,) = run_with(1)
    manifest = read_candidate(store, name).manifest
    assert manifest is not None
    sizes = {entry.path: entry.size for entry in store.list("")}
    assert missing_from(manifest, {name: sizes}) == ""
    assert missing_from(manifest, {}) == "index-00000.json is missing"
    data, index = name.file(data_file(0, 0)), name.file(index_file(0))
    without = {path: size for path, size in sizes.items() if path != index}
    assert missing_from(manifest, {name: without}) == "index-00000.json is missing"
    assert "has 1 bytes" in missing_from(manifest, {name: {**sizes, index: 1}})
    assert "data files" in missing_from(manifest, {name: {**sizes, data: 1}})
    without = {path: size for path, size in sizes.items() if path != data}
    assert "data files" in missing_from(manifest, {name: without})


def test_a_listing_shows_a_missing_reference() -> None:
    """A file in another folder counts too, and has to have its size."""
    store, (owner, name) = run_with(1, 2)
    manifest = read_candidate(store, name).manifest
    assert manifest is not None
    file = frozen_file(0, 3)
    manifest = replace(manifest, references=(Reference(checkpoint=str(owner), file=file, size=7),))
    folders = by_folder(store.list(""))
    assert f"{file} of {owner}, which it refers to, is missing" in missing_from(manifest, folders)
    folders[owner][owner.file(file)] = 6
    assert "has 6 bytes, not 7" in missing_from(manifest, folders)
    folders[owner][owner.file(file)] = 7
    assert missing_from(manifest, folders) == ""
    del folders[owner]
    assert "is missing" in missing_from(manifest, folders)


def test_grouping_by_folder() -> None:
    """Objects are grouped under their checkpoint; deeper ones count, others do not."""
    name = CheckpointName(1, 2, 3, NONCE)
    entries = [
        Entry(name.manifest, 5),
        Entry(f"{name.folder}/extra/file", 7),
        Entry("attempts/000001.json", 9),
        Entry("checkpoints/readme", 1),
        Entry(CheckpointName(2, 1, 1, NONCE).folder, 9),
    ]
    assert by_folder(entries) == {name: {name.manifest: 5, f"{name.folder}/extra/file": 7}}
