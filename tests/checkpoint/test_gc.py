"""Deleting: withdrawn before its files are touched, nothing that is needed, and never a failed save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from spotsafe.checkpoint import gc, sealed
from spotsafe.checkpoint.candidates import Candidate, candidates, look, read_candidate
from spotsafe.checkpoint.layout import CheckpointName, data_file
from spotsafe.checkpoint.manifest import MAX_BYTES, Marker, encode_marker
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import StorageError, StorageRefused, StorageUnavailable
from spotsafe.events import CheckpointRetired, DeleteRefused, Warned
from spotsafe.policy.retention import latest
from spotsafe.storage.local import LocalStore
from spotsafe.storage.store import Store
from spotsafe.testing.faults import CountingStore, FailingStore, TearingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt
from spotsafe.testing.sinks import RecordingSink

ALL = latest(1000)
TWO = gc.Retention(keep=latest(2), resumed_from=None)
NAN = {"w": np.array([np.nan], dtype=np.float32)}


def published(*steps_of_attempts: list[int]) -> tuple[MemoryStore, list[CheckpointName]]:
    """A run in which each attempt published some steps, all still there."""
    store = MemoryStore()
    names = []
    for steps in steps_of_attempts:
        attempt = Attempt(store, keep=ALL)
        names += [attempt.save(step).name for step in steps]
    return store, names


def there(store: Store) -> list[CheckpointName]:
    """What is published, oldest first."""
    return [one.name for one in candidates(store, look(store))][::-1]


def paths(store: MemoryStore, name: CheckpointName) -> list[str]:
    """Base names of what lies in a checkpoint's folder."""
    return [entry.path.rpartition("/")[2] for entry in store.list(name.folder)]


# Retention


def test_all_manifests_first_then_files() -> None:
    """No file of any victim is touched before every victim is withdrawn and each withdrawal was read back."""
    store, names = published([1, 2, 3], [4, 5])
    counting = CountingStore(store)
    gone = gc.apply_retention(counting, attempt=2, retention=TWO, on_event=RecordingSink().emit)
    assert gone == names[:3]
    touched = [
        (operation.name, operation.path)
        for operation in counting.operations
        if operation.name in {"delete", "replace", "read"}
    ][len(names) :]
    for name in names[:3]:
        assert touched.index(("replace", name.manifest)) < touched.index(("read", name.manifest))
    first_file = next(at for at, (verb, _) in enumerate(touched) if verb == "delete")
    assert all(verb != "replace" for verb, _ in touched[first_file:])
    assert there(store) == names[3:]


def test_own_manifest_is_deleted_that_of_another_overwritten() -> None:
    """Nobody else can create our own manifest; another writer may live and must not find the name free."""
    store, names = published([1], [2, 3, 4])
    gc.apply_retention(store, attempt=2, retention=TWO, on_event=RecordingSink().emit)
    assert paths(store, names[0]) == ["manifest.json"]
    assert read_candidate(store, names[0]).marker == Marker(state="retired")
    assert paths(store, names[1]) == []
    assert there(store) == names[2:]


def test_what_is_retired_is_told() -> None:
    """One event for each withdrawn checkpoint, and no other."""
    store, names = published([1, 2, 3, 4])
    sink = RecordingSink()
    gc.apply_retention(store, attempt=1, retention=TWO, on_event=sink.emit)
    assert sink.events == [CheckpointRetired(checkpoint=str(name)) for name in names[:2]]


def test_resumed_from_stays_until_two_newer_are_healthy() -> None:
    """The way back is kept while the attempt has not yet shown that it can go on."""
    store, names = published([1, 2], [3])
    origin = str(names[1])
    retention = gc.Retention(keep=latest(1), resumed_from=origin)
    gc.apply_retention(store, attempt=2, retention=retention, on_event=RecordingSink().emit)
    assert there(store) == names[1:]
    second = Attempt(store, keep=ALL)
    newer = second.save(4, arrays=NAN, files=1).name
    gc.apply_retention(store, attempt=3, retention=retention, on_event=RecordingSink().emit)
    assert names[1] in there(store)
    assert newer in there(store)
    third = second.save(5).name
    gc.apply_retention(store, attempt=3, retention=retention, on_event=RecordingSink().emit)
    assert there(store) == [names[2], third]


def test_newest_healthy_stays_behind_unhealthy_ones() -> None:
    """However many unhealthy checkpoints follow, the healthy ones are still there."""
    store = MemoryStore()
    attempt = Attempt(store, keep=latest(1))
    healthy = [attempt.save(step).name for step in (1, 2, 3)]
    for step in range(4, 10):
        assert not attempt.save(step, arrays=NAN, files=1).healthy
    assert there(store)[:2] == healthy[1:]
    assert there(store)[-1].step == 9


