"""Copies that run beside training: every published checkpoint holds the state of one single step."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe import copying, events as ev
from spotsafe.overlap import Overlap
from spotsafe.tensors import beside
from spotsafe.tensors.beside import BesideCopy, Watched
from spotsafe.testing.memory import MemoryStore
from tests.session.numbered import SIZE, Numbered, Numbering, numbers_of
from tests.session.places import manifests, train
from tests.session.rig import Cut, Program


class SlowCopy:
    """Holds every copy beside training back until somebody waits for it: whatever is written before that, tears it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied: list[int] = []
        """Bytes of each call."""
        waited_for, copy, wait = threading.Event(), beside._copy, BesideCopy.wait

        def late(target: int, source: int, nbytes: int) -> Any:
            assert threading.current_thread().name == beside.NAME
            assert waited_for.wait(60)
            self.copied.append(nbytes)
            return copy(target, source, nbytes)

        def let_go(self: BesideCopy) -> None:
            waited_for.set()
            wait(self)
            waited_for.clear()

        monkeypatch.setattr(beside, "_copy", late)
        monkeypatch.setattr(BesideCopy, "wait", let_go)


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowCopy:
    """Of every test here."""
    return SlowCopy(monkeypatch)


def each_step(steps: int, first: int = 1) -> dict[int, set[float]]:
    """What a run of so many steps has to publish."""
    return {step: {float(step)} for step in range(steps, first - 1, -1)}


def test_a_copy_goes_on_until_the_optimizer_steps(slow: SlowCopy) -> None:
    """What an optimizer has earned is copied behind the safe point, and every checkpoint is one step's."""
    run = Numbered()
    staged: list[int] = []
    run.train(before=lambda _: staged.append(len(run.sink.of(ev.SaveStaged))))
    assert staged == [0, 1, 2, 3, 3, 4], (
        "from the fourth save on, the copy of a step ends in the body of the next"
    )
    assert sum(slow.copied) == 3 * 4 * SIZE * 4
    assert run.published == each_step(6)
    assert not run.discarded
    assert not run.warnings


def test_this_file_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the barrier and the judgement checkpoints are torn, as this file would see."""
    monkeypatch.setattr(Overlap, "_before_step", lambda *_: None)
    monkeypatch.setattr(Watched, "moved", lambda _: [])
    monkeypatch.setattr(Watched, "differing", lambda _: [])
    monkeypatch.setattr(BesideCopy, "differing", lambda _: [])
    run = Numbered()
    run.train()
    assert any(numbers != {float(step)} for step, numbers in run.published.items())


def test_overlap_can_be_switched_off(slow: SlowCopy) -> None:
    """Then everything is copied at the safe point."""
    run = Numbered(overlap=False)
    run.train()
    assert not slow.copied
    assert run.published == each_step(6)


def test_every_fiftieth_is_a_probe(slow: SlowCopy) -> None:
    """A program that takes to ``.data`` later is found out some time."""
    run = Numbered(keep=2)
    run.train(51)
    assert sum(slow.copied) == (51 - 3 - 1) * 4 * SIZE * 4


# -- writes between the safe point and the step --------------------------------------------------------------------


def touch(*tensors: torch.Tensor) -> None:
    """A write that torch counts, and that leaves the values."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.mul_(1.0)


def test_a_counted_write_in_a_probe_is_waited_for_from_then_on(slow: SlowCopy) -> None:
    """As of SAM, and of schedule-free optimizers that go to evaluation. No save is lost for it."""
    run = Numbered()
    run.train(before=lambda _: touch(run.model.first))
    assert run.published == each_step(6)
    assert not run.discarded
    assert "model.first was written before the optimizer's step" in run.warnings
    assert sum(slow.copied) == 3 * 3 * SIZE * 4, "the others are still copied beside training"


def test_a_counted_write_later_discards_the_copy() -> None:
    """The save is made again at the next safe point, as a new one."""
    run, bodies = Numbered(), []

    def write_in_the_sixth(_: spotsafe.Run) -> None:
        bodies.append(len(bodies))
        if len(bodies) == 6:
            touch(run.model.second)

    run.train(8, before=write_in_the_sixth)
    assert run.discarded == [5]
    assert run.published == {step: {float(step)} for step in (8, 7, 6, 4, 3, 2, 1)}


def test_the_metrics_of_a_discarded_save_are_kept() -> None:
    """What was asked for is in the save that is made instead."""
    run = Numbered(save_every=None)

    def ask(session: spotsafe.Run) -> None:
        session.save(metrics={"loss": float(session.step + 1)})
        if session.step == 5:
            touch(run.model.second)

    run.train(8, before=ask)
    assert run.discarded == [5]
    again = manifests(run.store)[6]
    assert again.reason == "asked"
    assert again.metrics == {"loss": 6.0}


