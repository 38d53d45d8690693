"""Choosing a checkpoint: history, selectors, and the list for people."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
import pytest

from spotsafe.checkpoint import sealed
from spotsafe.checkpoint.candidates import read_candidate
from spotsafe.checkpoint.catalog import (
    Listing,
    check_history,
    list_rows,
    look,
    resolve,
    split_target,
)
from spotsafe.checkpoint.layout import CheckpointName, attempt_record, data_file
from spotsafe.checkpoint.manifest import MAX_BYTES, Marker, encode_manifest, encode_marker
from spotsafe.errors import (
    CheckpointNotFound,
    DamagedCheckpoint,
    NoUsableCheckpoint,
    StorageUnavailable,
    UnsupportedFormat,
)
from spotsafe.policy.retention import latest
from spotsafe.testing.faults import CountingStore, FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt

ALL = latest(1000)


def unhealthy_array() -> dict[str, npt.NDArray[np.float32]]:
    return {"w": np.array([math.nan], dtype=np.float32)}


# Rule 3: a fresh start


def test_a_new_folder_may_start_afresh() -> None:
    """Where no manifest was ever seen a start is fresh, also after attempts that died before their first."""
    store = MemoryStore()
    check_history(store, listing=look(store))
    Attempt(store)
    Attempt(store)
    check_history(store, listing=look(store))


def test_unusable_checkpoints_are_no_reason_to_start_afresh() -> None:
    """Checkpoints that exist and cannot be used are an error that gives each one's reason."""
    store = MemoryStore()
    with pytest.raises(NoUsableCheckpoint, match="a: torn; b: gone") as caught:
        check_history(store, listing=look(store), reasons={"a": "torn", "b": "gone"})
    assert caught.value.reasons == {"a": "torn", "b": "gone"}
    assert caught.value.url == store.url


def test_vanished_checkpoints_are_noticed_by_the_mark() -> None:
    """If an attempt has published and nothing is there, somebody deleted it: that is no fresh start."""
    store = MemoryStore()
    attempt = Attempt(store)
    name = attempt.save(1).name
    for path in list(store.objects):
        if path.startswith(name.folder):
            del store.objects[path]
    with pytest.raises(NoUsableCheckpoint, match="attempt 1 has published"):
        check_history(store, listing=look(store))


def test_vanished_checkpoints_are_noticed_by_what_was_seen() -> None:
    """Without the mark, the record of a later attempt tells that there was a checkpoint."""
    store = MemoryStore()
    name = Attempt(store).save(1).name
    Attempt(store)
    for path in list(store.objects):
        if path.startswith(name.folder) or path.endswith(".published"):
            del store.objects[path]
    Attempt(store)  # this one saw none: an older witness is enough
    with pytest.raises(NoUsableCheckpoint, match=f"attempt 2 saw {name}"):
        check_history(store, listing=look(store))


def test_history_that_cannot_be_read_is_no_fresh_start() -> None:
    """Neither a storage error nor a damaged record lets a run begin anew."""
    store = MemoryStore()
    Attempt(store)
    listing = look(store)
    failing = FailingStore(store, fail=lambda name, path, number: StorageUnavailable("down"))
    with pytest.raises(StorageUnavailable):
        check_history(failing, listing=listing)
    store.objects[attempt_record(1)] = b""
    with pytest.raises(DamagedCheckpoint):
        check_history(store, listing=listing)


# Selectors


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/run", ("s3://b/run", None)),
        ("s3://b/run@4000", ("s3://b/run", 4000)),
        ("s3://b/run@0", ("s3://b/run", 0)),
        ("s3://b/run@latest", ("s3://b/run", "latest")),
        ("s3://b/run@best", ("s3://b/run", "best")),
        ("s3://b/run@best:val_loss", ("s3://b/run", "best:val_loss")),
        ("s3://b/run@best:acc:max", ("s3://b/run", "best:acc:max")),
        ("/data/run@best:val/loss:min", ("/data/run", "best:val/loss:min")),
        ("run@a000001-s000000300-0041-7f3a9c21", ("run", "a000001-s000000300-0041-7f3a9c21")),
        ("/home/me@work/run", ("/home/me@work/run", None)),
        ("/home/me@work/run@12", ("/home/me@work/run", 12)),
        ("/data/run@4000/", ("/data/run@4000/", None)),
        ("s3://user@host/run", ("s3://user@host/run", None)),
        ("run@", ("run@", None)),
        ("run@-1", ("run@-1", None)),
        ("run@1e3", ("run@1e3", None)),
        ("run@\u0661", ("run@\u0661", None)),
        ("run@Latest", ("run@Latest", None)),
        ("@latest", ("@latest", None)),
        ("", ("", None)),
    ],
)
def test_split_target(url: str, expected: tuple[str, str | int | None]) -> None:
    """Only a known selector after the last `@` is one; everything else is part of the url."""
    assert split_target(url) == expected