def test_passed_over_is_not_touched() -> None:
    """What the resume left aside is kept for a person to look at."""
    store, names = published([1, 2, 3], [4, 5, 6])
    retention = gc.Retention(keep=latest(2), resumed_from=None, passed_over=frozenset({str(names[2])}))
    gc.apply_retention(store, attempt=2, retention=retention, on_event=RecordingSink().emit)
    assert there(store) == [names[2], *names[4:]]


def test_torn_checkpoint_is_neither_counted_nor_touched() -> None:
    """A checkpoint that lacks a file does not count as one of the two, and is left as it is."""
    store, names = published([1, 2, 3, 4])
    store.delete(names[3].file(data_file(0, 1)))
    before = paths(store, names[3])
    gc.apply_retention(store, attempt=1, retention=TWO, on_event=RecordingSink().emit)
    assert there(store) == names[1:]
    assert paths(store, names[3]) == before


def newer_format(data: bytes) -> bytes:
    return sealed.seal({**sealed.unseal(data, max_bytes=MAX_BYTES), "format": 2})


def requiring_more(data: bytes) -> bytes:
    return sealed.seal({**sealed.unseal(data, max_bytes=MAX_BYTES), "requires": ["references", "tiles"]})


@pytest.mark.parametrize("change", [newer_format, requiring_more])
def test_nothing_is_deleted_beside_what_is_of_a_newer_version(change: Callable[[bytes], bytes]) -> None:
    """What it refers to is unknown, so one such manifest among many stops all deletion, and it is said which."""
    store, names = published([1, 2, 3, 4])
    store.objects[names[0].manifest] = change(store.objects[names[0].manifest])
    before = dict(store.objects)
    sink = RecordingSink()
    assert gc.apply_retention(store, attempt=1, retention=TWO, on_event=sink.emit) == []
    assert store.objects == before
    [warning] = sink.of(Warned)
    assert str(names[0]) in warning.message


@pytest.mark.parametrize("damaged", [0, 3])
@pytest.mark.parametrize(
    "change", [lambda data: b"", lambda data: data[:-9], lambda data: data + b" " * MAX_BYTES]
)
def test_a_damaged_manifest_blocks_nothing(damaged: int, change: Callable[[bytes], bytes]) -> None:
    """It is neither counted nor touched, whether it is the oldest or the newest; the others are kept as ever."""
    store, names = published([1, 2, 3, 4])
    store.objects[names[damaged].manifest] = change(store.objects[names[damaged].manifest])
    left = [name for name in names if name != names[damaged]]
    before = {path: data for path, data in store.objects.items() if path.startswith(names[damaged].folder)}
    sink = RecordingSink()
    assert gc.apply_retention(store, attempt=1, retention=TWO, on_event=sink.emit) == left[:1]
    assert before.items() <= store.objects.items()
    assert [name for name in left[1:] if verify(store, name) == []] == left[1:]
    [warning] = sink.of(Warned)
    assert str(names[damaged]) in warning.message


def test_damage_is_believed_after_a_second_read() -> None:
    """One wrong answer does not take a checkpoint out of the count."""
    store, names = published([1, 2, 3])
    tearing = TearingStore(store, reads=1)
    assert gc.apply_retention(tearing, attempt=1, retention=TWO, on_event=RecordingSink().emit) == names[:1]


def test_nothing_is_deleted_when_a_newer_attempt_shows() -> None:
    """A checkpoint of a higher attempt is proof of being superseded."""
    store, names = published([1, 2, 3], [4])
    before = dict(store.objects)
    sink = RecordingSink()
    assert gc.apply_retention(store, attempt=1, retention=TWO, on_event=sink.emit) == []
    assert store.objects == before
    assert str(names[3]) in sink.of(Warned)[0].message


@pytest.mark.parametrize("operation", ["list", "read"])
def test_nothing_is_deleted_without_an_answer(operation: str) -> None:
    """If the store cannot say what is there, the error is raised and nothing is gone."""
    store, _ = published([1, 2, 3, 4])
    before = dict(store.objects)
    failing = FailingStore(
        store, fail=lambda name, path, number: StorageUnavailable("down") if name == operation else None
    )
    with pytest.raises(StorageUnavailable):
        gc.apply_retention(failing, attempt=1, retention=TWO, on_event=RecordingSink().emit)
    assert store.objects == before