def test_writes_to_many_end_the_trust() -> None:
    """After three copies in vain all are waited for, and that is said."""
    run, bodies = Numbered(), []

    def write(_: spotsafe.Run) -> None:
        bodies.append(len(bodies))
        if len(bodies) > 4:
            touch([run.model.first, run.model.second, *averages(run)][len(run.discarded) % 4])

    run.train(14, before=write)
    assert len(run.discarded) == 3
    assert run.published == {step: {float(step)} for step in range(14, 0, -1) if step not in run.discarded}
    assert "training waits for every copy: 3 copies were overtaken by writes" in run.warnings


def averages(run: Numbered) -> list[torch.Tensor]:
    return [state["average"] for state in run.optimizer.state.values()]


def test_an_uncounted_write_is_found_by_the_first_probe(slow: SlowCopy) -> None:
    """As of ``.data.clamp_`` at the top of the body. No save is torn before it is found, nor after."""
    run = Numbered()
    run.train(before=lambda _: run.model.first.data.add_(0.25))
    assert not slow.copied
    assert not run.discarded
    assert "model.first was written through .data" in run.warnings
    assert all(len(numbers_of(run.store, step, "model.first")) == 1 for step in range(1, 7))


def test_an_uncounted_write_of_all_of_a_tensor_is_seen_at_any_time() -> None:
    """As of an average that is swapped in every thousand steps, which no probe happens to see."""
    run, bodies = Numbered(), []

    def swap_in_the_sixth(_: spotsafe.Run) -> None:
        bodies.append(len(bodies))
        if len(bodies) == 6:
            run.model.first.data.add_(0.25)

    run.train(8, before=swap_in_the_sixth, after=lambda _: run.model.first.data.floor_())
    assert run.discarded == [5]
    assert run.published == {step: {float(step)} for step in (8, 7, 6, 4, 3, 2, 1)}
    assert "model.first was written through .data" in run.warnings


def test_an_uncounted_write_after_wait_staged_is_fine(slow: SlowCopy) -> None:
    """The copy is over by then, and stays trusted."""
    run = Numbered()

    def write(session: spotsafe.Run) -> None:
        session.wait_staged()
        run.model.first.data.add_(1.0).sub_(1.0)

    run.train(before=write)
    assert run.published == each_step(6)
    assert not run.discarded
    assert slow.copied


def test_memory_that_is_exchanged_is_still_read(slow: SlowCopy) -> None:
    """As of an average that is swapped in through ``.data``: what is copied is the memory of the safe point."""
    run, other = Numbered(), torch.full((SIZE,), -1.0)

    def swap(_: spotsafe.Run) -> None:
        mine = run.model.first.data
        run.model.first.data = other
        run.model.first.data = mine
        run.model.second.data = run.model.second.data.clone()  # the old memory is freed, but for the copy

    run.train(before=swap)
    assert run.published == each_step(6)
    assert not run.discarded
    assert slow.copied


def test_a_step_that_nobody_counts_waits_too(slow: SlowCopy) -> None:
    """As of fused optimizers, two on the same parameters: the first step of any of them is the barrier."""
    run = Numbered(uncounted=True)
    second = torch.optim.SGD(run.model.parameters(), lr=1.0)

    def step_second(_: spotsafe.Run) -> None:
        second.step()  # without gradients: it only is a step
        run.model.first.data.add_(0.5).sub_(0.5)
        run.model.second.data.add_(0.5).sub_(0.5)

    run.train(before=step_second, second=second)
    assert run.published == each_step(6)
    assert not run.discarded
    assert slow.copied


def test_what_an_optimizer_without_hooks_holds_is_waited_for(slow: SlowCopy) -> None:
    """Nobody is told before it steps; said once."""

    class Own:
        def __init__(self, parameter: torch.nn.Parameter) -> None:
            self.param_groups: list[dict[str, Any]] = [{"params": [parameter]}]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    run = Numbered()
    run.train(own=Own(run.model.first))
    assert run.published == each_step(6)
    assert sum(slow.copied) == 3 * 3 * SIZE * 4
    assert run.warnings.count("Own runs none of torch's optimizer hooks") == 1


