"""Who is asked whether it lives: the newest attempt that trains, however it shows."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from spotsafe import events as ev
from spotsafe.checkpoint.attempts import AttemptRecord, encode_record
from spotsafe.checkpoint.branch import Rollback
from spotsafe.checkpoint.candidates import listing_of, look
from spotsafe.checkpoint.layout import CheckpointName, attempt_record, ledger_heartbeat
from spotsafe.clock import SystemClock
from spotsafe.errors import RunInUse, StorageUnavailable
from spotsafe.identity import Identity
from spotsafe.ledger.occupancy import Occupancy
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.sinks import RecordingSink

ME = Identity.of_this_process(environ={}, argv=["train.py"])
OTHER = AttemptRecord(
    run="0123abcd",
    attempt=1,
    nonce="0123abcd",
    host="there",
    pid=1,
    boot="",
    job="SLURM_JOB_ID=1",
    arguments=("train.py",),
    newest_seen=None,
    started=1.0,
)
BACK = (Rollback(to=str(CheckpointName(1, 1, 1, "0123abcd")), attempt=2),)


class Beating(SystemClock):
    """Waiting takes no time, and the attempt's heart beats meanwhile."""

    def __init__(self, store: MemoryStore, attempt: int | None) -> None:
        super().__init__()
        self.store, self.attempt, self.waits = store, attempt, 0

    def wait(self, event: threading.Event, timeout_s: float | None = None) -> bool:
        self.waits += 1
        if self.attempt is not None:
            self.store.objects[ledger_heartbeat(self.attempt)] = b"%d" % self.waits
        return False


def run_of(*records: AttemptRecord) -> MemoryStore:
    store = MemoryStore()
    for record in records:
        store.put(attempt_record(record.attempt), encode_record(record))
    return store


def occupancy(store: MemoryStore, clock: SystemClock, sink: RecordingSink | None = None) -> Occupancy:
    return Occupancy(store, identity=ME, clock=clock, emit=(sink or RecordingSink()).emit)


def rollback(attempt: int) -> AttemptRecord:
    return dataclasses.replace(OTHER, attempt=attempt, rollbacks=BACK)


def test_an_empty_run_is_nobodys() -> None:
    """There is nobody to ask."""
    store = MemoryStore()
    clock = Beating(store, 1)
    occupancy(store, clock).check(look(store))
    assert clock.waits == 0


def test_a_rollback_is_looked_through() -> None:
    """It says nothing about the attempt before it, which may live."""
    store = run_of(OTHER, rollback(2))
    with pytest.raises(RunInUse, match="attempt 1 of another job"):
        occupancy(store, Beating(store, 1)).check(look(store))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        ("SLURM_JOB_ID=17", r"\(SLURM_JOB_ID=17, process 812 on there\) is alive"),
        ("host=there arguments=0069225d463c3523", r"\(train\.py, process 812 on there\) is alive"),
    ],
)
def test_the_job_is_told_by_what_a_person_finds_it_by(job: str, words: str) -> None:
    """The launcher's number; without a launcher the program, not a digest of its arguments, and none of them."""
    record = dataclasses.replace(OTHER, job=job, pid=812, arguments=("train.py", "--key=secret"))
    with pytest.raises(RunInUse, match=words):
        store = run_of(record)
        occupancy(store, Beating(store, 1)).check_record(record)


def test_a_rollback_itself_is_never_alive() -> None:
    """Nobody waits for a command that has ended."""
    store = run_of(OTHER, rollback(2))
    clock = Beating(store, 1)
    occupancy(store, clock).check_record(rollback(2))
    assert clock.waits == 0


def test_an_attempt_that_shows_by_its_checkpoint_alone() -> None:
    """It was claimed after the attempts were listed: its record is found by its number."""
    newer = dataclasses.replace(OTHER, attempt=2)
    store = run_of(OTHER, newer)
    torn = listing_of(["000001.json"], [str(CheckpointName(2, 1, 1, "0123abcd"))])
    with pytest.raises(RunInUse, match="attempt 2"):
        occupancy(store, Beating(store, 2)).check(torn)


def test_a_folder_without_the_newest_records() -> None:
    """Only the checkpoints were copied: the newest record that is there is asked."""
    store = run_of(OTHER)
    listing = listing_of(["000001.json"], [str(CheckpointName(7, 1, 1, "0123abcd"))])
    with pytest.raises(RunInUse, match="attempt 1"):
        occupancy(store, Beating(store, 1)).check(listing)


def test_a_damaged_record_keeps_nobody_waiting() -> None:
    """Nothing is known of who that was; it is said."""
    store = run_of(OTHER)
    store.put(attempt_record(2), b"{}")
    clock, sink = Beating(store, 1), RecordingSink()
    occupancy(store, clock, sink).check(look(store))
    assert clock.waits == 0
    assert len(sink.of(ev.Warned)) == 1


def test_the_remedy_is_the_callers() -> None:
    """A session and a command line have different words for it."""
    store = run_of(OTHER)
    who = Occupancy(
        store, identity=ME, clock=Beating(store, 1), emit=RecordingSink().emit, remedy="Do something else"
    )
    with pytest.raises(RunInUse, match=r"is alive\. Do something else"):
        who.check(look(store))


@pytest.mark.parametrize("path", ["attempts/000001.json", "ledger/000001"])
def test_no_answer_is_an_error(path: str) -> None:
    """Could not look is neither alive nor dead."""
    store = run_of(OTHER)
    failing = FailingStore(
        store, fail=lambda name, asked, _: StorageUnavailable("down") if asked.startswith(path) else None
    )
    with pytest.raises(StorageUnavailable):
        Occupancy(failing, identity=ME, clock=Beating(store, 1), emit=print).check(look(store))