def test_known_manifests_are_read_once() -> None:
    """Over many saves each manifest is read once; a repaired one is read again."""
    store, names = published([1, 2])
    counting = CountingStore(store)
    known: dict[CheckpointName, Candidate] = {}
    sink = RecordingSink()

    def apply() -> None:
        gc.apply_retention(counting, attempt=1, retention=TWO, on_event=sink.emit, known=known)

    apply()
    apply()
    assert counting.count("read") == 2
    good = store.objects[names[0].manifest]
    store.objects[names[0].manifest] = b""
    known.clear()
    apply()
    assert known.keys() == {names[1]}
    store.objects[names[0].manifest] = good
    apply()
    assert len(sink.of(Warned)) == 1
    assert known.keys() == set(names)


def test_a_withdrawn_checkpoint_is_forgotten() -> None:
    """What this attempt withdraws is no longer taken for known."""
    store, names = published([1, 2, 3])
    known: dict[CheckpointName, Candidate] = {}
    gc.apply_retention(store, attempt=1, retention=TWO, on_event=RecordingSink().emit, known=known)
    assert known.keys() == set(names[1:])


# Refusals


def test_refused_file_is_a_warning() -> None:
    """A store that lets nothing be deleted keeps its files; each refusal is an event, none an error."""
    store, names = published([1, 2, 3, 4])
    sink = RecordingSink()
    locked = FailingStore(
        store,
        fail=lambda name, path, number: (
            StorageRefused("locked") if name == "delete" and path.endswith(".safetensors") else None
        ),
    )
    assert gc.apply_retention(locked, attempt=1, retention=TWO, on_event=sink.emit) == names[:2]
    assert len(sink.of(DeleteRefused)) == 4
    assert there(store) == names[2:]
    assert "index-00000.json" not in paths(store, names[0])


@pytest.mark.parametrize("attempt", [1, 2])
def test_refused_withdrawal_keeps_the_files(attempt: int) -> None:
    """While a manifest cannot be withdrawn, its checkpoint stays whole."""
    store, names = published([1, 2, 3, 4])
    sink = RecordingSink()
    locked = FailingStore(
        store,
        fail=lambda name, path, number: (
            StorageRefused("locked") if name in {"delete", "replace"} and path == names[0].manifest else None
        ),
    )
    assert gc.apply_retention(locked, attempt=attempt, retention=TWO, on_event=sink.emit) == [names[1]]
    assert [event.path for event in sink.of(DeleteRefused)] == [names[0].manifest]
    assert verify(store, names[0]) == []


@pytest.mark.parametrize("attempt", [1, 2])
def test_withdrawal_that_did_not_happen_is_noticed(attempt: int) -> None:
    """A store that says yes and does nothing loses no file: the withdrawal is read back."""

    class Lazy(MemoryStore):
        """Neither deletes nor replaces manifests."""

        def delete(self, path: str) -> None:
            if not path.endswith("manifest.json"):
                super().delete(path)

        def replace(self, path: str, data: bytes) -> None:
            pass

    store, names = published([1, 2, 3])
    lazy = Lazy()
    lazy.objects.update(store.objects)
    sink = RecordingSink()
    assert gc.apply_retention(lazy, attempt=attempt, retention=TWO, on_event=sink.emit) == []
    assert sink.of(DeleteRefused)
    assert verify(lazy, names[0]) == []


def test_store_that_stops_answering_ends_the_deletion() -> None:
    """An outage is raised at once instead of being asked about for every file."""
    store, names = published([1, 2, 3, 4])
    failing = FailingStore(
        store,
        fail=lambda name, path, number: (
            StorageUnavailable("down") if name == "delete" and path.endswith(".safetensors") else None
        ),
    )
    with pytest.raises(StorageUnavailable):
        gc.apply_retention(failing, attempt=1, retention=TWO, on_event=RecordingSink().emit)
    assert there(store) == names[2:]


# Sweep


def begun(store: Store, name: CheckpointName) -> None:
    """Leave the files of a save without a manifest."""
    store.put(name.file(data_file(0, 0)), b"half a save")


def test_sweep_decides_the_name_before_it_deletes() -> None:
    """An older attempt's unpublished folder gets its marker first; only then are its files deleted."""
    store, _ = published([1], [2])
    name = CheckpointName(1, 9, 9, "00000000")
    begun(store, name)
    counting = CountingStore(store)
    assert gc.sweep(counting, attempt=2, on_event=RecordingSink().emit) == [name]
    verbs = [operation.name for operation in counting.operations if operation.path.startswith(name.folder)]
    assert verbs[:2] == ["read", "create"]
    assert verbs.index("abort_uploads") > 0
    assert paths(store, name) == ["manifest.json"]
    assert read_candidate(store, name).marker == Marker(state="abandoned")


