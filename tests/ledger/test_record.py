"""Writing the ledger: when, what, and that nothing that goes wrong there reaches training."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import pytest

from spotsafe.errors import StorageUnavailable
from spotsafe.events import (
    CheckpointPublished,
    Event,
    EventSink,
    Fanout,
    NoticeReceived,
    RunEnded,
    RunStarted,
    Warned,
)
from spotsafe.ledger.reading import read_end, read_events
from spotsafe.ledger.record import Ledger
from spotsafe.storage.store import Store
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.sinks import EventSinkConformance, RecordingSink

STARTED = RunStarted(
    url="memory://run", run="7f3a9c21", attempt=12, step=0, resumed_from=None, age_s=None, watching=("aws",)
)
ENDED = RunEnded(step=300, outcome="reclaimed", code=143, newest="a000012-s000000300-0001-7f3a9c21")
PUBLISHED = CheckpointPublished(
    checkpoint="a000012-s000000300-0001-7f3a9c21", step=300, total_bytes=10, write_s=1.0, healthy=True
)
PIECE = "ledger/000012/events-00000{}.json"
HEARTBEAT = "ledger/000012/heartbeat.json"

Make = Callable[..., Ledger]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def make(clock: ManualClock, store: MemoryStore) -> Iterator[Make]:
    """Makes ledgers of attempt 12 whose threads are waiting; closes them all."""
    made: list[Ledger] = []

    def make_ledger(inner: Store | None = None, **options: object) -> Ledger:
        ledger = Ledger(inner or store, 12, clock=clock, **options)  # type: ignore[arg-type]  # its options
        made.append(ledger)
        clock.await_waiters(len(made))
        return ledger

    yield make_ledger
    for ledger in made:
        ledger.close()
        assert not ledger._thread.is_alive()


def broken(
    *, while_true: threading.Event, operation: str | None = None
) -> Callable[[str, str, int], Exception | None]:
    """An outage that lasts as long as the event is set."""

    def fail(name: str, path: str, number: int) -> Exception | None:
        if while_true.is_set() and operation in {None, name}:
            return StorageUnavailable(f"{path}: no answer", path=path)
        return None

    return fail


@pytest.fixture
def outage() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


class TestLedgerIsASink(EventSinkConformance):
    """The ledger takes whatever comes, from any thread."""

    @pytest.fixture(autouse=True)
    def _made(self, make: Make) -> None:
        self.make = make

    def make_sink(self) -> EventSink:
        return self.make()


# -- when it writes


def test_the_start_is_written_at_once(make: Make, store: MemoryStore, clock: ManualClock) -> None:
    """`RunStarted` is on storage without any time passing."""
    ledger = make()

    ledger.emit(STARTED)
    assert ledger.flush()

    assert [one.event for one in read_events(store, 12)] == [STARTED]


def test_run_started_needs_no_flush(make: Make, clock: ManualClock) -> None:
    """The start and the end wake the thread by themselves."""
    written = threading.Event()

    class Telling(MemoryStore):
        def put(self, path: str, data: bytes) -> None:
            super().put(path, data)
            written.set()

    ledger = make(Telling())

    ledger.emit(STARTED)

    assert written.wait(30)


def test_events_are_written_every_minute(make: Make, clock: ManualClock) -> None:
    """Before the minute is over there is nothing, after it there is a piece with what came."""
    written = threading.Event()

    class Telling(MemoryStore):
        def put(self, path: str, data: bytes) -> None:
            super().put(path, data)
            written.set()

    store = Telling()
    ledger = make(store, heartbeat_s=1e9)
    ledger.emit(Warned(message="one"))
    ledger.emit(Warned(message="two"))

    clock.advance(59.0)
    clock.await_waiters()
    assert PIECE.format(1) not in store.objects

    clock.advance(1.0)
    assert written.wait(30)
    assert [one.event for one in read_events(store, 12)] == [Warned(message="one"), Warned(message="two")]


def test_without_events_nothing_is_written(make: Make, store: MemoryStore, clock: ManualClock) -> None:
    """A quiet hour makes heartbeats, no pieces."""
    ledger = make()

    for _ in range(60):
        clock.await_waiters()
        clock.advance(60.0)
    ledger.close()

    assert set(store.objects) == {HEARTBEAT}


def test_the_heartbeat_changes_all_the_time(make: Make, store: MemoryStore, clock: ManualClock) -> None:
    """It is there from the beginning, and every thirty seconds it holds other bytes."""
    beats = []
    beaten = threading.Semaphore(0)

    class Telling(MemoryStore):
        def replace(self, path: str, data: bytes) -> None:
            super().replace(path, data)
            beats.append((path, data))
            beaten.release()

    make(Telling(), step=lambda: 77)
    for _ in range(3):
        assert beaten.acquire(timeout=30)
        clock.await_waiters()
        clock.advance(30.0)
    assert beaten.acquire(timeout=30)

    assert {path for path, _ in beats} == {HEARTBEAT}
    assert len({data for _, data in beats}) == 4
    assert json.loads(beats[-1][1])["step"] == 77


def test_closing_writes_what_there_is(make: Make, store: MemoryStore) -> None:
    """The end of the run is on storage when `close` returns true."""
    ledger = make()
    ledger.emit(STARTED)
    ledger.emit(PUBLISHED)
    ledger.emit(ENDED)

    assert ledger.close()

    end = read_end(store, 12)
    assert end is not None
    assert (end.outcome, end.code, end.step, end.published, end.newest) == (
        "reclaimed",
        143,
        300,
        1,
        ENDED.newest,
    )


def test_closing_twice_and_flushing_after_it_are_no_errors(make: Make, store: MemoryStore) -> None:
    """What comes after the end is dropped."""
    ledger = make()
    ledger.emit(STARTED)
    ledger.close()

    ledger.emit(Warned(message="late"))

    assert ledger.close()
    assert ledger.flush()
    assert [one.event for one in read_events(store, 12)] == [STARTED]


# -- what it writes


def test_times_are_in_the_ledger(make: Make, store: MemoryStore, clock: ManualClock) -> None:
    """Each event has the wall clock for people and an offset that no clock change disturbs."""
    ledger = make(heartbeat_s=1e9, flush_s=1e9)
    ledger.emit(STARTED)
    began = clock.wall()
    clock.advance(12.5)
    clock.set_wall(5.0)
    ledger.emit(PUBLISHED)

    ledger.close()

    first, second = read_events(store, 12)
    assert (first.wall, first.offset_s, second.wall, second.offset_s) == (began, 0.0, 5.0, 12.5)


def test_pieces_are_new_objects(make: Make, store: MemoryStore) -> None:
    """Each flush writes the next number; what is written is never touched again."""
    ledger = make()
    ledger.emit(Warned(message="one"))
    assert ledger.flush()
    first = store.objects[PIECE.format(1)]
    ledger.emit(Warned(message="two"))
    assert ledger.flush()

    assert store.objects[PIECE.format(1)] == first
    assert PIECE.format(2) in store.objects
    assert [one.n for one in read_events(store, 12)] == [1, 2]


def test_many_events_are_cut_into_pieces(make: Make, store: MemoryStore) -> None:
    """No piece becomes so large that it could not be read back."""
    ledger = make()
    for number in range(1200):
        ledger.emit(Warned(message=f"{number} " + "\x00" * 5000))

    assert ledger.close()

    assert sorted(path for path in store.objects if "events" in path) == [PIECE.format(n) for n in (1, 2, 3)]
    assert len(read_events(store, 12)) == 1200


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("caf\udce9", "caf\\udce9"),
        ("x" * 5000, "x" * 1000),
        ("\u6f22\u5b57", "\u6f22\u5b57"),
    ],
)
def test_odd_texts_are_written_as_well_as_can_be(
    make: Make, store: MemoryStore, text: str, read: str
) -> None:
    """Bytes that are no UTF-8 are escaped and long texts cut; the other events are not lost with them."""
    ledger = make()
    ledger.emit(Warned(message=text))
    ledger.emit(ENDED)

    assert ledger.close()

    assert [one.event for one in read_events(store, 12)] == [Warned(message=read), ENDED]


def test_a_number_that_json_has_not_becomes_unknown(make: Make, store: MemoryStore) -> None:
    """An infinite deadline is read as none."""
    ledger = make()
    ledger.emit(NoticeReceived(source="file", kind="risk", action="stop", seconds_left=float("inf")))
    ledger.close()

    [one] = read_events(store, 12)
    assert one.event == NoticeReceived(source="file", kind="risk", action="stop", seconds_left=None)


# -- what goes wrong


def test_an_outage_delays_and_loses_nothing(
    make: Make, store: MemoryStore, clock: ManualClock, outage: threading.Event
) -> None:
    """What could not be written is written with the next flush, once and in order."""
    ledger = make(FailingStore(store, fail=broken(while_true=outage)))
    ledger.emit(STARTED)
    assert ledger.flush() is False
    ledger.emit(PUBLISHED)
    assert ledger.flush() is False
    assert ledger.errors >= 2

    outage.clear()
    assert ledger.flush()

    assert [one.event for one in read_events(store, 12)] == [STARTED, PUBLISHED]


def test_a_lost_response_does_not_double_events(make: Make, store: MemoryStore) -> None:
    """A piece that was written although the store said no is written again; readers drop the repetition."""
    lost = [True]

    class Losing(MemoryStore):
        def put(self, path: str, data: bytes) -> None:
            store.put(path, data)
            if lost.pop() if lost else False:
                raise StorageUnavailable("no answer", path=path)

    ledger = make(Losing())
    ledger.emit(Warned(message="one"))
    assert ledger.flush() is False
    ledger.emit(Warned(message="two"))
    assert ledger.flush()

    assert [one.event for one in read_events(store, 12)] == [Warned(message="one"), Warned(message="two")]


def test_it_warns_once(make: Make, clock: ManualClock, outage: threading.Event, store: MemoryStore) -> None:
    """A store that refuses the ledger for days is worth one line, and that line is an event like any other."""
    seen = RecordingSink()
    fanout = Fanout([seen])
    ledger = make(FailingStore(store, fail=broken(while_true=outage, operation="put")), emit=fanout.emit)
    fanout.add(ledger)
    for _ in range(5):
        ledger.emit(PUBLISHED)
        ledger.flush()

    assert len(seen.of(Warned)) == 1
    assert "no answer" in seen.of(Warned)[0].message
    outage.clear()
    ledger.flush()
    assert seen.of(Warned)[0] in [one.event for one in read_events(store, 12)]


def test_any_error_is_kept_in_the_thread(make: Make, store: MemoryStore) -> None:
    """Also a bug of a store's client library ends neither training nor the ledger."""
    bugs = [ZeroDivisionError("a bug"), MemoryError()]
    ledger = make(
        FailingStore(store, fail=lambda name, path, number: bugs.pop() if bugs and name == "put" else None)
    )
    ledger.emit(STARTED)

    assert [ledger.flush() for _ in range(3)][-1] is True
    assert ledger.errors == 2


