"""What a start does with checkpoints that are damaged, or of another version: back to the older one, or not at all.

In every case nothing that lies on storage is deleted or overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import spotsafe
from spotsafe import events as ev
from spotsafe.checkpoint import index, sealed
from spotsafe.checkpoint.layout import CheckpointName, attempt_record, data_file, index_file
from spotsafe.testing.faults import TearingStore
from spotsafe.testing.memory import MemoryStore
from tests.session.places import (
    attempts,
    candidate,
    published,
    run_of_two,
    start_fails,
    steps_there,
    train,
    trained,
)
from tests.session.rig import Program

Damage = Callable[[MemoryStore, CheckpointName, CheckpointName], None]


def members(store: MemoryStore, path: str) -> dict[str, Any]:
    """What a sealed file says."""
    found: dict[str, Any] = json.loads(store.objects[path])
    del found["sha256"]
    return found


def reseal(store: MemoryStore, path: str, **changed: Any) -> None:
    """Change members of a sealed file, so that its own digest is right."""
    store.objects[path] = sealed.seal({**members(store, path), **changed})


def cut(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.manifest] = store.objects[newer.manifest][:-40]


def empty(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.manifest] = b""


def no_json(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.manifest] = b"\x89PNG this is no manifest"


def other_json(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.manifest] = b"[1, 2, 3]"


def wrong_type(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    reseal(store, newer.manifest, world_size="one")


def of_another(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.manifest] = store.objects[older.manifest]


def too_large(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.manifest] += b" " * (1 << 20)


def flipped_manifest(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    flip(store, newer.manifest)


def shortened(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    path = newer.file(data_file(0, 0))
    store.objects[path] = store.objects[path][:-1]


def emptied(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.file(data_file(0, 0))] = b""


def lengthened(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.file(data_file(0, 0))] += b"\0"


def flipped(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    flip(store, newer.file(data_file(0, 0)))


def swapped(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.file(data_file(0, 0))] = store.objects[older.file(data_file(0, 0))]


def missing(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    del store.objects[newer.file(data_file(0, 0))]


def index_flipped(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    flip(store, newer.file(index_file(0)))


def index_missing(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    del store.objects[newer.file(index_file(0))]


def index_shortened(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    path = newer.file(index_file(0))
    store.objects[path] = store.objects[path][:-1]


def index_lengthened(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.file(index_file(0))] += b" "


def index_of_another(store: MemoryStore, newer: CheckpointName, older: CheckpointName) -> None:
    store.objects[newer.file(index_file(0))] = store.objects[older.file(index_file(0))]


def flip(store: MemoryStore, path: str) -> None:
    data = bytearray(store.objects[path])
    data[len(data) // 2] ^= 1
    store.objects[path] = bytes(data)


MANIFEST = [cut, empty, no_json, other_json, wrong_type, of_another, too_large, flipped_manifest]
DATA = [shortened, emptied, lengthened, flipped, swapped, missing]
INDEX = [index_flipped, index_missing, index_shortened, index_lengthened, index_of_another]
ALL = [*MANIFEST, *DATA, *INDEX]


@pytest.mark.parametrize("damage", ALL)
def test_the_older_checkpoint_is_taken_loudly(damage: Damage, capfd: pytest.CaptureFixture[str]) -> None:
    """One event and one line name the damaged one; the run ends as if it had never been; it stays as it is."""
    whole = trained(MemoryStore(), until=6)
    store, older, newer = run_of_two()
    damage(store, newer, older)
    before = dict(store.objects)
    capfd.readouterr()

    program = Program()
    with program.session(store, save_every=2, keep=10) as run:
        assert run.resumed_from == str(older)
        assert run.step == 2
        train(program, run)

    passed = program.of(ev.CheckpointPassedOver)
    assert [event.checkpoint for event in passed] == [str(newer)]
    assert passed[0].reason
    assert capfd.readouterr().err.count(f"not resuming from {newer}") == 1
    assert program.weights() == whole.weights()
    assert program.seen == whole.seen[2:]
    assert {path: store.objects.get(path) for path in before if "ledger" not in path} == {
        path: data for path, data in before.items() if "ledger" not in path
    }


@pytest.mark.parametrize("damage", ALL)
def test_if_it_is_the_only_one_nothing_starts(damage: Damage) -> None:
    """An error that names the checkpoint and the reason; no fresh start, nothing changed but for the claim."""
    store, older, newer = run_of_two()
    damage(store, newer, older)
    for path in [path for path in store.objects if path.startswith(older.folder)]:
        del store.objects[path]
    before = {path: data for path, data in store.objects.items() if path.startswith("checkpoints/")}

    program = Program()
    weights = program.weights()
    with pytest.raises(spotsafe.NoUsableCheckpoint, match=str(newer)) as caught, program.session(store):
        pytest.fail("it started")
    assert list(caught.value.reasons) == [str(newer)]
    assert caught.value.reasons[str(newer)]
    assert program.weights() == weights
    assert {path: data for path, data in store.objects.items() if path.startswith("checkpoints/")} == before


def test_both_damaged_names_both() -> None:
    """Each with its own reason."""
    store, older, newer = run_of_two()
    flipped(store, newer, older)
    shortened(store, older, newer)
    with pytest.raises(spotsafe.NoUsableCheckpoint) as caught, Program().session(store):
        pytest.fail("it started")
    assert set(caught.value.reasons) == {str(older), str(newer)}


def test_however_many_are_damaged_an_older_one_is_taken() -> None:
    """A bad disk, or a rule that deletes large objects, spoils many at once; none of them has vanished."""
    store = MemoryStore()
    trained(store, until=13, save_every=1, keep=20)
    newest_first = published(store)
    for name in newest_first[:12]:
        missing(store, name, name)
    program = Program()
    with program.session(store) as run:
        assert run.step == newest_first[12].step
    assert len({one.checkpoint for one in program.of(ev.CheckpointPassedOver)}) == 12


def test_retention_leaves_what_was_passed_over() -> None:
    """Evidence of damage is for a person to look at, whatever keep= says."""
    store, older, newer = run_of_two()
    flipped(store, newer, older)
    program = trained(store, until=12, save_every=1, keep=1)
    assert newer in published(store)
    assert older not in published(store)
    assert len(program.of(ev.CheckpointRetired)) > 1
    assert steps_there(store)[:2] == [12, 11]


def test_a_manifest_that_cannot_be_read_is_left_alone_and_told_of_once() -> None:
    """It is neither counted nor deleted, and blocks no retention; the warning does not come with every save."""
    store, older, newer = run_of_two()
    empty(store, newer, older)
    program = trained(store, until=8, save_every=1, keep=1)
    assert steps_there(store) == [8, 7]
    assert newer.manifest in store.objects
    warnings = [event.message for event in program.of(ev.Warned) if str(newer) in event.message]
    assert len(warnings) == 1
    assert "neither counted nor deleted" in warnings[0]


def test_one_wrong_read_is_no_damage() -> None:
    """A bad cable: the second read is right, so the newest is used and nothing is passed over."""
    store, _, newer = run_of_two()
    program = Program()
    with program.session(TearingStore(store, reads=1, matches=lambda path: "data-" in path)) as run:
        assert run.resumed_from == str(newer)
    assert program.of(ev.CheckpointPassedOver) == []


def test_an_unpublished_checkpoint_is_none() -> None:
    """Without its manifest it does not exist: no word about it, and the sweep takes its remains away."""
    store, _, newer = run_of_two()
    del store.objects[newer.manifest]
    program = trained(store, until=6)
    assert program.of(ev.CheckpointPassedOver) == []
    assert program.seen[0][0] == 2
    assert [path for path in store.objects if path.startswith(newer.folder)] == [newer.manifest]
    assert candidate(store, newer).marker is not None


# -- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"format": 2}, "format 2"),
        ({"requires": ["compression"]}, "compression"),
        ({"state": "frozen"}, "frozen"),
    ],
)
def test_a_manifest_of_another_version_stops_the_start(changed: dict[str, Any], found: str) -> None:
    """It may hold more than the older one: no walk-back, no claim, nothing deleted; upgrading is the way on."""
    store, _, newer = run_of_two()
    reseal(store, newer.manifest, **changed)
    error = start_fails(store, spotsafe.UnsupportedFormat)
    assert found in str(error)
    assert newer.manifest in str(error)
    assert "upgrade" in str(error)
    assert error.checkpoint == str(newer)


def test_an_index_of_another_version_stops_the_start() -> None:
    """The same for the file behind the manifest."""
    store, _, newer = run_of_two()
    path = newer.file(index_file(0))
    index = json.loads(store.objects[path])
    index["format"] = 2
    data = json.dumps(index).encode()
    store.objects[path] = data
    [part] = members(store, newer.manifest)["parts"]
    from spotsafe.checkpoint.digest import sha256_hex

    reseal(store, newer.manifest, parts=[{**part, "size": len(data), "sha256": sha256_hex(data)}])
    assert "format 2" in str(start_fails(store, spotsafe.UnsupportedFormat))


def test_an_older_manifest_of_another_version_stops_deleting_only() -> None:
    """The newest is good and goes on; as long as one is not understood, nothing is deleted."""
    store, older, _ = run_of_two()
    reseal(store, older.manifest, format=2)
    program = trained(store, until=8, save_every=1, keep=1)
    assert program.seen[0][0] == 4
    assert [name.step for name in published(store)] == [8, 7, 6, 5, 4]
    assert older.manifest in store.objects
    assert any("nothing is deleted" in event.message for event in program.of(ev.Warned))


@pytest.mark.parametrize("changed", [{"format": 2}, {"requires": ["branches"]}])
def test_an_attempt_of_another_version_stops_the_start(changed: dict[str, Any]) -> None:
    """A newer spotsafe has run here: its record may say what this one must know."""
    store, _, _ = run_of_two()
    reseal(store, attempt_record(1), **changed)
    error = start_fails(store, spotsafe.UnsupportedFormat)
    assert attempt_record(1) in str(error)


def test_a_damaged_record_of_an_attempt_does_not_keep_a_good_checkpoint_from_being_used() -> None:
    """The record is evidence; the checkpoint says itself which run it belongs to."""
    store, _, newer = run_of_two()
    run_id = members(store, newer.manifest)["run"]
    flip(store, attempt_record(1))
    program = Program()
    with program.session(store, keep=10) as run:
        assert run.resumed_from == str(newer)
        assert run.id == run_id
        assert run.attempt == 2
    assert any(attempt_record(1).partition("/")[2] in event.message for event in program.of(ev.Warned))


# -- history --------------------------------------------------------------------------------------------------------


def test_a_published_run_without_checkpoints_is_no_fresh_start() -> None:
    """Somebody deleted the folder, or a mount is missing: the record of the first publish outlives it."""
    store, _, _ = run_of_two()
    for path in [path for path in store.objects if path.startswith("checkpoints/")]:
        del store.objects[path]
    error = start_fails(store, spotsafe.NoUsableCheckpoint)
    assert "attempt 1 has published" in str(error)
    assert "another folder" in str(error)


def test_a_run_that_saw_a_checkpoint_is_no_fresh_start() -> None:
    """Even without the mark: the next attempt's record says what it saw."""
    store, _, newer = run_of_two()
    trained(store, until=5, save_every=None)
    for path in [
        path for path in store.objects if path.startswith("checkpoints/") or path.endswith(".published")
    ]:
        del store.objects[path]
    error = start_fails(store, spotsafe.NoUsableCheckpoint)
    assert f"attempt 2 saw {newer}" in str(error)