def test_sweep_leaves_the_published_alone() -> None:
    """Nothing of a published checkpoint is touched, nor of this attempt or a newer one."""
    store, _ = published([1, 2], [3])
    own, newer = CheckpointName(2, 9, 9, "00000000"), CheckpointName(3, 1, 1, "00000000")
    begun(store, own)
    begun(store, newer)
    before = dict(store.objects)
    assert gc.sweep(store, attempt=2, on_event=RecordingSink().emit) == []
    assert store.objects == before


def test_sweep_that_loses_leaves_the_checkpoint() -> None:
    """If the writer publishes between the listing and the marker, the checkpoint stays, whole."""
    store, names = published([1, 2], [3])
    manifest = store.objects.pop(names[1].manifest)

    def publish_now(name: str, path: str, number: int) -> None:
        if name == "create":
            store.objects[names[1].manifest] = manifest

    racing = FailingStore(store, fail=publish_now)
    assert gc.sweep(racing, attempt=2, on_event=RecordingSink().emit) == []
    assert verify(store, names[1]) == []


def test_sweep_finishes_what_a_retention_began() -> None:
    """Files that a crash left beside a marker are deleted; manifests say what is in use, whatever the marker says."""
    store, names = published([1, 2], [3])
    store.objects[names[0].manifest] = encode_marker(Marker(state="retired", in_use=(data_file(0, 1),)))
    assert gc.sweep(store, attempt=2, on_event=RecordingSink().emit) == [names[0]]
    assert paths(store, names[0]) == ["manifest.json"]
    assert read_candidate(store, names[0]).marker == Marker(state="retired")


def test_files_that_are_not_ours_are_left_and_told() -> None:
    """Somebody's notes in a checkpoint's folder outlive it, also where they look like a folder of ours."""
    store, names = published([1, 2], [3])
    notes = [
        f"{names[0].folder}/{file}" for file in ("notes.txt", "data-00000-000.safetensors/x", "index-0.json")
    ]
    for path in notes:
        store.objects[path] = b"mine"
    store.objects[names[0].manifest] = encode_marker(Marker(state="retired"))
    sink = RecordingSink()
    assert gc.sweep(store, attempt=2, on_event=sink.emit) == [names[0]]
    assert sorted(entry.path for entry in store.list(names[0].folder)) == sorted([*notes, names[0].manifest])
    [warning] = sink.of(Warned)
    assert "not a file of a checkpoint" in warning.message


@pytest.mark.parametrize("kind", [MemoryStore, LocalStore])
def test_what_lies_in_the_place_of_a_folder_or_manifest_is_left_and_told(kind: type, tmp_path: Path) -> None:
    """A file with a checkpoint's name, or a folder called manifest.json: said once, and cleaning goes on."""
    store = MemoryStore() if kind is MemoryStore else LocalStore(tmp_path / "run")
    first = Attempt(store, keep=ALL)
    first.save(1)
    file, folder, half = (CheckpointName(1, 9, save, "00000000") for save in (7, 8, 9))
    store.put(file.folder, b"a file")
    store.put(f"{folder.manifest}/inside", b"?")
    begun(store, folder)
    begun(store, half)
    sink = RecordingSink()
    second = Attempt(store, keep=latest(2), emit=sink.emit)
    assert second.record.attempt == 2
    results = [second.save(step) for step in (11, 12, 13)]
    assert all(result.published and result.error is None for result in results)
    assert store.read(file.folder, max_bytes=9) == b"a file"
    assert store.read(f"{folder.manifest}/inside", max_bytes=9) == b"?"
    assert store.read(folder.file(data_file(0, 0)), max_bytes=99) == b"half a save"
    assert [entry.path for entry in store.list(half.folder)] == [half.manifest]
    told = [event.message for event in sink.of(Warned)]
    assert [message.split(" is ")[0] for message in told] == [file.folder, folder.manifest]
    assert there(store)[-2:] == [result.name for result in results[1:]]


def test_sweep_leaves_what_it_cannot_read() -> None:
    """A damaged or newer manifest of an older attempt is not garbage."""
    store, names = published([1, 2], [3])
    store.objects[names[0].manifest] = b""
    store.objects[names[1].manifest] = newer_format(store.objects[names[1].manifest])
    before = dict(store.objects)
    assert gc.sweep(store, attempt=2, on_event=RecordingSink().emit) == []
    assert store.objects == before


