"""Saves that are due while there is no memory for them: none is lost, none is queued."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest

import spotsafe
from spotsafe import assembling, events as ev
from spotsafe.policy.staging_memory import SlotChoice
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from tests.session.places import manifests, steps_there
from tests.session.rig import Program
from tests.session.test_ways_out import Announcer

T = TypeVar("T")


class Gate(WrappingStore):
    """A store whose data files arrive only while it is open."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.open = threading.Event()
        self.open.set()

    def around(self, operation: Operation, call: Callable[[], T]) -> T:
        if operation.name == "put_large":
            assert self.open.wait(30), "nobody opened the gate"
        return call()


@pytest.fixture(autouse=True)
def one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is memory for one save; `test_two_slots` has more."""
    monkeypatch.setattr(assembling, "choose_slots", lambda needed, **_: SlotChoice(count=1, size=needed))


@pytest.fixture
def gate() -> Gate:
    return Gate(MemoryStore())


def train(program: Program, run: spotsafe.Run, at: dict[int, Callable[[], Any]], *, until: int) -> None:
    """Steps that do something at the end of some of their bodies, before the safe point."""
    for step, batch in run.steps(program.loader, until=until):
        program.train(step, batch)
        at.get(step, lambda: None)()


def test_the_end_of_an_epoch_is_saved_when_the_writer_is_free(gate: Gate) -> None:
    """Four steps an epoch: the end of the second meets a busy writer, and the next epoch's end is far away."""
    program = Program()

    def reopen() -> None:
        gate.open.set()
        run.wait()

    with program.session(gate, save_every="epoch", keep=10) as run:
        train(program, run, {3: gate.open.clear, 8: reopen}, until=11)
    assert program.checkpoint_steps() == [4, 9, 11]
    assert [(one.step, one.reason) for one in program.of(ev.SavePostponed)] == [(8, "interval")]


def test_however_often_it_was_due_it_is_one_save(gate: Gate) -> None:
    """Nothing is queued, and it is said once for each time that the writer was busy."""
    program = Program()

    def reopen() -> None:
        gate.open.set()
        run.wait()

    with program.session(gate, save_every=1, keep=10) as run:
        at = {
            0: gate.open.clear,
            4: reopen,
            5: run.wait,
            6: lambda: (run.wait(), gate.open.clear()),
            8: reopen,
        }
        train(program, run, at, until=9)
    assert program.checkpoint_steps() == [1, 5, 6, 7, 9]
    assert [one.step for one in program.of(ev.SavePostponed)] == [2, 8]


def test_what_was_asked_for_waits_for_the_writer(gate: Gate) -> None:
    """Its metrics are of this state and of no later one."""
    program = Program()

    def ask() -> None:
        threading.Timer(0.2, gate.open.set).start()
        run.save(metrics={"loss": 1.0})

    with program.session(gate, save_every=1, keep=10) as run:
        train(program, run, {0: gate.open.clear, 1: ask}, until=2)
    found = manifests(gate.inner)
    assert {step: dict(one.metrics) for step, one in found.items()} == {1: {}, 2: {"loss": 1.0}}
    assert program.of(ev.SavePostponed) == []
    assert program.of(ev.Warned) == []


def test_what_was_asked_for_waits_once_and_is_told_when_it_is_put_off(gate: Gate) -> None:
    """A store that hangs stops training for `drain_timeout`, not at every step from then on."""
    program = Program()

    def reopen() -> None:
        gate.open.set()
        run.wait()

    with program.session(gate, save_every=None, keep=10, drain_timeout=timedelta(seconds=0.3)) as run:
        at = {
            0: lambda: (gate.open.clear(), run.save()),
            1: lambda: run.save(metrics={"loss": 1.0}),
            4: reopen,
            5: run.wait,
        }
        train(program, run, at, until=6)
    found = manifests(gate.inner)
    assert {step: dict(one.metrics) for step, one in found.items()} == {1: {}, 5: {"loss": 1.0}, 6: {}}
    assert found[5].reason == "asked"
    assert [(one.step, one.reason) for one in program.of(ev.SavePostponed)] == [(2, "asked")]
    [warned] = program.of(ev.Warned)
    assert "the save of step 2 is put off" in warned.message


def test_three_failed_saves_do_not_cost_a_notice_its_save() -> None:
    """They are found at the very safe point at which the notice is acted on; the store has recovered since."""
    ill = [True]

    def fail(name: str, path: str, number: int) -> Exception | None:
        down = ill[0] and name == "put_large"
        return spotsafe.StorageUnavailable(f"{path}: no answer", path=path) if down else None

    store = MemoryStore()
    program = Program()
    with (
        pytest.raises(spotsafe.Reclaimed),
        program.session(FailingStore(store, fail=fail), save_every=1) as run,
    ):
        for step, batch in run.steps(program.loader, until=10):
            program.train(step, batch)
            run._attempt.saver.drain(30)
            if step == 3:
                ill[0] = False
                Announcer(run).notice()
    assert len(run.failures) == 3
    assert steps_there(store) == [4]


def test_a_notice_ends_the_waiting_of_what_was_asked_for(gate: Gate) -> None:
    """The run leaves at this very safe point, and the final save has the metrics."""
    store, program = gate.inner, Program()

    def ask() -> None:
        threading.Timer(0.2, Announcer(run).notice).start()
        threading.Timer(0.7, gate.open.set).start()
        run.save(metrics={"loss": 1.0})

    with pytest.raises(spotsafe.Reclaimed), program.session(gate, save_every=1, keep=10) as run:
        train(program, run, {0: gate.open.clear, 1: ask}, until=6)
    assert [step for step, _, _ in program.seen] == [0, 1]
    found = manifests(store)
    assert {step: (one.reason, dict(one.metrics)) for step, one in found.items()} == {
        1: ("interval", {}),
        2: ("notice", {"loss": 1.0}),
    }
    assert program.of(ev.Warned) == []


def test_a_second_signal_cuts_short_the_last_wait(gate: Gate) -> None:
    """The first one leaves as long as the drain takes; nobody waits for it after somebody has lost patience."""
    program = Program()

    def announce() -> None:
        announcer = Announcer(run)
        announcer.notice(seconds=None)
        threading.Timer(0.3, announcer.notice, kwargs={"seconds": 0.2}).start()

    began = time.monotonic()
    try:
        with pytest.raises(spotsafe.Reclaimed), program.session(gate, save_every=1) as run:
            train(program, run, {0: gate.open.clear, 1: announce}, until=6)
        assert 0.3 < time.monotonic() - began < 30  # `drain_timeout` is a minute
    finally:
        gate.open.set()
    assert program.of(ev.RunEnded)[0].outcome == "reclaimed"


def test_a_save_that_was_put_off_is_made_at_the_end(gate: Gate) -> None:
    """Also where no safe point comes any more."""
    program = Program()
    with program.session(gate, save_every="epoch", keep=10) as run:
        train(program, run, {3: gate.open.clear}, until=8)
        assert [one.step for one in program.of(ev.SavePostponed)] == [8]
        gate.open.set()
    assert steps_there(gate.inner) == [8, 4]
