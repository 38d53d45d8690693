"""`spotsafe gc`: explains everything, deletes garbage only, and is safe beside a run that lives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result

from spotsafe.checkpoint import sealed
from spotsafe.checkpoint.candidates import candidates, look
from spotsafe.checkpoint.clearing import find_garbage, may_delete_by
from spotsafe.checkpoint.layout import CheckpointName, data_file, frozen_file, index_file
from spotsafe.checkpoint.manifest import MAX_BYTES
from spotsafe.checkpoint.pins import place_pin
from spotsafe.checkpoint.survey import highest_attempt, survey
from spotsafe.checkpoint.verify import verify
from spotsafe.cli.gc import _delete
from spotsafe.identity import Identity
from spotsafe.policy.retention import latest
from spotsafe.storage.local import LocalStore
from spotsafe.testing.faults import CountingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt

Call = Callable[..., Result]
LATER = 2e9
FROZEN = [{"base": np.ones((8, 8), dtype=np.float32)}]


class Run:
    """Two attempts on a local disk, with every kind of garbage of the first, and a third that has just claimed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(folder)
        first = Attempt(self.store, keep=latest(2))
        self.lender = first.save(1, frozen=FROZEN).name
        self.other = first.save(2, frozen=FROZEN).name
        self.half = CheckpointName(1, 9, 9, first.record.nonce)
        second = Attempt(self.store, keep=latest(1))
        self.kept = [second.save(step, frozen=FROZEN).name for step in (3, 4, 5)][1:]
        self.store.put(self.half.file(data_file(0, 0)), b"half a save")
        self.store.put(self.half.file(index_file(0)), b"{}")
        self.left = self.other.file(data_file(0, 1))
        self.store.put(self.left, b"left by a crash")
        third = Attempt(self.store)
        self.living = CheckpointName(3, 6, 1, third.record.nonce)
        self.store.put(self.living.file(data_file(0, 0)), b"being written")
        self.notes = f"{self.half.folder}/notes.txt"
        self.store.put(self.notes, b"mine")
        self.store.put("README", b"mine")

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file()
        }

    @property
    def garbage(self) -> set[str]:
        """The attempts of these tests started years ago, so that a marker alone in its folder is garbage too."""
        half = {self.half.file(data_file(0, 0)), self.half.file(index_file(0))}
        return {self.left, self.other.manifest, *half}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def answer(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_dry_run_changes_nothing_and_explains_everything(call: Call, run: Run) -> None:
    """Every file of the run is an item or lies in one that is kept as a whole; each has a reason."""
    before = run.files()
    result = call("gc", run.folder, "--json")
    assert result.exit_code == 0
    assert run.files() == before
    found = answer(result)
    assert {item["path"] for item in found["items"] if item["delete"]} == run.garbage
    assert found["garbage_bytes"] == sum(len(before[path]) for path in run.garbage)
    reasons = {item["path"]: item["reason"] for item in found["items"]}
    for path in before:
        assert path in reasons or path.rpartition("/")[0] in reasons, path
    assert reasons[run.notes] == reasons["README"] == "not ours"
    assert "never deleted" in reasons["attempts/000001.json"]
    assert "refer to it" in reasons[run.lender.file(frozen_file(0, 0))]
    assert "newest attempt" in reasons[run.living.folder]
    assert all("published" in reasons[name.folder] for name in run.kept)
    assert "never published" in reasons[run.half.file(data_file(0, 0))]
    assert "retired" in reasons[run.left]
    text = call("gc", run.folder)
    assert "--delete deletes it" in text.stdout
    assert "would delete" in text.stdout
    assert run.files() == before


def test_delete_deletes_exactly_that(call: Call, run: Run) -> None:
    """Garbage goes; published checkpoints, what they refer to, the living save and strange files stay, byte by byte."""
    before = run.files()
    result = call("gc", run.folder, "--delete", "--json")
    assert result.exit_code == 0, result.output
    assert {item["path"] for item in answer(result)["items"] if item["gone"]} == run.garbage
    after = run.files()
    assert before.keys() - after.keys() == run.garbage
    assert after.keys() - before.keys() == {run.half.manifest}, "the name is decided first"
    changed = {path for path in before.keys() & after.keys() if before[path] != after[path]}
    assert changed == set()
    for name in run.kept:
        assert verify(run.store, name) == []
    again = call("gc", run.folder, "--delete")
    assert again.exit_code == 0
    assert "no garbage" in again.stdout
    assert run.files() == after


def test_what_lives_goes_on_beside_it(call: Call, run: Run) -> None:
    """The newest attempt saves, refers and cleans up after gc as if nothing had been."""
    call("gc", run.folder, "--delete")
    attempt = Attempt(run.store, keep=latest(2))
    for step in (10, 11, 12):
        result = attempt.save(step, frozen=FROZEN)
        assert result.published
        assert result.error is None
        call("gc", run.folder, "--delete")
        for one in candidates(run.store, look(run.store)):
            assert verify(run.store, one.name) == []
    assert run.store.size(run.notes) == 4


def test_a_newer_version_keeps_everything(call: Call, run: Run) -> None:
    """What its manifest refers to is unknown."""
    path = run.folder / run.kept[0].manifest
    path.write_bytes(sealed.seal({**sealed.unseal(path.read_bytes(), max_bytes=MAX_BYTES), "format": 2}))
    before = run.files()
    result = call("gc", run.folder, "--delete", "--json")
    assert run.files() == before
    found = answer(result)
    assert "newer spotsafe" in found["obstacle"]
    assert not any(item["delete"] for item in found["items"])
    assert "upgrade" in call("gc", run.folder).stderr


def test_a_damaged_manifest_is_named_and_kept(call: Call, run: Run) -> None:
    """It blocks nothing."""
    (run.folder / run.kept[0].manifest).write_bytes(b"?")
    found = answer(call("gc", run.folder, "--delete", "--json"))
    [item] = [item for item in found["items"] if item["path"] == run.kept[0].folder]
    assert "cannot be read" in item["reason"]
    assert {item["path"] for item in found["items"] if item["gone"]} == run.garbage
    assert (run.folder / run.kept[0].file(index_file(0))).exists()


def test_a_run_copied_elsewhere_is_loadable_and_untouched(call: Call, run: Run, tmp_path: Path) -> None:
    """Byte by byte into memory and back onto a disk: references are names, so they hold there too."""
    memory = MemoryStore()
    for entry in run.store.list(""):
        memory.put(entry.path, run.store.read(entry.path, max_bytes=1 << 20))
    for name in run.kept:
        assert verify(memory, name) == []
    assert Attempt(memory).save(50, frozen=FROZEN).published
    copy = tmp_path / "copy"
    for name in [*run.kept, run.lender]:
        for entry in run.store.list(name.folder):
            path = copy / entry.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(run.store.read(entry.path, max_bytes=1 << 20))
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert call("gc", copy, "--delete").exit_code == 0
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before
    assert call("verify", copy).exit_code == 0


def test_a_pinned_checkpoint_is_left_alone(call: Call, run: Run) -> None:
    """Also what is left of it; and a dry run removes no pin, even one that is over."""
    pin = place_pin(
        run.store, run.kept[0], until=0.0, identity=Identity.of_this_process(environ={}, argv=["x"])
    )
    before = run.files()
    found = answer(call("gc", run.folder, "--json"))
    assert run.files() == before
    assert [item["reason"] for item in found["items"] if item["path"] == pin.path] == ["a reader's pin"]


def test_a_store_that_refuses_is_told(call: Call, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stays is said, with the store's words, and the exit code is 1."""
    real = LocalStore.delete

    def refuse(self: LocalStore, path: str) -> None:
        if path == run.left:
            from spotsafe.errors import StorageRefused

            raise StorageRefused("locked by its owner", path=path)
        real(self, path)

    monkeypatch.setattr(LocalStore, "delete", refuse)
    result = call("gc", run.folder, "--delete")
    assert result.exit_code == 1
    assert "locked by its owner" in result.stderr
    assert "not deleted" in result.stdout
    assert (run.folder / run.left).exists()


def test_a_store_that_may_not_refuse_late_writers() -> None:
    """Only attempts that recorded their end are cleaned there: their writers are gone (rule 12)."""
    store = MemoryStore()
    first = Attempt(store, keep=latest(2))
    first.save(1)
    half = CheckpointName(1, 9, 9, first.record.nonce)
    store.put(half.file(data_file(0, 0)), b"half a save")
    Attempt(store).save(2)
    before = dict(store.objects)
    found = survey(
        store, ended_at=lambda _: None, now=0.0, may_delete=may_delete_by(lambda _: None, exclusive=False)
    )
    assert store.objects == before
    [item] = [item for item in found.items if item.path == half.folder]
    assert not item.delete
    assert "recorded no end" in item.reason


class Silent(MemoryStore):
    """Does not say whether it refuses a second creation; it does."""

    exclusive = None


class Forgetful(Silent):
    """Takes every creation, as a server does that ignores conditions, and does not say so."""

    def create(self, path: str, data: bytes) -> bool:
        self.replace(path, data)
        return True


def test_whether_a_store_refuses_is_found_out(run: Run) -> None:
    """By a second pin under a name that is its own; it leaves no trace. If it is taken, nothing is deleted."""
    for kind, expected in ((Silent, True), (Forgetful, False)):
        store = kind()
        store.objects.update(run.files())
        found = survey(
            store,
            ended_at=lambda _: None,
            now=LATER,
            may_delete=may_delete_by(lambda _: None, exclusive=True),
        )
        assert {item.path for item in found.items if item.delete} == run.garbage
        assert _delete(store, found, now=LATER) == []
        assert (run.left in store.objects) is not expected
        assert not any(path.startswith("pins/") for path in store.objects)


def test_a_late_manifest_is_never_overwritten() -> None:
    """What a writer without a recorded end publishes while the store is being tried stays published (rule 12)."""

    class Landing(Forgetful):
        late: CheckpointName | None = None

        def read(self, path: str, *, max_bytes: int) -> bytes:
            try:
                return super().read(path, max_bytes=max_bytes)
            finally:
                if self.late is not None and path == self.late.manifest:
                    self.late = None
                    self.objects[path] = manifest  # right after a look that did not see it

    store = Landing()
    name = Attempt(store).save(1).name
    manifest = store.objects.pop(name.manifest)
    Attempt(store)
    found = find_garbage(store, ended_at=lambda _: None, now=LATER)
    assert any(item.delete for item in found.items)
    store.late = name
    _delete(store, found, now=LATER)
    store.objects[name.manifest] = store.objects.get(name.manifest, manifest)
    assert store.objects[name.manifest] == manifest
    assert verify(store, name) == []


def test_what_it_refuses(call: Call, run: Run, tmp_path: Path) -> None:
    """One checkpoint is not what it cleans, and a folder without a run is an error."""
    assert call("gc", f"{run.folder}@3").exit_code == 2
    assert call("gc", tmp_path / "nothing").exit_code == 1


def test_the_highest_attempt_is_asked_for_by_key(run: Run) -> None:
    """A listing may be old; a record that can be read is not."""

    class Old(CountingStore):
        def names(self, folder: str) -> list[str]:
            return [name for name in super().names(folder) if not name.startswith(("000003", "a000003"))]

    assert highest_attempt(Old(run.store)) == 3