def test_a_damaged_record_and_no_checkpoint_is_no_fresh_start() -> None:
    """The record might say that there was one: nobody knows, so a person has to look."""
    store = MemoryStore()
    with Program().session(store):
        pass
    flip(store, attempt_record(1))
    assert attempt_record(1) in str(start_fails(store, spotsafe.DamagedCheckpoint))


def test_an_attempt_that_saved_nothing_is_a_fresh_start() -> None:
    """A run that died before its first checkpoint begins again, under the same id."""
    store = MemoryStore()
    with Program().session(store) as run:
        first = run.id
    again = Program()
    with again.session(store) as run:
        assert (run.id, run.attempt, run.resumed_from, run.step) == (first, 2, None, 0)
    assert attempts(store) == (1, 2)


def test_a_folder_of_which_only_the_checkpoints_were_copied_goes_on() -> None:
    """One format on every backend, without paths inside: a copy is as good as the original, ids included."""
    store, _, newer = run_of_two()
    copy = MemoryStore("memory://copy")
    copy.objects.update(
        {path: data for path, data in store.objects.items() if path.startswith("checkpoints/")}
    )
    with Program().session(copy, keep=10) as run:
        assert run.resumed_from == str(newer)
        assert run.attempt == 2
        assert run.id == members(store, newer.manifest)["run"]