def test_the_buffer_has_a_bound(make: Make, store: MemoryStore, outage: threading.Event) -> None:
    """In a long outage the oldest events are dropped; numbers show the gap, and the summary still counts all."""
    ledger = make(FailingStore(store, fail=broken(while_true=outage)))
    for _ in range(10_005):
        ledger.emit(PUBLISHED)
    ledger.emit(ENDED)
    outage.clear()
    ledger.close()

    recorded = read_events(store, 12)
    end = read_end(store, 12)
    assert (len(recorded), recorded[0].n, recorded[-1].n) == (10_000, 7, 10_006)
    assert end is not None
    assert end.published == 10_005


def test_a_store_that_hangs_is_left_behind(clock: ManualClock) -> None:
    """`flush` and `close` return false when their time is over; the thread does not keep the process alive."""
    asked, go = threading.Event(), threading.Event()

    class Hanging(MemoryStore):
        def put(self, path: str, data: bytes) -> None:
            asked.set()
            assert go.wait(60)
            super().put(path, data)

    ledger = Ledger(Hanging(), 12, clock=clock)
    ledger.emit(STARTED)
    assert asked.wait(30)

    answers: list[bool] = []
    for call in (ledger.flush, ledger.close):
        caller = threading.Thread(target=lambda give_up: answers.append(give_up(10.0)), args=(call,))
        caller.start()
        clock.await_waiters()
        clock.advance(10.0)
        caller.join(30)

    assert answers == [False, False]
    assert ledger._thread.daemon
    go.set()
    ledger._thread.join(30)
    assert not ledger._thread.is_alive()


def test_a_flush_that_meets_the_end_returns(make: Make) -> None:
    """Whoever waits for a flush while the ledger is closed is woken."""
    ledger = make()
    answers: list[bool] = []
    callers = [threading.Thread(target=lambda: answers.append(ledger.flush())) for _ in range(4)]

    for caller in callers:
        caller.start()
    ledger.close()

    for caller in callers:
        caller.join(30)
    assert answers == [True] * 4


def test_emitting_never_waits_for_the_store(make: Make, clock: ManualClock) -> None:
    """While the store hangs, events are taken at once."""
    asked, go = threading.Event(), threading.Event()

    class Hanging(MemoryStore):
        def put(self, path: str, data: bytes) -> None:
            asked.set()
            assert go.wait(60)
            super().put(path, data)

    store = Hanging()
    ledger = make(store)
    ledger.emit(STARTED)
    assert asked.wait(30)

    events: list[Event] = [Warned(message=str(n)) for n in range(100)]
    for event in events:
        ledger.emit(event)
    go.set()

    assert ledger.close()
    assert [one.event for one in read_events(store, 12)] == [STARTED, *events]
