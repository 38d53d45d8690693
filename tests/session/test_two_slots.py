"""With memory for two saves one is staged while the other is being written."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe import assembling, events as ev
from spotsafe.checkpoint.candidates import candidates, look
from spotsafe.checkpoint.verify import verify
from spotsafe.copying import Copier
from spotsafe.errors import StorageUnavailable, UnsupportedState
from spotsafe.loading import decode, with_selected
from spotsafe.policy.staging_memory import SlotChoice
from spotsafe.slots import Slots
from spotsafe.storage.local import LocalStore
from spotsafe.storage.store import Store
from spotsafe.tensors.frozen import FrozenTensors
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.writer.process import can_run
from tests.session.places import manifests, published, steps_there
from tests.session.rig import Program
from tests.session.test_busy_writer import Gate, train
from tests.session.test_frozen import FROZEN, Job
from tests.session.test_ways_out import Announcer
from tests.writer.processes import the_writer, writers

needs_process = pytest.mark.skipif(not can_run(), reason="this system cannot have a writer process")


@pytest.fixture(autouse=True)
def two_slots(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever else lies in the memory of this machine; and a runtime folder of its own."""
    monkeypatch.setattr(assembling, "choose_slots", lambda needed, **_: SlotChoice(count=2, size=needed))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
    yield
    assert not writers()


@pytest.fixture
def gate() -> Gate:
    return Gate(MemoryStore())


