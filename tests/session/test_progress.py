"""What a session says while it waits: for a save in flight, and for a restore."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import pytest

from spotsafe import events as ev
from spotsafe.errors import SaveFailed
from spotsafe.events import Event
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.tensors import plan
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.memory import MemoryStore
from tests.session.places import train
from tests.session.rig import Program

T = TypeVar("T")
PATIENCE_S = 60.0


class SlowStore(WrappingStore):
    """Operations of one kind on checkpoints are held, after some that are not, until they are let go on."""

    def __init__(self, inner: MemoryStore, name: str) -> None:
        super().__init__(inner)
        self.name, self.left = name, 0
        self.stuck, self.free = threading.Event(), threading.Event()

    def hold(self, *, after: int) -> None:
        self.left = after
        self.stuck.clear()
        self.free.clear()

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.name == self.name and operation.path.startswith("checkpoints/"):
            self.left -= 1
            if self.left < 0:
                self.stuck.set()
                assert self.free.wait(PATIENCE_S), "nobody let it go on"
        return call()


class PassingClock(ManualClock):
    """Time passes whenever the training thread waits for a store that is stuck, and only then."""

    def __init__(self, store: SlowStore) -> None:
        super().__init__()
        self.store = store

    def wait(self, event: threading.Event, timeout: float) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return super().wait(event, timeout)
        end = time.monotonic() + PATIENCE_S
        while not event.wait(0.005):
            if self.store.stuck.is_set() and not self.store.free.is_set():
                self.advance(timeout)
                break
            assert time.monotonic() < end, "the store is not even slow"
        return event.is_set()


class Releasing:
    """A sink that lets a store go on at so many events of a kind."""

    def __init__(self, store: SlowStore, kind: type[Event], *, count: int) -> None:
        self.store, self.kind, self.left = store, kind, count

    def emit(self, event: Event) -> None:
        if isinstance(event, self.kind):
            self.left -= 1
            if self.left == 0:
                self.store.free.set()


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were a state of gigabytes."""
    monkeypatch.setattr(plan, "FIRST_FILE_BYTES", 64)


def test_a_wait_for_a_save_shows_how_much_is_written() -> None:
    """Not in its first seconds, then every five, and when it is over."""
    store, program = SlowStore(MemoryStore(), "put_large"), Program()
    store.hold(after=1)
    with program.session(
        store,
        save_every=None,
        clock=PassingClock(store),
        drain_timeout=timedelta(seconds=100),
        events=[program.sink, Releasing(store, ev.SaveAwaited, count=3)],
    ) as run:
        train(program, run, 1)
        run.save()
        run.wait()
    told = program.of(ev.SaveAwaited)
    [staged, *_] = program.of(ev.SaveStaged)
    files = [one.total_bytes for one in program.of(ev.FileWritten) if one.checkpoint == staged.checkpoint]
    assert len(files) > 2
    assert [(one.waited_s, one.limit_s, one.written_bytes, one.published, one.over) for one in told] == [
        (3.0, 100.0, files[0], False, False),
        (8.0, 100.0, files[0], False, False),
        (13.0, 100.0, files[0], False, False),
        (13.0, 100.0, sum(files), True, True),
    ]
    assert {(one.checkpoint, one.total_bytes) for one in told} == {(staged.checkpoint, staged.total_bytes)}
    assert staged.total_bytes == sum(files)


def test_leaving_says_what_it_waits_for(capfd: pytest.CaptureFixture[str]) -> None:
    """On the terminal, while it waits; and after `drain_timeout` it waits no more."""
    store, program = SlowStore(MemoryStore(), "put_large"), Program()
    run = program.session(
        store, save_every=None, clock=PassingClock(store), drain_timeout=timedelta(seconds=8)
    )
    with pytest.raises(SaveFailed, match="still being written"), run:
        train(program, run, 1)
    store.free.set()
    [line] = [line for line in capfd.readouterr().err.splitlines() if "waiting" in line]
    name = program.of(ev.SaveStarted)[0].checkpoint
    assert line.startswith(f"spotsafe: waiting for checkpoint {name}, 0 bytes of ")
    assert line.endswith(" written, 5 s at most")
    assert [(one.waited_s, one.over) for one in program.of(ev.SaveAwaited)] == [(3.0, False), (8.0, True)]
    assert program.of(ev.RunEnded)[0].in_flight


def test_a_short_wait_says_nothing() -> None:
    """As nearly all are."""
    program = Program()
    with program.session(MemoryStore(), save_every=1) as run:
        train(program, run, 3)
        run.wait()
    assert program.of(ev.SaveAwaited) == []


def test_a_restore_from_a_slow_store_is_followed() -> None:
    """By the session's clock, from the start of reading to its end."""
    inner = MemoryStore()
    first = Program()
    with first.session(inner) as run:
        train(first, run, 2)
    store, program = SlowStore(inner, "read_into"), Program()
    store.hold(after=2)
    with program.session(
        store,
        clock=PassingClock(store),
        events=[program.sink, Releasing(store, ev.RestoreProgress, count=2)],
    ) as run:
        train(program, run, 3)
    one, two, last = program.of(ev.RestoreProgress)
    assert [(event.waited_s, event.over) for event in (one, two, last)] == [
        (3.0, False),
        (8.0, False),
        (8.0, True),
    ]
    assert one.read_bytes <= two.read_bytes < last.read_bytes == last.total_bytes
    names = program.sink.names
    assert names[: names.index("RunStarted")] == [
        "RestoreStarted",
        *["RestoreProgress"] * 3,
        "RestoreVerified",
        "RestoreFinished",
    ]
    assert program.seen[0][0] == 2
