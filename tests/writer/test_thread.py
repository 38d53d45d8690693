"""The writer's thread: in the background, one save after the other, and never an error in the caller's face."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest

from spotsafe.checkpoint.catalog import candidates, look
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.clock import SystemClock
from spotsafe.errors import StorageFull
from spotsafe.events import SaveFailed
from spotsafe.storage.store import Store
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import StagedSave, stage, steps_of
from spotsafe.testing.sinks import RecordingSink
from spotsafe.writer import thread as thread_module
from spotsafe.writer.thread import NAME, WriterThread
from tests.interrupting import interrupt

PATIENCE_S = 30.0


def save(step: int) -> StagedSave:
    """A small save."""
    return stage(CheckpointName(1, step, step, "00000000"), {"w": np.full(3, step, dtype=np.float32)})


class Gate:
    """A store whose writes wait until the test opens it."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.reached = threading.Event()
        self.open = threading.Event()
        self.store: Store = FailingStore(self.inner, fail=self._wait)

    def _wait(self, name: str, path: str, number: int) -> None:
        if name == "put_large":
            self.reached.set()
            assert self.open.wait(PATIENCE_S)


@pytest.fixture
def made() -> Iterator[Callable[..., WriterThread]]:
    """Make writers that are closed at the end, so that no thread is left."""
    writers: list[WriterThread] = []

    def make(
        store: Store, *, sink: RecordingSink | None = None, clock: ManualClock | None = None
    ) -> WriterThread:
        writer = WriterThread(store, emit=(sink or RecordingSink()).emit, clock=clock or SystemClock())
        writers.append(writer)
        return writer

    yield make
    for writer in writers:
        assert writer.drain(PATIENCE_S)
        writer.close()
    assert not [thread for thread in threading.enumerate() if thread.name == NAME]


Make = Callable[..., WriterThread]


def test_saves_in_the_background(made: Make) -> None:
    """A save is written by another thread, and its result comes once."""
    store = MemoryStore()
    writer = made(store)
    one = save(1)
    writer.submit(one.job, one.arena)
    assert writer.drain(PATIENCE_S)
    assert writer.idle
    [result] = writer.poll()
    assert result.published
    assert writer.poll() == []
    assert steps_of(list(candidates(store, look(store)))) == [1]


def test_submit_does_not_wait(made: Make) -> None:
    """While the store hangs, the caller goes on; the thread is a daemon of its own name."""
    gate = Gate()
    writer = made(gate.store)
    one = save(1)
    writer.submit(one.job, one.arena)
    assert gate.reached.wait(PATIENCE_S)
    assert not writer.idle
    assert writer.poll() == []
    [thread] = [thread for thread in threading.enumerate() if thread.name == NAME]
    assert thread.daemon
    gate.open.set()


def test_no_thread_without_a_save(made: Make) -> None:
    """A writer that is never used costs no thread, drains at once and closes."""
    writer = made(MemoryStore())
    assert writer.drain(0)
    assert writer.drain()
    assert not [thread for thread in threading.enumerate() if thread.name == NAME]


def test_one_save_waits_behind_another(made: Make) -> None:
    """They are written in order; a third is a mistake of the caller, and changes nothing."""
    gate = Gate()
    writer = made(gate.store)
    one, two, three = save(1), save(2), save(3)
    writer.submit(one.job, one.arena)
    writer.submit(two.job, two.arena)
    with pytest.raises(RuntimeError, match="2 others are in flight"):
        writer.submit(three.job, three.arena)
    assert [writer.has(each.job.name) for each in (one, two, three)] == [True, True, False]
    assert not writer.drain(0, left=1)
    gate.open.set()
    assert writer.drain(PATIENCE_S, left=1)
    assert writer.drain(PATIENCE_S)
    writer.submit(three.job, three.arena)
    assert writer.drain(PATIENCE_S)
    assert [result.name.step for result in writer.poll()] == [1, 2, 3]


def test_the_one_behind_a_failed_save_is_written(made: Make) -> None:
    """Each has a result of its own, and each result comes before its save is out of flight."""
    gate = Gate()
    writer = made(FailingStore(gate.store, fail=lambda name, path, number: _down(name, path)))
    one, two = save(1), save(2)
    writer.submit(one.job, one.arena)
    writer.submit(two.job, two.arena)
    gate.open.set()
    assert writer.drain(PATIENCE_S, left=1)
    results = writer.poll()
    assert writer.drain(PATIENCE_S)
    results += writer.poll()
    assert [(result.name.step, result.published) for result in results] == [(1, False), (2, True)]


def _down(name: str, path: str) -> Exception | None:
    return StorageFull("full") if name == "put_large" and "-s000000001-" in path else None


def test_ctrl_c_anywhere_in_submit(made: Make) -> None:
    """A save is then in the writer's hands, or nobody's: none is in flight for ever, and the next one is written."""
    for number in itertools.count():
        store = MemoryStore()
        writer = made(store)
        one, two = save(1), save(2)
        submit = partial(writer.submit, one.job, one.arena)
        interrupted = interrupt(submit, at=number, inside=("submit", "add", "_start"))
        assert writer.drain(PATIENCE_S)
        writer.submit(two.job, two.arena)
        assert writer.drain(PATIENCE_S)
        steps = [result.name.step for result in writer.poll() if result.published]
        assert steps in ([1, 2], [2])
        assert steps_of(list(candidates(store, look(store)))) == sorted(steps, reverse=True)
        if not interrupted:
            break
    assert number > 30


