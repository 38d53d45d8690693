"""Reading ledgers: of this version, of others, damaged ones, and none."""

from __future__ import annotations

import json

import pytest

from spotsafe.checkpoint.attempts import AttemptRecord
from spotsafe.checkpoint.layout import ledger_events, ledger_heartbeat
from spotsafe.errors import EXIT_RESTART_LOOP, StorageUnavailable
from spotsafe.events import CheckpointPublished, RunEnded, Warned
from spotsafe.ledger.reading import (
    past_attempts,
    read_end,
    read_events,
    read_heartbeat,
    read_step,
    writes_no_more,
)
from spotsafe.ledger.record import Ledger
from spotsafe.policy.restarts import STOPPED, Limits, PastAttempt, restart_loop
from spotsafe.storage.local import LocalStore
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.faults import CountingStore, FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.sinks import sample_events

PUBLISHED = CheckpointPublished(checkpoint="c", step=1, total_bytes=1, write_s=1.0, healthy=True)


def record(attempt: int, *, started: float = 0.0, unhealthy_to: str | None = None) -> AttemptRecord:
    return AttemptRecord(
        run="7f3a9c21",
        attempt=attempt,
        nonce="7f3a9c21",
        host="h",
        pid=1,
        boot="",
        job="j",
        arguments=(),
        newest_seen=None,
        started=started,
        passed_over_unhealthy_to=unhealthy_to,
    )


def write(
    store: MemoryStore, attempt: int, outcome: str | None, *, published: int = 0, code: int | None = 1
) -> None:
    """A ledger of an attempt that ended like this, or was killed."""
    ledger = Ledger(store, attempt, clock=ManualClock())
    for _ in range(published):
        ledger.emit(PUBLISHED)
    if outcome is not None:
        ledger.emit(RunEnded(step=attempt * 10, outcome=outcome, code=code, newest=None))
    assert ledger.close()


def piece(store: MemoryStore, number: int, *, attempt: int = 1, **changes: object) -> None:
    """A piece as somebody else might write it."""
    body = {"format": 1, "attempt": attempt, "published": 0, "end": None, "events": [], **changes}
    store.objects[ledger_events(attempt, number)] = json.dumps(body).encode()


def entry(n: int, kind: str = "Warned", **data: object) -> dict[str, object]:
    return {"n": n, "wall": 1.0, "offset_s": 0.5, "type": kind, "data": data}


# -- events


def test_every_event_comes_back_as_it_went(tmp_path: object) -> None:
    """Written to a real folder and read again, every type with and without its optional fields."""
    store = LocalStore(str(tmp_path))
    ledger = Ledger(store, 3, clock=ManualClock())
    for event in sample_events():
        ledger.emit(event)
    assert ledger.close()

    assert [one.event for one in read_events(store, 3)] == sample_events()