def test_a_body_without_a_step_earns_nothing(slow: SlowCopy) -> None:
    """As when `GradScaler` skips it: the next save is copied while training waits."""
    run, bodies = Numbered(), []
    real = run.optimizer.step

    def now_and_then() -> None:
        bodies.append(len(bodies))
        if len(bodies) % 2:
            real()

    run.optimizer.step = now_and_then
    run.train(12)
    steps = {step: {float((step + 1) // 2)} for step in range(12, 0, -1)}
    assert run.published == steps
    assert sum(slow.copied) == 3 * 4 * SIZE * 4, "of six that were earned, three were probes"


def test_a_table_that_the_forward_scales_is_waited_for(slow: SlowCopy) -> None:
    """``Embedding(max_norm=...)`` writes its weight in the forward pass."""
    run = Numbered()
    table = torch.nn.Embedding(512, SIZE // 512, max_norm=1.0)
    run.optimizer = Numbering([*run.model.parameters(), table.weight])

    def look_up(_: spotsafe.Run) -> None:
        table(torch.arange(8))

    run.train(before=look_up, table=table)
    assert not run.discarded
    assert not run.warnings
    assert sum(slow.copied) == 3 * 5 * SIZE * 4, "all but the table"


def test_an_average_of_the_model_is_copied_beside_training(slow: SlowCopy) -> None:
    """It follows the optimizer, so it is written behind the step."""
    run = Numbered()
    average = torch.optim.swa_utils.AveragedModel(run.model, avg_fn=lambda _, now, __: now.clone())
    run.train(after=lambda _: average.update_parameters(run.model), average=average)
    assert run.published == each_step(6)
    assert sum(slow.copied) == 3 * 6 * SIZE * 4


def test_buffers_are_copied_at_the_safe_point(slow: SlowCopy) -> None:
    """A forward pass writes them."""
    run = Numbered()
    run.model.register_buffer("seen", torch.zeros(SIZE))

    def forward(session: spotsafe.Run) -> None:
        run.model.seen.fill_(float(session.step + 1))

    run.train(before=forward)
    assert run.published == each_step(6)
    assert not run.discarded
    assert sum(slow.copied) == 3 * 4 * SIZE * 4


def test_a_compiled_step_is_seen(slow: SlowCopy) -> None:
    """torch runs the hooks of a compiled optimizer too."""
    run = Numbered()
    run.optimizer.step = torch.compile(run.optimizer.step, backend="eager")
    run.train()
    assert run.published == each_step(6)
    assert slow.copied


# -- where a copy has to be over -----------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", ["break", "error", "end", "interruptible", "own"])
def test_every_way_out_of_a_body_waits(leave: str, slow: SlowCopy) -> None:
    """Code behind it may write as it likes, uncounted; what was being copied is published."""
    run = Numbered()
    with (
        contextlib.suppress(Cut),
        spotsafe.session(run.store, model=run.model, optimizer=run.optimizer, **run.options) as session,
    ):
        if leave == "own":
            for _ in range(6):
                run.optimizer.step()
                session.safe_point()
                session.wait()
        for step in session.range(6):
            if step == 5 and leave == "break":
                break
            if step == 5 and leave == "error":
                raise Cut
            if step == 5 and leave == "interruptible":
                for _ in session.interruptible([1]):
                    write_uncounted(run)
                    restore_uncounted(run)
            run.optimizer.step()
            session.wait()
        if leave == "end":
            write_uncounted(run)
    assert slow.copied
    assert all(len(numbers) == 1 for numbers in run.published.values())
    assert 5 in run.published
    assert not run.discarded


@pytest.mark.parametrize("leave", ["break", "error"])
def test_code_behind_a_loop_that_was_left_may_write(leave: str, slow: SlowCopy) -> None:
    """Early stopping at the top of a body, and then an average swapped in: the last checkpoint is one step's."""
    run = Numbered()
    with spotsafe.session(run.store, model=run.model, optimizer=run.optimizer, **run.options) as session:
        with contextlib.suppress(Cut):
            for step in session.range(8):
                if step == 5 and leave == "break":
                    break
                if step == 5:
                    raise Cut
                run.optimizer.step()
                session.wait()
        write_uncounted(run)
    assert slow.copied
    assert run.published == each_step(5)
    assert not run.discarded


def test_a_loop_of_ones_own_is_copied_at_its_safe_points(slow: SlowCopy) -> None:
    """Nobody sees its end, behind which the program may write."""
    run = Numbered()
    with spotsafe.session(run.store, model=run.model, optimizer=run.optimizer, **run.options) as session:
        for _ in range(6):
            session.wait()
            run.optimizer.step()
            session.safe_point()
        write_uncounted(run)
    assert run.published == each_step(6)
    assert not slow.copied


@pytest.mark.parametrize("step", [2, 5], ids=["probe", "copy"])
def test_memory_that_goes_to_other_processes(step: int) -> None:
    """As of a model that is handed to workers: its storages move, and the memory of before is nobody's."""
    run = Numbered()

    def hand_over(session: spotsafe.Run) -> None:
        if session.step == step:
            run.model.share_memory()

    run.train(before=hand_over)
    assert run.discarded == ([] if step == 2 else [5])
    assert run.published == {one: {float(one)} for one in range(6, 0, -1) if one not in run.discarded}
    assert "through .data" not in run.warnings


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("where", ["copy", "handing over", "sink"])
def test_an_interrupted_save_is_made_at_the_end(
    where: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person's Ctrl-C, after which the program goes on to its end: nothing takes that step for saved."""
    run = Numbered(overlap=overlap)
    interrupted: list[int] = []

    def interrupt(*_: Any, **__: Any) -> None:
        if not interrupted and run.optimizer.param_groups[0]["params"][0][0] == 5:
            interrupted.append(5)
            raise KeyboardInterrupt

    class Impatient:
        def emit(self, event: ev.Event) -> None:
            if isinstance(event, ev.SaveStaged):
                interrupt()

    if where == "sink":
        run.options["events"] = [run.sink, Impatient()]
    elif where == "handing over":  # between two lines, where nothing looks after it
        give = copying.Copier._hand_over
        monkeypatch.setattr(
            copying.Copier, "_hand_over", lambda *args, **more: (interrupt(), give(*args, **more))
        )
    else:
        real = copying.stage
        monkeypatch.setattr(copying, "stage", lambda *args, **more: (interrupt(), real(*args, **more)))
    with (
        spotsafe.session(run.store, model=run.model, optimizer=run.optimizer, **run.options) as session,
        contextlib.suppress(KeyboardInterrupt),
    ):
        for _ in session.range(8):
            run.optimizer.step()
            session.wait()
    assert interrupted
    assert run.published == each_step(5)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_no_copy_goes_on_behind_an_interrupt(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while its thread starts, and once more while that is waited for: the next save lies in the same memory."""
    run, left = Numbered(), [times]
    start, call_off = BesideCopy.start, BesideCopy.call_off

    def interrupted(self: BesideCopy) -> None:
        start(self)
        if run.optimizer.param_groups[0]["params"][0][0] == 5 and left[0] == times:
            left[0] -= 1
            raise KeyboardInterrupt

    def impatient(self: BesideCopy) -> None:
        if left[0]:
            left[0] -= 1
            raise KeyboardInterrupt
        call_off(self)

    monkeypatch.setattr(BesideCopy, "start", interrupted)
    monkeypatch.setattr(BesideCopy, "call_off", impatient)
    with spotsafe.session(run.store, model=run.model, optimizer=run.optimizer, **run.options) as session:
        with pytest.raises(KeyboardInterrupt):
            for _ in session.range(8, name="first"):
                run.optimizer.step()
                session.wait()
        assert any(one.name == beside.NAME for one in threading.enumerate()) == (times == 3)
        for _ in session.range(3, name="second"):
            run.optimizer.step()
            session.wait()
    assert left == [0]
    assert run.published == {step: {float(step)} for step in (8, 7, 6, 4, 3, 2, 1)}


def write_uncounted(run: Numbered) -> None:
    for parameter in run.model.parameters():
        parameter.data.add_(100.0)


def restore_uncounted(run: Numbered) -> None:
    for parameter in run.model.parameters():
        parameter.data.sub_(100.0)


def test_a_forked_child_that_steps_does_not_wait(slow: SlowCopy) -> None:
    """It has no thread that copies, and the run is its parent's."""
    run = Numbered()

    def fork(_: spotsafe.Run) -> None:
        child = os.fork()
        if child == 0:
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    run.train(before=fork)
    assert run.published == each_step(6)
    assert slow.copied


def test_a_step_in_another_thread_waits(slow: SlowCopy) -> None:
    """What comes after the copy is for the thread of the loop."""
    run = Numbered()
    real = run.optimizer.step

    def elsewhere() -> None:
        thread = threading.Thread(target=real)
        thread.start()
        thread.join()

    run.optimizer.step = elsewhere
    run.train()
    assert run.published == each_step(6)
    assert slow.copied


def test_no_thread_to_be_had(monkeypatch: pytest.MonkeyPatch, slow: SlowCopy) -> None:
    """Then training waits, and nothing is lost."""

    def refuse(_: BesideCopy) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(BesideCopy, "start", refuse)
    run = Numbered()
    run.train()
    assert run.published == each_step(6)
    assert not slow.copied


def test_a_resume_is_bit_for_bit_the_same(slow: SlowCopy) -> None:
    """Losses and weights after an interruption in the middle of a copy are those of a run without."""
    whole = Program(width=SIZE)
    with whole.session(MemoryStore(), overlap=False) as run:
        train(whole, run, 9)
    store = MemoryStore()
    for until in (6, 9):
        program = Program(width=SIZE)
        with program.session(store) as run:
            for step, batch in run.steps(program.loader, until=until):
                program.train(step, batch)
                run.wait()
    assert slow.copied
    assert program.weights() == whole.weights()
    assert program.seen == whole.seen[6:]
