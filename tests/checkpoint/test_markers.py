"""Markers go when nobody can be left whom they guard against, and not before."""

from __future__ import annotations

import dataclasses

import pytest

from spotsafe.checkpoint.attempts import encode_record, read_attempt
from spotsafe.checkpoint.candidates import look, read_candidate
from spotsafe.checkpoint.layout import CheckpointName, attempt_record
from spotsafe.checkpoint.manifest import Marker, encode_marker
from spotsafe.checkpoint.markers import HOUR_S, WEEK_S, is_over, remove_markers
from spotsafe.errors import StorageRefused, StorageUnavailable
from spotsafe.events import DeleteRefused
from spotsafe.policy.retention import latest
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt
from spotsafe.testing.sinks import RecordingSink

T0 = 1_700_000_000.0
"""When the attempts of these tests start."""


def run_with_markers() -> tuple[MemoryStore, list[CheckpointName]]:
    """A first attempt of which everything was withdrawn by the second."""
    store = MemoryStore()
    first = Attempt(store, keep=latest(100))
    names = [first.save(step).name for step in (1, 2)]
    second = Attempt(store, keep=latest(1))
    for step in (3, 4, 5):
        second.save(step)
    assert all(read_candidate(store, name).marker == Marker(state="retired") for name in names)
    return store, names


def removed(store: MemoryStore, *, ended: float | None, now: float, attempt: int = 2) -> list[CheckpointName]:
    return remove_markers(
        store, attempt=attempt, ended_at=lambda _: ended, now=now, on_event=RecordingSink().emit
    )


@pytest.mark.parametrize(
    ("ended", "now", "over"),
    [
        (None, T0 + WEEK_S, False),
        (None, T0 + WEEK_S + 1, True),
        (T0, T0 + HOUR_S, False),
        (T0, T0 + HOUR_S + 1, True),
        (T0 + 2 * WEEK_S, T0 + 2 * WEEK_S + 1, False),
    ],
)
def test_when_an_attempt_is_over(ended: float | None, now: float, over: bool) -> None:
    """An hour after its recorded end, or a week after the start of the next; the end decides where it is known."""
    store, names = run_with_markers()
    assert is_over(store, 1, ended_at=lambda _: ended, now=now) is over
    assert removed(store, ended=ended, now=now) == (names if over else [])
    assert [name in look(store).names for name in names] == [not over] * 2


def test_without_a_next_attempt_nobody_knows() -> None:
    """Nor if its record is damaged: then the marker stays."""
    store, names = run_with_markers()
    assert not is_over(store, 2, ended_at=lambda _: None, now=T0 + 10 * WEEK_S)
    store.objects[attempt_record(2)] = b"?"
    assert removed(store, ended=None, now=T0 + 10 * WEEK_S) == []
    assert all(name.manifest in store.objects for name in names)


def test_only_markers_alone_in_folders_of_older_attempts() -> None:
    """No manifest, damaged or not, no marker beside files, and nothing of the newest attempt."""
    store, (one, two) = run_with_markers()
    store.objects[f"{one.folder}/notes.txt"] = b"mine"
    mine = CheckpointName(2, 9, 9, "00000000")
    store.objects[mine.manifest] = encode_marker(Marker(state="abandoned"))
    damaged = CheckpointName(1, 9, 9, "00000000")
    store.objects[damaged.manifest] = b"?"
    kept = {path for path in store.objects if path != two.manifest}
    assert removed(store, ended=T0, now=T0 + WEEK_S) == [two]
    assert set(store.objects) == kept


def test_a_started_attempt_in_the_future_is_not_over() -> None:
    """A wrong clock keeps markers; it removes none."""
    store, _ = run_with_markers()
    record = dataclasses.replace(read_attempt(store, 2), started=T0 + 100 * WEEK_S)
    store.objects[attempt_record(2)] = encode_record(record)
    assert removed(store, ended=None, now=T0 + 10 * WEEK_S) == []


def test_refusals_are_told_and_outages_raised() -> None:
    """As everywhere where something is deleted."""
    store, names = run_with_markers()
    sink = RecordingSink()

    def remove(error: Exception) -> list[CheckpointName]:
        failing = FailingStore(store, fail=lambda name, path, number: error if name == "delete" else None)
        return remove_markers(failing, attempt=2, ended_at=lambda _: T0, now=T0 + WEEK_S, on_event=sink.emit)

    assert remove(StorageRefused("no")) == []
    assert [event.path for event in sink.of(DeleteRefused)] == [name.manifest for name in names]
    with pytest.raises(StorageUnavailable):
        remove(StorageUnavailable("down"))


def test_a_later_attempt_removes_them_by_itself() -> None:
    """With its first publish, once; the run goes on as ever."""
    store, names = run_with_markers()
    third = Attempt(store, keep=latest(1), ended_at=lambda attempt: T0 - 2 * HOUR_S if attempt == 1 else None)
    for step in (6, 7, 8):
        result = third.save(step)
        assert result.published
        assert result.error is None
    left = look(store).names
    assert not set(names) & set(left)
    assert [name.attempt for name in left] == [3, 3, 2, 2], "those of attempt 2 may still be written"