def three_steps() -> MemoryStore:
    """A run with steps 10 (best loss), 20 and 30 (best accuracy)."""
    store = MemoryStore()
    attempt = Attempt(store, keep=ALL)
    for step, loss, accuracy in ((10, 0.1, 0.5), (20, 0.3, 0.6), (30, 0.2, 0.9)):
        assert attempt.save(step, metrics={"loss": loss, "acc": accuracy}).published
    return store


@pytest.mark.parametrize(
    ("selector", "step"),
    [
        (None, 30),
        ("latest", 30),
        (20, 20),
        ("best:loss", 10),
        ("best:loss:max", 20),
        ("best:acc:max", 30),
        ("best:acc", 10),
    ],
)
def test_resolve(selector: str | int | None, step: int) -> None:
    """Each selector finds its checkpoint, with the manifest read."""
    found = resolve(three_steps(), selector)
    assert found.name.step == step
    assert found.manifest is not None


def test_resolve_by_full_name() -> None:
    """A checkpoint can be asked for by its own name."""
    store = three_steps()
    name = look(store).names[1]
    assert resolve(store, str(name)).name == name


def test_a_full_name_is_found_though_the_listing_is_old() -> None:
    """Who has pinned a checkpoint asks for it by its name, which needs no listing."""

    class Old(MemoryStore):
        def names(self, folder: str) -> list[str]:
            return [name for name in super().names(folder) if name != str(newest)]

    store = three_steps()
    newest = look(store).names[0]
    old = Old()
    old.objects = store.objects
    assert newest not in look(old).names
    assert resolve(old, str(newest)).name == newest


def test_step_of_two_attempts_is_that_of_the_newer() -> None:
    """If two attempts saved one step, the newer attempt's is meant."""
    store = MemoryStore()
    Attempt(store, keep=ALL).save(10)
    Attempt(store, keep=ALL).save(10)
    assert resolve(store, 10).name.attempt == 2


def test_best_with_one_metric_needs_no_name() -> None:
    """Where there is only one metric, `best` means it."""
    store = MemoryStore()
    attempt = Attempt(store, keep=ALL)
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.25), (4, 0.75)):
        attempt.save(step, metrics={"loss": loss})
    assert resolve(store, "best").name.step == 3  # of equals the newest


def test_best_with_several_metrics_asks_which() -> None:
    """Where it is not clear what is meant, the error lists the names."""
    with pytest.raises(ValueError, match=r"acc, loss.*@best:acc"):
        resolve(three_steps(), "best")


def test_best_counts_healthy_and_finite_only() -> None:
    """NaN and infinity are never best, and an unhealthy checkpoint is not either."""
    store = MemoryStore()
    attempt = Attempt(store, keep=ALL)
    attempt.save(1, metrics={"loss": 0.5})
    attempt.save(2, metrics={"loss": math.nan})
    attempt.save(3, metrics={"loss": -math.inf})
    result = attempt.save(4, metrics={"loss": 0.1}, arrays=unhealthy_array(), files=1)
    assert result.published
    assert not result.healthy
    attempt.save(5)
    assert resolve(store, "best:loss").name.step == 1


def test_best_without_metrics() -> None:
    """The error says how a metric comes to be."""
    store = MemoryStore()
    Attempt(store).save(1)
    with pytest.raises(CheckpointNotFound, match=r"run\.save"):
        resolve(store, "best")
    with pytest.raises(CheckpointNotFound, match="finite 'loss'"):
        resolve(store, "best:loss")