class Counting:
    """A large tensor whose every element is the number of the step."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1 << 16)

    def numbers(self, store: Store) -> dict[int, set[float]]:
        """Step -> the numbers that its checkpoint holds; each checkpoint is whole."""
        found = {}
        for one in candidates(store, look(store)):
            if one.manifest is not None:
                assert verify(store, one.name) == []
                values = with_selected(
                    store, one.name.step, lambda opened: decode(opened, dict(opened.contents.values))
                )
                found[one.name.step] = {values["weight"].min().item(), values["weight"].max().item()}
        return found


def test_a_second_save_is_staged_while_the_first_is_written(gate: Gate) -> None:
    """A third is put off, and made when there is room again."""
    program, count = Program(), Counting()

    def each(step: int) -> None:
        count.weight.fill_(step + 1)
        {0: gate.open.clear, 4: lambda: (gate.open.set(), run.wait())}.get(step, lambda: None)()

    with program.session(gate, save_every=1, keep=10, state={"weight": count.weight}) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            each(step)
    assert [(one.step, one.reason) for one in program.of(ev.SavePostponed)] == [(3, "interval")]
    assert count.numbers(gate.inner) == {step: {step} for step in (1, 2, 5, 6)}
    assert program.checkpoint_steps() == [1, 2, 5, 6]


@needs_process
def test_a_process_writes_them_in_order(tmp_path: Path) -> None:
    """It stands still for three steps: two of them are saved all the same, each with the numbers of its own."""
    count, store, staged = Counting(), LocalStore(tmp_path / "run"), list[int]()
    with spotsafe.session(
        tmp_path / "run", writer="process", save_every=1, keep=10, watch=None, state={"weight": count.weight}
    ) as run:
        for step in run.range(12):
            count.weight.fill_(step + 1)
            if step == 3:
                run.wait()
                pid = the_writer()
                os.kill(pid, signal.SIGSTOP)
            elif step == 6:
                os.kill(pid, signal.SIGCONT)
                run.wait()
                staged = sorted(count.numbers(store))
    assert staged[-2:] == [4, 5]
    numbers = count.numbers(store)
    assert numbers == {step: {step} for step in numbers}
    assert {4, 5, 7, 12} <= numbers.keys()


def test_the_first_save_finds_its_memory_touched(gate: Gate) -> None:
    """Behind the first step, if nothing is saved there, it is planned: the optimizer has its state by then."""
    program, kept = Program(width=1500), list[Any]()
    with program.session(gate, save_every=None) as run:
        for step, batch in run.steps(program.loader, until=3):
            program.train(step, batch)
            kept.append(list(run._attempt.saver._slots._unused))  # type: ignore[union-attr] # it is started
        run.save()
        run.wait()
        [arena] = run._attempt.saver._slots._unused  # type: ignore[union-attr] # as above
        size = sum(one.numel() * 4 for one in program.model.parameters())
        assert (kept[0], kept[1], kept[2]) == ([], [arena], [arena])
        assert arena.size > 3 * size


def test_what_cannot_be_saved_is_told_by_the_save() -> None:
    """Not by the look ahead of it: a program that saves nothing never hears of it."""
    program = Program()
    with pytest.raises(UnsupportedState), program.session(MemoryStore(), save_every=None) as run:
        for step, batch in run.steps(program.loader, until=3):
            program.train(step, batch)
            run.values["late"] = object() if step == 0 else run.values["late"]
            if step == 2:
                assert run._attempt.saver.ready  # type: ignore[union-attr] # it is started
                run.save()


def failing(*steps: int) -> FailingStore:
    """A store that takes no data of these steps."""

    def fail(name: str, path: str, number: int) -> Exception | None:
        ill = name == "put_large" and any(f"-s{step:09}-" in path for step in steps)
        return StorageUnavailable(f"{path}: no answer", path=path) if ill else None

    return FailingStore(MemoryStore(), fail=fail)


def test_a_failed_save_costs_the_one_behind_it_nothing() -> None:
    """Its state is held by the second: the end has nothing to save again."""
    store = failing(1)
    program, gate = Program(), Gate(store)

    class Opening:
        """Lets the writer go on when both are staged."""

        def emit(self, event: ev.Event) -> None:
            if isinstance(event, ev.SaveStaged) and event.checkpoint.split("-")[1] == "s000000002":
                assert run._attempt.saver.busy  # type: ignore[union-attr] # it is started
                gate.open.set()

    with program.session(gate, keep=10, events=[program.sink, Opening()]) as run:
        train(program, run, {0: gate.open.clear}, until=2)
    assert steps_there(store) == [2]
    assert [one.step for one in program.of(ev.SaveStarted)] == [1, 2]
    assert len(run.failures) == 1


def test_the_second_of_two_fails() -> None:
    """Then the first is what is held, and the end is saved again."""
    store = failing(2)
    program, gate = Program(), Gate(store)
    with program.session(gate, keep=10) as run:
        train(program, run, {0: gate.open.clear, 2: gate.open.set}, until=3)
    assert steps_there(store) == [3, 1]
    [line] = run.failures
    assert "-s000000002-" in line


def test_a_notice_is_saved_at_once(gate: Gate) -> None:
    """While the save before it is still being written."""
    program = Program()

    def close() -> None:
        run.wait()
        gate.open.clear()

    class Opening:
        """Lets the writer go on when the last save is staged."""

        def emit(self, event: ev.Event) -> None:
            if isinstance(event, ev.SaveStaged) and event.checkpoint.split("-")[1] == "s000000003":
                assert run._attempt.saver.busy  # type: ignore[union-attr] # it is started
                gate.open.set()

    with (
        pytest.raises(spotsafe.Reclaimed),
        program.session(gate, save_every=1, keep=10, events=[program.sink, Opening()]) as run,
    ):
        train(program, run, {1: close, 2: lambda: Announcer(run).notice()}, until=6)
    assert {step: one.reason for step, one in manifests(gate.inner).items()} == {
        1: "interval",
        2: "interval",
        3: "notice",
    }


def test_a_state_that_has_grown_waits_for_what_is_in_flight(gate: Gate) -> None:
    """The state of the optimizer comes with its first step: what was asked for then is not put off for it."""
    program = Program(width=2000)
    with program.session(gate, save_every=None, keep=10) as run:
        gate.open.clear()
        run.save()
        for step, batch in run.steps(program.loader, until=2):
            program.train(step, batch)
            if step == 0:
                threading.Timer(0.2, gate.open.set).start()
                run.save(metrics={"loss": 1.0})
    found = manifests(gate.inner)
    assert {step: dict(one.metrics) for step, one in found.items()} == {0: {}, 1: {"loss": 1.0}, 2: {}}


# -- what is frozen ---


def test_no_save_refers_to_what_is_not_published(gate: Gate) -> None:
    """Behind the save that stages what is frozen nothing is begun; behind others that refer to it, it is."""
    job, store = Job(gate, writer="thread", keep=10), gate.inner
    with job.session as run:
        for step in run.range(8):
            job.model(torch.randn(2, 600)).sum().backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            if step in {2, 3, 6}:
                gate.open.set()
                run.wait()
            if step in {0, 3}:
                gate.open.clear()
    assert [one.step for one in job.sink.of(ev.SavePostponed)] == [2, 6]
    found = [one for one in candidates(store, look(store)) if one.manifest is not None]
    assert [one.name.step for one in found] == [8, 7, 5, 4, 3, 1]
    for one in found:
        assert verify(store, one.name) == []
        assert {each.checkpoint for each in one.manifest.references} == (  # type: ignore[union-attr] # see above
            set() if one is found[-1] else {str(found[-1].name)}
        )
    assert sum(FROZEN in path for path in store.objects) == 1


def test_a_failed_save_with_what_is_frozen_is_made_up_for() -> None:
    """The next one stages it all, and refers to nothing that is not there."""
    store = failing(1)
    Job(store, writer="thread", keep=10).run(4)
    assert steps_there(store) == [4, 3, 2]
    assert all(verify(store, one) == [] for one in published(store))


# -- what is cut off ---


def test_a_slot_that_an_interrupt_has_left_behind_is_used_again(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come anywhere, and a program may go on behind it."""
    program, taken = Program(), Slots.take
    ill = [True, True, False]

    def interrupted(self: Slots, save: Any) -> Any:
        lease = taken(self, save)
        if ill.pop(0):
            raise KeyboardInterrupt
        return lease

    with program.session(gate, save_every=None, keep=10) as run:
        monkeypatch.setattr(Slots, "take", interrupted)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run.save()
        assert len(run._attempt.saver._slots.saves) == 1  # type: ignore[union-attr] # it is started
        run.save()
        run.wait()
        monkeypatch.setattr(Slots, "take", taken)
    assert len(steps_there(gate.inner)) >= 1