def test_sweep_removes_half_a_heartbeat_of_older_attempts_only(tmp_path: Path) -> None:
    """A heartbeat that was killed inside its write is garbage; that of this attempt is being written now."""
    store = LocalStore(tmp_path)
    for number in (1, 2, 3):
        store.put(f"ledger/{number:06d}/heartbeat.json", b"{}")
    halves = [tmp_path / f"ledger/{folder}/.tmp-00" for folder in ("000001", "000002", "000003", "notes")]
    halves[-1].parent.mkdir()
    for half in halves:
        half.write_bytes(b"{")

    gc.sweep(store, attempt=3, on_event=RecordingSink().emit)

    assert [half.exists() for half in halves] == [False, False, True, True]
    assert len(store.list("ledger")) == 3


def test_sweep_and_retention_read_each_manifest_once() -> None:
    """What the sweep has read the retention behind it knows, markers too."""
    store, names = published([1, 2, 3], [4, 5])
    gc.apply_retention(store, attempt=2, retention=TWO, on_event=RecordingSink().emit)
    counting = CountingStore(store)
    known: dict[CheckpointName, Candidate] = {}
    gc.sweep(counting, attempt=2, on_event=RecordingSink().emit, known=known)
    gc.apply_retention(counting, attempt=2, retention=TWO, on_event=RecordingSink().emit, known=known)
    operations = [operation.name for operation in counting.operations]
    assert operations == ["list", *["read"] * len(names), "begun", "begun", "list"]


def test_sweep_removes_a_first_file_that_was_never_finished(tmp_path: Path) -> None:
    """A save killed inside its first file left nothing that a listing shows, but perhaps many gigabytes."""
    store = LocalStore(str(tmp_path))
    Attempt(store).save(1)
    folders = [CheckpointName(attempt, 9, 9, "00000000").folder for attempt in (1, 2)]
    for folder in folders:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / ".tmp-0123456789abcdef").write_bytes(b"begun")
    assert gc.sweep(store, attempt=2, on_event=RecordingSink().emit) == []
    assert not (tmp_path / folders[0]).exists()
    assert (tmp_path / folders[1]).exists(), "this attempt's own are left alone"


@pytest.mark.parametrize(
    ("error", "raised"), [(StorageRefused("no"), False), (StorageUnavailable("no"), True)]
)
def test_sweep_goes_on_where_an_unfinished_file_is_not_given_up(error: StorageError, raised: bool) -> None:
    """It is reported; only a store that does not answer ends the sweep."""

    class Hiding(FailingStore):
        def begun(self, folder: str) -> list[str]:
            return [
                f"{CheckpointName(1, 9, 9, '00000000').folder}/data-00000-000.safetensors",
                f"{folder}/other",
            ]

    store, _ = published([1], [2])
    sink = RecordingSink()
    hiding = Hiding(store, fail=lambda name, path, number: error if name == "abort_uploads" else None)
    with pytest.raises(StorageUnavailable) if raised else nullcontext():
        gc.sweep(hiding, attempt=2, on_event=sink.emit)
    assert len(sink.of(DeleteRefused)) == (not raised)


@pytest.mark.parametrize("error", [StorageRefused("no"), StorageError("odd")])
def test_sweep_reports_refusals(error: StorageError) -> None:
    """What cannot be deleted stays and is reported; the sweep goes on."""
    store, _ = published([1], [2])
    for save in (1, 2):
        begun(store, CheckpointName(1, 9, save, "00000000"))
    sink = RecordingSink()
    failing = FailingStore(store, fail=lambda name, path, number: error if name == "delete" else None)
    assert len(gc.sweep(failing, attempt=2, on_event=sink.emit)) == 2
    assert len(sink.of(DeleteRefused)) == 2


# Discard


def test_discard_before_the_manifest_was_tried() -> None:
    """The files of a save that failed early are simply deleted."""
    store, names = published([1])
    name = CheckpointName(1, 2, 2, names[0].nonce)
    begun(store, name)
    assert gc.discard(store, name, manifest_tried=False, on_event=RecordingSink().emit)
    assert paths(store, name) == []


def test_discard_after_the_manifest_was_tried_decides_first() -> None:
    """A manifest that may still arrive finds its name taken; one that has arrived wins."""
    store, names = published([1])
    name = CheckpointName(1, 2, 2, names[0].nonce)
    begun(store, name)
    assert gc.discard(store, name, manifest_tried=True, on_event=RecordingSink().emit)
    assert read_candidate(store, name).marker == Marker(state="abandoned")
    assert not gc.discard(store, names[0], manifest_tried=True, on_event=RecordingSink().emit)
    assert verify(store, names[0]) == []