def test_drain_ends_by_the_clock(made: Make) -> None:
    """Drain gives up when the time is over, by the clock that was handed in, and the save goes on."""
    gate = Gate()
    clock = ManualClock()
    writer = made(gate.store, clock=clock)
    one = save(1)
    writer.submit(one.job, one.arena)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(writer.drain(60.0)))
    waiting.start()
    clock.await_waiters()
    clock.advance(61.0)
    waiting.join(PATIENCE_S)
    assert answers == [False]
    assert not writer.drain(-1.0)
    gate.open.set()
    assert writer.drain()
    assert writer.poll()[0].published


def test_drain_without_a_limit_waits_for_hours(made: Make) -> None:
    """Without a limit, drain waits as long as the save takes."""
    gate = Gate()
    clock = ManualClock()
    writer = made(gate.store, clock=clock)
    one = save(1)
    writer.submit(one.job, one.arena)
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(writer.drain()))
    waiting.start()
    for _ in range(3):
        clock.await_waiters()
        clock.advance(3601.0)
    assert answers == []
    gate.open.set()
    waiting.join(PATIENCE_S)
    assert answers == [True]


def test_failed_save_is_a_result(made: Make) -> None:
    """What fails in the background is in the result; the next save works."""
    inner = MemoryStore()
    full = [True]
    store = FailingStore(
        inner,
        fail=lambda name, path, number: StorageFull("full") if full[0] and name == "put_large" else None,
    )
    writer = made(store)
    for step in (1, 2):
        one = save(step)
        writer.submit(one.job, one.arena)
        assert writer.drain(PATIENCE_S)
        full[0] = False
    failed, good = writer.poll()
    assert isinstance(failed.error, StorageFull)
    assert not failed.published
    assert good.published


@pytest.mark.parametrize("error", [MemoryError(), SystemExit(3), RuntimeError("bug")])
def test_whatever_a_store_raises_ends_in_a_result(made: Make, error: BaseException) -> None:
    """Lack of memory, an exit and a bug neither end the thread nor leave the caller waiting."""

    class Broken(MemoryStore):
        """Raises once."""

        broken = True

        def put_large(self, path: str, data: memoryview) -> None:
            if self.broken:
                self.broken = False
                raise error
            super().put_large(path, data)

    writer = made(Broken())
    for step in (1, 2):
        one = save(step)
        writer.submit(one.job, one.arena)
        assert writer.drain(PATIENCE_S)
    failed, good = writer.poll()
    assert failed.error is error
    assert good.published


def test_even_our_own_error_ends_in_a_result(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the uploader itself raises, which it must not, the caller still gets a result and an event."""
    sink = RecordingSink()
    writer = made(MemoryStore(), sink=sink)
    problem = RuntimeError("must not happen")

    def broken(*task: object) -> None:
        raise problem

    monkeypatch.setattr(writer._uploader, "run", broken)
    one = save(1)
    writer.submit(one.job, one.arena)
    assert writer.drain(PATIENCE_S)
    [result] = writer.poll()
    assert result.error is problem
    assert sink.of(SaveFailed)


def test_no_thread_to_be_had(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system grants no thread the save fails, and a later one may work."""
    sink = RecordingSink()
    store = MemoryStore()
    writer = made(store, sink=sink)

    class NoThread(threading.Thread):
        """Cannot be started."""

        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(thread_module.threading, "Thread", NoThread)
        one = save(1)
        writer.submit(one.job, one.arena)
    assert writer.idle
    [result] = writer.poll()
    assert isinstance(result.error, RuntimeError)
    assert sink.of(SaveFailed)
    one = save(2)
    writer.submit(one.job, one.arena)
    assert writer.drain(PATIENCE_S)
    assert writer.poll()[0].published


def test_nothing_starts_after_close(made: Make) -> None:
    """A closed writer takes no save; closing again is no error."""
    store = MemoryStore()
    writer = made(store)
    one = save(1)
    writer.submit(one.job, one.arena)
    assert writer.drain(PATIENCE_S)
    writer.close()
    writer.close()
    two = save(2)
    with pytest.raises(RuntimeError, match="closed"):
        writer.submit(two.job, two.arena)
    assert [result.name.step for result in writer.poll()] == [1]


def test_close_does_not_wait_for_a_hanging_save(made: Make) -> None:
    """Closing while the store hangs returns at once; the save that runs may still end."""
    gate = Gate()
    writer = made(gate.store)
    one = save(1)
    writer.submit(one.job, one.arena)
    assert gate.reached.wait(PATIENCE_S)
    writer.close()
    assert not writer.idle
    gate.open.set()
    assert writer.drain(PATIENCE_S)
    [thread] = [thread for thread in threading.enumerate() if thread.name == NAME] or [None]
    if thread is not None:
        thread.join(PATIENCE_S)
    assert writer.poll()[0].published


def test_arena_is_let_go(made: Make) -> None:
    """Between two saves the writer holds no memory of the last one."""
    writer = made(MemoryStore())
    one = save(1)
    memory = bytearray(one.arena)
    writer.submit(one.job, memoryview(memory))
    assert writer.drain(PATIENCE_S)
    memory += b"x"  # BufferError while anything still looks at it