def test_events_of_a_later_version_are_left_out() -> None:
    """Unknown types, unknown fields and missing ones: what can be understood is read."""
    store = MemoryStore()
    piece(
        store,
        1,
        events=[
            entry(1, message="old"),
            entry(2, "TeleportStarted", message="new type"),
            entry(3, message="with a new field", colour="blue"),
            entry(4),
            entry(5, message=5),
            entry(6, "Fanout"),
            entry(7, "logging"),
            entry(8, message="last"),
        ],
        later="a new member",
    )

    assert [(one.n, one.event) for one in read_events(store, 1)] == [
        (1, Warned(message="old")),
        (3, Warned(message="with a new field")),
        (8, Warned(message="last")),
    ]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"format": 1}',
        b'{"format": 2, "attempt": 1, "published": 0, "end": null}',
    ],
)
def test_a_piece_that_cannot_be_read_is_skipped_and_said(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """Damage or a newer format in one piece does not hide the others."""
    store = MemoryStore()
    piece(store, 1, events=[entry(1, message="one")])
    store.objects[ledger_events(1, 2)] = data
    piece(store, 3, events=[entry(3, message="three")])

    assert [one.n for one in read_events(store, 1)] == [1, 3]
    assert "events-000002.json" in caplog.text


def test_a_newer_format_is_skipped() -> None:
    """A whole piece of format 2 is not read as format 1."""
    store = MemoryStore()
    piece(store, 1, format=2, events=[entry(1, message="one")])

    assert read_events(store, 1) == []
    assert read_end(store, 1) is None


def test_repeated_and_unordered_entries_are_put_right() -> None:
    """A piece that was written twice counts once; the order is that of the numbers."""
    store = MemoryStore()
    piece(store, 1, events=[entry(1, message="one"), entry(2, message="two")])
    piece(store, 2, events=[entry(1, message="one"), entry(2, message="two"), entry(3, message="three")])

    assert [one.n for one in read_events(store, 1)] == [1, 2, 3]


def test_other_objects_in_the_folder_are_ignored() -> None:
    """Heartbeats and strangers are no pieces."""
    store = MemoryStore()
    piece(store, 1, events=[entry(1, message="one")])
    for name in (
        "heartbeat.json",
        "events-1.json",
        "events-000000.json",
        "events-000002.json.tmp",
        "notes.txt",
    ):
        store.objects[f"ledger/000001/{name}"] = b"?"

    assert len(read_events(store, 1)) == 1


# -- the end and the heartbeat


def test_the_end_is_read_from_the_last_piece_alone() -> None:
    """A day of pieces costs one listing and one read."""
    store = MemoryStore()
    for number in range(1, 200):
        piece(store, number)
    piece(
        store,
        200,
        end={"outcome": "left", "code": None, "step": 7, "published": 3, "newest": None, "wall": 1.0},
    )
    counting = CountingStore(store)

    end = read_end(counting, 1)

    assert end is not None
    assert (end.outcome, end.published) == ("left", 3)
    assert (counting.count("names"), counting.count("read"), len(counting.operations)) == (1, 1, 2)


@pytest.mark.parametrize("in_flight", [False, True])
def test_an_end_with_a_save_in_flight_is_not_the_last_write(in_flight: bool) -> None:
    """On a store that keeps nobody apart such an attempt may still publish."""
    store = MemoryStore()
    ledger = Ledger(store, 1, clock=ManualClock())
    ledger.emit(RunEnded(step=1, outcome="left", code=None, newest=None, in_flight=in_flight))
    assert ledger.close()
    assert read_end(store, 1) is not None
    assert writes_no_more(store, 1) is not in_flight
    assert not writes_no_more(store, 2), "without a record nobody knows"


def test_no_record_is_no_end() -> None:
    """No ledger, or one that stops in the middle: the attempt did not live to say how it ended."""
    store = MemoryStore()
    write(store, 2, None, published=1)

    assert read_end(store, 1) is None
    assert read_end(store, 2) is None
    assert read_events(store, 1) == []


def test_the_heartbeat_is_read_as_it_is() -> None:
    """Bytes to compare, or None if there was never one."""
    store = MemoryStore()
    assert read_heartbeat(store, 1) is None

    write(store, 1, "left")
    assert read_heartbeat(store, 1) == store.objects[ledger_heartbeat(1)]


def test_the_furthest_step() -> None:
    """The larger of what the last piece and the heartbeat say; 0 when nothing is known or all is damaged."""
    store = MemoryStore()
    assert read_step(store, 1) == 0

    piece(store, 1, step=40)
    assert read_step(store, 1) == 40

    store.objects[ledger_heartbeat(1)] = b'{"format": 1, "beat": 3, "step": 45}'
    assert read_step(store, 1) == 45

    store.objects[ledger_heartbeat(1)] = b"\xff"
    assert read_step(store, 1) == 40


@pytest.mark.parametrize("read", [read_end, read_events, read_heartbeat, read_step])
def test_a_storage_error_is_passed_on(read: object) -> None:
    """ "Could not look" is never read as "there is none"."""
    store = FailingStore(
        MemoryStore(), fail=lambda name, path, number: StorageUnavailable("no answer", path=path)
    )

    with pytest.raises(StorageUnavailable):
        read(store, 1)  # type: ignore[operator]  # parametrized functions


# -- past attempts


def test_past_attempts_join_records_and_ledgers() -> None:
    """Starts come from the records, ends from the ledgers, in the order of attempts."""
    store = MemoryStore()
    write(store, 1, "failed", published=2)
    write(store, 2, "reclaimed", code=143)
    records = [record(3, started=30.0, unhealthy_to="c"), record(1, started=10.0), record(2, started=20.0)]

    assert past_attempts(store, records) == [
        PastAttempt(attempt=1, started_wall=10.0, end="failed", new_published=True),
        PastAttempt(attempt=2, started_wall=20.0, end="reclaimed", new_published=False),
        PastAttempt(
            attempt=3, started_wall=30.0, end=None, new_published=False, passed_over_unhealthy_to="c"
        ),
    ]


def test_an_attempt_that_was_stopped_is_told_from_one_that_failed() -> None:
    """Exit code 93 means that the guard ended it, whatever the outcome is called."""
    store = MemoryStore()
    write(store, 1, "failed", code=EXIT_RESTART_LOOP)

    [one] = past_attempts(store, [record(1)])

    assert one.end == STOPPED


def test_a_run_of_a_thousand_attempts_is_read_at_its_end() -> None:
    """The newest twenty-one records, and the ledgers of four attempts."""
    store = MemoryStore()
    for number in range(1, 1001):
        piece(
            store,
            1,
            attempt=number,
            end={"outcome": "failed", "code": 1, "step": 0, "published": 0, "newest": None, "wall": 1.0},
        )
    counting = CountingStore(store)

    past = past_attempts(counting, [record(number) for number in range(1, 1001)])

    assert [one.attempt for one in past] == list(range(980, 1001))
    assert len(counting.operations) == 8
    assert [one.end for one in past[-4:]] == ["failed"] * 4


@pytest.mark.parametrize("with_starting", [True, False])
def test_a_restart_loop_is_found_from_storage(with_starting: bool) -> None:
    """Three attempts that failed and published nothing stop the fourth, wherever each of them ran."""
    store = MemoryStore()
    for number in range(1, 4):
        write(store, number, "failed")
    records = [record(number, started=number * 1000.0) for number in range(1, 5 if with_starting else 4)]
    starting = PastAttempt(attempt=4, started_wall=4000.0, end=None, new_published=False)

    past = past_attempts(store, records)

    assert restart_loop(past if with_starting else [*past, starting]) is not None


def test_larger_limits_read_more() -> None:
    """With a limit of six failures the ledgers of seven attempts are asked."""
    store = MemoryStore()
    for number in range(1, 10):
        write(store, number, "failed")

    past = past_attempts(store, [record(number) for number in range(1, 10)], limits=Limits(fruitless=6))

    assert [one.end for one in past] == [None, None, *["failed"] * 7]