def test_not_found_lists_what_is_there() -> None:
    """The message names the steps that could be asked for instead."""
    with pytest.raises(CheckpointNotFound, match="steps 30, 20, 10"):
        resolve(three_steps(), 11)
    with pytest.raises(CheckpointNotFound, match=r"no run of that name; `spotsafe ls`"):
        resolve(MemoryStore(), "latest")
    claimed = MemoryStore()
    Attempt(claimed)
    with pytest.raises(CheckpointNotFound, match="none at all"):
        resolve(claimed, "latest")
    begun = MemoryStore()
    begun.put(f"{CheckpointName(1, 1, 1, '00000000').folder}/x", b"")
    with pytest.raises(CheckpointNotFound, match="none of those begun"):
        resolve(begun, "latest")


@pytest.mark.parametrize("selector", ["newest", "", "best:"])
def test_unknown_selector_is_a_mistake(selector: str) -> None:
    """What is no selector is said to be none, with the ones there are."""
    with pytest.raises(ValueError, match="latest, best"):
        resolve(three_steps(), selector)


def test_resolve_passes_over_damage_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """A damaged manifest does not hide the good checkpoint behind it, and is not passed over in silence."""
    store = three_steps()
    newest = look(store).names[0]
    store.objects[newest.manifest] = b""
    assert resolve(store, "latest").name.step == 20
    assert str(newest) in caplog.text
    with pytest.raises(CheckpointNotFound, match="steps 20, 10"):
        resolve(store, 30)


@pytest.mark.parametrize("selector", ["latest", 30, "best:loss"])
def test_resolve_stops_at_a_newer_format(selector: str | int) -> None:
    """A checkpoint of a newer version may be the one that is meant: no silent older answer."""
    store = three_steps()
    newest = look(store).names[0]
    members = sealed.unseal(store.objects[newest.manifest], max_bytes=MAX_BYTES)
    store.objects[newest.manifest] = sealed.seal({**members, "format": 9})
    with pytest.raises(UnsupportedFormat):
        resolve(store, selector)
    assert resolve(store, 20).name.step == 20


@pytest.mark.parametrize("selector", ["latest", 10, "best:loss"])
def test_resolve_raises_storage_errors(selector: str | int) -> None:
    """Could not look is never not found."""
    store = FailingStore(three_steps(), fail=lambda name, path, number: StorageUnavailable("down"))
    with pytest.raises(StorageUnavailable):
        resolve(store, selector)


# The list for people


def test_rows_tell_why_not() -> None:
    """Every folder has its line, newest first, with what speaks against it."""
    store = MemoryStore()
    attempt = Attempt(store, keep=ALL)
    names = [attempt.save(step).name for step in range(6)]
    del store.objects[names[1].manifest]
    store.objects[names[2].manifest] = encode_marker(Marker(state="retired"))
    store.objects[names[3].manifest] = b"{"
    del store.objects[names[4].file(data_file(0, 1))]
    rows = list_rows(store)
    assert [row.candidate.name for row in rows] == names[::-1]
    problems = [row.problem for row in rows[::-1]]
    assert problems[:3] == ["", "never published", "retired"]
    assert "manifest.json" in problems[3]
    assert "data files" in problems[4]
    assert problems[5] == ""
    assert rows[0].stored_bytes == sum(entry.size for entry in store.list(names[5].folder))


def test_rows_of_an_empty_run() -> None:
    """No checkpoints, no lines."""
    assert list_rows(MemoryStore()) == []


def test_rows_of_two_hundred_checkpoints_cost_one_listing() -> None:
    """Listing 200 checkpoints asks the store for one listing and each manifest once, and for no index.

    Besides, for the names of attempts and pins, and for the newest record.
    """
    store = MemoryStore()
    attempt = Attempt(store, keep=ALL)
    template = attempt.save(1).name
    manifest = read_candidate(store, template).manifest
    assert manifest is not None
    for step in range(2, 201):
        made = dataclasses.replace(manifest, step=step)
        for entry in store.list(template.folder):
            store.objects[f"{made.name.folder}/{entry.path.rpartition('/')[2]}"] = store.objects[entry.path]
        store.objects[made.name.manifest] = encode_manifest(made)
    counting = CountingStore(store)
    rows = list_rows(counting)
    assert (counting.count("list"), counting.count("read"), len(counting.operations)) == (1, 201, 204)
    assert [row.problem for row in rows] == [""] * 200


def test_highest_of_a_listing() -> None:
    """The highest attempt counts whatever trace it left."""
    name = CheckpointName(7, 1, 1, "00000000")
    assert Listing(attempts=(1, 2), published=frozenset({9}), names=(name,)).highest == 9
    assert Listing(attempts=(1, 2), published=frozenset(), names=(name,)).highest == 7
