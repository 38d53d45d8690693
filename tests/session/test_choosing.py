"""What retention keeps over a run's life, and which checkpoint is the best: read from storage, never remembered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

import spotsafe
from spotsafe import events as ev
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from tests.session.places import published, steps_there, train, trained
from tests.session.rig import Program


def evaluated(store: Any, losses: Sequence[float], **options: Any) -> Program:
    """An attempt that saves each step with the next of `losses`."""
    program = Program()
    with program.session(store, **{"save_every": None, "keep": 2, **options}) as run:
        done = run.step
        for step, batch in run.steps(program.loader, until=done + len(losses)):
            program.train(step, batch)
            run.save(metrics={"loss": losses[step - done]})
            run.wait()
    return program


def newest_first(*steps: int) -> list[int]:
    return sorted(steps, reverse=True)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (1, {7, 8}),  # two at least: one may turn out to be damaged
        (2, {7, 8}),
        (3, {6, 7, 8}),
        (spotsafe.latest(4), {5, 6, 7, 8}),
        (spotsafe.best("loss", mode="min"), {2, 7, 8}),
        (spotsafe.best("loss", mode="max"), {1, 7, 8}),
        (spotsafe.best("loss", mode="min", n=3), {2, 4, 6, 7, 8}),
        (spotsafe.latest(1) | spotsafe.best("loss", mode="min", n=2), {2, 4, 7, 8}),
        (spotsafe.best("accuracy", mode="max"), {7, 8}),
    ],
    ids=str,
)
def test_keep_says_what_remains(keep: Any, kept: set[int]) -> None:
    """After eight saves, on storage: NaN and infinity are never best, however the metric is ordered."""
    store = MemoryStore()
    evaluated(store, [9.0, 1.0, math.nan, 2.0, -math.inf, 3.0, math.inf, 4.0], keep=keep)
    assert steps_there(store) == newest_first(*kept)
    folders = {path.split("/")[1] for path in store.objects if path.startswith("checkpoints/")}
    assert folders == {str(name) for name in published(store)}


def test_every_keeps_the_first_of_each_period() -> None:
    """A checkpoint an hour for the last three hours, by the clock of the run."""
    store, clock = MemoryStore(), ManualClock(wall=1_700_000_000.0 // 3600 * 3600)
    program = Program()
    keep = spotsafe.latest(1) | spotsafe.every(hours=1, keep=3)
    with program.session(store, save_every=1, keep=keep, clock=clock) as run:
        for step, batch in run.steps(program.loader, until=9):
            program.train(step, batch)
            run.wait()
            clock.advance(1500)  # 25 minutes
    # Saved at minute 25, 50, 75, ... 225 of the run: the first of hours 1, 2 and 3, and the newest two.
    assert steps_there(store) == newest_first(3, 5, 8, 9)


def test_what_is_kept_does_not_depend_on_memory() -> None:
    """Best of the attempt before stays best; a better one takes its place, also in a new process."""
    store = MemoryStore()
    keep = spotsafe.latest(1) | spotsafe.best("loss", mode="min")
    evaluated(store, [5.0, 1.0, 4.0, 3.0], keep=keep)
    assert steps_there(store) == newest_first(2, 3, 4)
    evaluated(store, [2.0, 6.0, 6.0], keep=keep)
    assert steps_there(store) == newest_first(2, 6, 7)
    evaluated(store, [0.5, 6.0, 6.0], keep=keep)
    assert steps_there(store) == newest_first(8, 9, 10)


def test_the_one_resumed_from_stays_until_there_are_two_newer() -> None:
    """Whatever keep= says: the first checkpoint after a resume may be the one that turns out to be bad."""
    store = MemoryStore()
    trained(store, until=4, save_every=1, keep=1)
    assert steps_there(store) == [4, 3]
    program = Program()
    with program.session(store, save_every=1, keep=1) as run:
        for step, batch in run.steps(program.loader, until=7):
            program.train(step, batch)
            run.wait()
            there = steps_there(store)
            assert (4 in there) is (step < 6), (step, there)
    assert steps_there(store) == [7, 6]


def test_deletes_that_are_refused_stop_nothing() -> None:
    """A bucket without the right to delete: a warning, and saves go on."""
    store = MemoryStore()

    def fail(name: str, path: str, number: int) -> Exception | None:
        return spotsafe.StorageRefused(f"{path}: no", path=path) if name == "delete" else None

    program = evaluated(FailingStore(store, fail=fail), [1.0] * 4, keep=1)
    assert program.checkpoint_steps() == [1, 2, 3, 4]
    assert steps_there(store) == [4, 3, 2, 1]
    assert program.of(ev.DeleteRefused)
    assert program.of(ev.SaveFailed) == []
    assert program.of(ev.RunEnded)[0].outcome == "finished"


def test_an_early_stop_goes_on_from_the_newest_and_loads_the_best() -> None:
    """Early stopping: the loop ends at its body, the run is finished, and the best is there under its name."""
    store = MemoryStore()
    losses = [3.0, 1.0, 2.0, 2.5, 2.6]
    program = Program()
    best_weights: list[float] = []
    keep = spotsafe.latest(1) | spotsafe.best("loss", mode="min")
    with program.session(store, save_every=None, keep=keep) as run:
        for step, batch in run.steps(program.loader, until=100):
            program.train(step, batch)
            run.save(metrics={"loss": losses[step]})
            run.wait()
            if step == 1:
                best_weights = program.weights()
            if step == 4:
                run.stop("no better for three steps")
    assert program.of(ev.RunEnded)[0].outcome == "finished"
    assert steps_there(store) == newest_first(2, 4, 5)

    again = Program()
    with again.session(store) as run:
        train(again, run, 100)
    assert again.seen == []

    from spotsafe.checkpoint.catalog import resolve
    from spotsafe.reader import load_verified

    best = resolve(store, "best")
    assert best.name.step == 2
    saved = load_verified(store, best).saved.tensors
    assert [
        v for k in Program().model.state_dict() for v in saved[f"model.{k}"].flatten().tolist()
    ] == best_weights


def test_a_best_that_finds_nothing_is_told_of_once() -> None:
    """A slip in a name would cost the best checkpoint, and nothing else gives it away before it is wanted."""
    program = evaluated(MemoryStore(), [3.0, 2.0, 1.0], keep=spotsafe.best("lost", mode="min"))
    warned = [event.message for event in program.of(ev.Warned)]
    assert len(warned) == 1
    assert "best('lost') finds nothing so far" in warned[0]
    assert "did you mean 'loss'?" in warned[0]
    program = evaluated(MemoryStore(), [3.0, 2.0, 1.0], keep=spotsafe.best("loss", mode="min"))
    assert program.of(ev.Warned) == []