def test_what_is_frozen_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a save that staged it is given away, and twice more while that is put right."""
    store, ill, forgotten = MemoryStore(), [3], list[Any]()
    job, submit, forget = Job(store, writer="thread", keep=10), Copier._submit, FrozenTensors.forget_staged

    def impatient(go_on: Any, *args: Any, **more: Any) -> Any:
        if ill[0]:
            ill[0] -= 1
            raise KeyboardInterrupt
        return go_on(*args, **more)

    monkeypatch.setattr(Copier, "_submit", lambda *args, **more: impatient(submit, *args, **more))
    monkeypatch.setattr(
        FrozenTensors, "forget_staged", lambda *args: (forgotten.append(args), impatient(forget, *args))
    )
    with job.session as run:
        with pytest.raises(KeyboardInterrupt):
            for _ in run.range(5, name="first"):
                job.optimizer.step()
        assert (ill, len(forgotten)) == ([0], 2)
        for _ in run.range(2, name="second"):
            job.optimizer.step()
            run.wait()
    assert steps_there(store) == [3, 2]


@needs_process
def test_both_are_made_up_for_when_the_writer_dies(tmp_path: Path) -> None:
    """Nothing counts as failed, and the next safe point saves."""
    program = Program()
    with program.session(tmp_path / "run", writer="process", keep=10) as run:
        for step, batch in run.steps(program.loader, until=7):
            program.train(step, batch)
            if step == 2:
                run.wait()
                pid = the_writer()
                os.kill(pid, signal.SIGSTOP)
            elif step == 4:
                os.kill(pid, signal.SIGKILL)
                run.wait()
    [event] = program.of(ev.WriterReplaced)
    assert [name.split("-")[1] for name in event.lost] == ["s000000003", "s000000004"]
    assert run.failures == ()
    assert program.checkpoint_steps()[-1] == 7
