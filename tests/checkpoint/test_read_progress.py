"""How far a restore is can be followed, also when nothing moves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from spotsafe.checkpoint.blocks import finish
from spotsafe.checkpoint.candidates import look
from spotsafe.checkpoint.read_progress import ReadProgress
from spotsafe.errors import StorageUnavailable
from spotsafe.events import RestoreProgress, RestoreStarted, RestoreVerified
from spotsafe.reader import choose, load_verified
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.sinks import RecordingSink
from spotsafe.testing.states import write_checkpoint
from spotsafe.tracking import Tracker

T = TypeVar("T")


class SlowStore(WrappingStore):
    """Reads of data files wait until somebody lets them go on, and take so many seconds of the clock then."""

    def __init__(self, inner: MemoryStore, clock: ManualClock, *, seconds: float) -> None:
        super().__init__(inner)
        self.clock, self.seconds = clock, seconds
        self.open = threading.Event()
        self.fault: Exception | None = None

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.name == "read_into":
            assert self.open.wait(30), "nobody let it go on"
            self.clock.advance(self.seconds)
            if self.fault is not None:
                raise self.fault
        return call()


def told(sink: RecordingSink) -> list[tuple[int, bool]]:
    return [(event.read_bytes, event.over) for event in sink.of(RestoreProgress)]


def test_a_read_that_hangs_is_told_of_every_few_seconds() -> None:
    """By the thread that waits: whoever reads has other things to do, or does nothing at all."""
    clock, sink, free, tellers = ManualClock(), RecordingSink(), threading.Event(), set[int]()

    def emit(event: RestoreProgress) -> None:
        tellers.add(threading.get_ident())
        sink.emit(event)

    def wait() -> None:
        with ThreadPoolExecutor(1) as pool, ReadProgress("one", 10, emit=emit, clock=clock) as progress:
            finish([pool.submit(lambda: free.wait(30) and progress.add(10))], progress=progress)

    waiting = threading.Thread(target=wait)
    waiting.start()
    for count in (1, 2):
        clock.await_waiters()
        clock.advance(5.0)
        sink.wait_for(RestoreProgress, count=count)
    free.set()
    waiting.join(30)
    assert told(sink) == [(0, False), (0, False), (10, True)]
    assert [event.waited_s for event in sink.of(RestoreProgress)] == [5.0, 10.0, 10.0]
    assert tellers == {waiting.ident}


def test_what_goes_fast_is_not_told() -> None:
    """An ordinary restore has a beginning and an end."""
    sink, clock = RecordingSink(), ManualClock()
    with ThreadPoolExecutor(1) as pool, ReadProgress("one", 30, emit=sink.emit, clock=clock) as progress:
        finish([pool.submit(progress.add, 10) for _ in range(3)], progress=progress)
    assert sink.events == []


@pytest.fixture
def slow() -> SlowStore:
    """A checkpoint of four files, each of which takes 4 seconds to read."""
    inner, tracker = MemoryStore(), Tracker(warn=print)
    for name in "abcd":
        tracker.add(name, torch.ones(1000))
    write_checkpoint(inner, tracker.capture(session={}), max_file_bytes=9000)
    return SlowStore(inner, ManualClock(), seconds=4.0)


def test_a_restore_from_a_slow_store_shows_how_far_it_is(slow: SlowStore) -> None:
    """The bytes of whole blocks, of as many as the manifest says; and the end comes before what follows."""
    sink = RecordingSink()
    choice = choose(slow, look(slow))
    assert choice is not None
    slow.open.set()
    loaded = load_verified(slow, choice.candidate, emit=sink.emit, clock=slow.clock, threads=2)
    names = sink.names
    assert (names[0], names[-2:]) == ("RestoreStarted", ["RestoreProgress", "RestoreVerified"])
    total = sink.of(RestoreStarted)[0].total_bytes
    assert {event.total_bytes for event in sink.of(RestoreProgress)} == {total}
    amounts = [read for read, _ in told(sink)]
    assert amounts == sorted(amounts)
    assert told(sink)[-1] == (total, True)
    assert sink.of(RestoreVerified)[0].seconds == slow.clock.monotonic() - 1000.0
    assert len(loaded.saved.tensors) == 4


def test_a_restore_that_fails_is_over_too(slow: SlowStore) -> None:
    """Nothing looks as if it still went on."""
    sink = RecordingSink()
    choice = choose(slow, look(slow))
    assert choice is not None
    slow.fault = StorageUnavailable("no answer")
    slow.open.set()
    with pytest.raises(StorageUnavailable):
        load_verified(slow, choice.candidate, emit=sink.emit, clock=slow.clock)
    assert [over for _, over in told(sink)][-1] is True
