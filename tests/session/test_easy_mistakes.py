"""Mistakes that are easily made and would cost something only much later: each is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.testing.memory import MemoryStore
from tests.session.places import train
from tests.session.rig import Program


def warnings(program: Program) -> list[str]:
    return [event.message for event in program.of(ev.Warned)]


@pytest.mark.parametrize("form", ["range", "until", "epochs"])
def test_a_limit_that_an_earlier_epoch_used_up_is_an_error(form: str) -> None:
    """Limits are totals: the second epoch would be empty, and the end would look like success."""
    program = Program(4, 2)

    def inner(run: spotsafe.Run) -> None:
        if form == "range":
            for _ in run.range(2):
                pass
        elif form == "until":
            for step, batch in run.steps(program.loader, until=2):
                program.train(step, batch)
        else:
            for _ in run.epochs(2):
                pass

    with (
        pytest.raises(spotsafe.RunError, match="totals over all epochs"),
        program.session(MemoryStore()) as run,
    ):
        for _ in run.epochs(3):
            inner(run)


def test_a_limit_that_grows_and_passes_in_each_epoch_are_fine() -> None:
    """What the error says to write works, also after a resume at every place."""

    def body(program: Program, run: spotsafe.Run, counted: list[tuple[int, int]], cut: int | None) -> None:
        for epoch in run.epochs(3):
            for step in run.range(2 * (epoch + 1)):
                counted.append((epoch, step))
                if len(counted) == cut:
                    return
            for step, batch in run.steps(program.loader, epochs=2):
                program.train(step, batch)

    whole: list[tuple[int, int]] = []
    with Program(4, 2).session(MemoryStore(), save_every=1) as run:
        body(Program(4, 2), run, whole, None)
    assert whole == [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)]
    for cut in range(1, 7):
        store, parts = MemoryStore(), []
        with Program(4, 2).session(store, save_every=1) as run:
            body(Program(4, 2), run, parts, cut)
        rest: list[tuple[int, int]] = []
        with Program(4, 2).session(store, save_every=1) as run:
            body(Program(4, 2), run, rest, None)
        assert sorted({*parts, *rest}) == whole, cut
        assert rest[-1:] == whole[-1:] or cut == 6


def test_a_forgotten_optimizer_is_told_at_its_first_step() -> None:
    """It costs nothing until the first resume, and then nobody sees why the loss jumps."""
    program = Program()
    with spotsafe.session(MemoryStore(), model=program.model, watch=None, events=program.sink) as run:
        for step, batch in run.steps(program.loader, until=3):
            program.train(step, batch)
    assert (
        sum("AdamW updates tracked parameters but is not tracked" in text for text in warnings(program)) == 1
    )


def test_an_optimizer_of_something_else_is_no_ones_business() -> None:
    """Only parameters that are tracked make an optimizer ours."""
    program = Program()
    other = torch.nn.Parameter(torch.ones(1))
    elsewhere = torch.optim.SGD([other], lr=0.1)
    with program.session(MemoryStore()) as run:
        for step, batch in run.steps(program.loader, until=2):
            program.train(step, batch)
            other.grad = torch.ones(1)
            elsewhere.step()
    assert warnings(program) == []


def test_a_forgotten_scheduler_is_told_before_the_first_step() -> None:
    """Its optimizer gives it away."""
    program = Program()
    tracked = {"model": program.model, "optimizer": program.optimizer}
    with spotsafe.session(MemoryStore(), watch=None, events=program.sink, **tracked) as run:
        for step, batch in run.steps(program.loader, until=2):
            program.train(step, batch)
    assert sum("no scheduler of it is tracked" in text for text in warnings(program)) == 1


def test_training_outside_of_the_runs_loops_is_told() -> None:
    """The loop header was forgotten: nothing is counted, nothing saved."""
    program = Program()
    with program.session(MemoryStore()):
        for step, batch in enumerate(program.loader):
            program.train(step, batch)
    assert sum("in no loop of the run" in text for text in warnings(program)) == 1


def test_values_that_stop_being_finite_are_told_once() -> None:
    """When the first such checkpoint is published, not only at the next start; and a start from one says so."""
    store = MemoryStore()
    program = Program()
    with program.session(store, save_every=1) as run:
        for step, batch in run.steps(program.loader, until=4):
            program.train(step, batch)
            with torch.no_grad():
                program.model.first.bias.fill_(torch.nan)
            run.wait()
    assert sum("not finite" in text for text in warnings(program)) == 1

    again = Program()
    with again.session(store, save_every=None) as run:
        train(again, run)
    assert sum("although it is unhealthy" in text for text in warnings(again)) == 1


def test_a_checkpoint_of_another_run_in_the_folder_is_not_resumed(tmp_path: Path) -> None:
    """A copy from elsewhere, newer by its number: passed over, told, and the run goes on with its own."""
    ours, theirs = Program(), Program(seed=5)
    with ours.session(tmp_path / "ours", save_every=None) as run:
        train(ours, run)
    for _ in range(3):
        with Program(seed=5).session(tmp_path / "theirs", save_every=None) as run:
            for step, batch in run.steps(theirs.loader, until=6 + run.attempt):
                theirs.train(step, batch)
    [newest] = [one for one in (tmp_path / "theirs/checkpoints").iterdir() if one.name.startswith("a000003")]
    newest.rename(tmp_path / "ours/checkpoints" / newest.name)

    again = Program()
    with again.session(tmp_path / "ours", save_every=None) as run:
        assert run.step == 6
        assert again.weights() == ours.weights()
    assert ["it is of run" in event.reason for event in again.of(ev.CheckpointPassedOver)] == [True]