def test_names_that_are_not_ours_are_left_alone() -> None:
    """Notes and other tools' folders beside the checkpoints are neither candidates nor rubbish."""
    store, _, newer = run_of_two()
    strays = {
        "checkpoints/notes.txt": b"mine",
        "checkpoints/handpicked/manifest.json": b"{}",
        "checkpoints/a999999-s000000001-0001-xyz/manifest.json": b"{}",
        "attempts/99.json": b"{}",
        "attempts/readme": b"",
    }
    store.objects.update(strays)
    program = trained(store, until=8, save_every=1, keep=1)
    assert program.seen[0][0] == newer.step
    assert {path: store.objects.get(path) for path in strays} == strays


@pytest.mark.parametrize("damaged", [False, True])
def test_an_index_is_read_before_the_claim_and_after_it_and_decoded_once(
    monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """If it is damaged in between, that is seen, and walked back from."""
    store, older, newer = run_of_two()
    decoded: list[str] = []

    def decode(data: bytes, *, checkpoint: str, **options: Any) -> index.Index:
        decoded.append(checkpoint)
        if damaged and len(decoded) == 1:
            store.objects[newer.file(index_file(0))] += b" "
        return whole(data, checkpoint=checkpoint, **options)

    whole = index.decode_index
    monkeypatch.setattr(index, "decode_index", decode)
    trained(store, 6)
    assert decoded == ([str(newer), str(older)] if damaged else [str(newer)])
