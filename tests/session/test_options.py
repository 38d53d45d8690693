"""The options of a session, and what a run can be asked, over several attempts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.errors import EXIT_RESTART_LOOP
from spotsafe.ledger.reading import read_end
from spotsafe.policy.restarts import Limits
from spotsafe.storage.local import LocalStore
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.sinks import RecordingSink
from tests.session.places import attempts, manifests, run_of_two, start_fails, steps_there, train, trained
from tests.session.rig import MANY_STARTS, Cut, Program

# -- resume ---------------------------------------------------------------------------------------------------------


def test_must_needs_a_checkpoint() -> None:
    """An empty folder is an error, and stays empty; with a checkpoint it is like auto."""
    store = MemoryStore()
    assert 'resume="must"' in str(start_fails(store, spotsafe.CheckpointNotFound, resume="must"))
    trained(store)
    with Program().session(store, resume="must") as run:
        assert run.step == 4


def test_never_wants_none() -> None:
    """A folder with checkpoints is an error that names the newest; an attempt without one is no obstacle."""
    store, _, newer = run_of_two()
    assert str(newer) in str(start_fails(store, spotsafe.RunInUse, resume="never"))
    empty = MemoryStore()
    with Program().session(empty, resume="never"):
        pass
    with Program().session(empty, resume="never") as run:
        assert run.attempt == 2


# -- init_from ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pretrained(tmp_path: Path) -> str:
    """A run of its own: steps 2 and 4 on disk, step 2 being the best."""
    url = str(tmp_path / "pretrained")
    program = Program(seed=5)
    with program.session(url, save_every=None, keep=10) as run:
        for step, batch in run.steps(program.loader, until=4):
            program.train(step, batch)
            if step in {1, 3}:
                run.save(metrics={"loss": float(step)})
    return url


def weights_at(url: str, step: int) -> list[float]:
    program = Program(seed=5)
    return next(weights for at, weights in _trace(program) if at == step)


def _trace(program: Program) -> list[tuple[int, list[float]]]:
    found = []
    with program.session(MemoryStore("memory://trace")) as run:
        for step, batch in run.steps(program.loader, until=4):
            program.train(step, batch)
            found.append((step + 1, program.weights()))
    return found


@pytest.mark.parametrize(("selector", "step"), [("", 4), ("@latest", 4), ("@best", 2), ("@2", 2)])
def test_init_from_takes_the_weights_of_another_run(pretrained: str, selector: str, step: int) -> None:
    """Weights only: the optimizer, the positions and the generators start afresh."""
    program = Program(seed=9)
    with program.session(MemoryStore(), init_from=f"{pretrained}{selector}") as run:
        (started,) = program.of(ev.RunStarted)
        assert started.initialized == ("model",)
        assert started.initialized_from is not None
        assert started.initialized_from.startswith(f"{pretrained}@a000001-s{step:09}-")
        assert program.weights() == weights_at(pretrained, step)
        assert (run.step, run.resumed_from, run.values) == (0, None, {})
        assert not program.optimizer.state
        assert program.scheduler.last_epoch == 0
        train(program, run, 2)
    assert [step for step, _, _ in program.seen] == [0, 1]


def test_init_from_all_takes_the_optimizer_too(pretrained: str) -> None:
    """Everything that is tracked and found there; positions still start afresh."""
    program = Program(seed=9)
    with program.session(MemoryStore(), init_from=spotsafe.InitFrom(pretrained, what="all")) as run:
        assert run.step == 0
        assert program.scheduler.last_epoch == 4
        assert len(program.optimizer.state) == 4


def test_init_from_counts_only_while_there_is_no_checkpoint(pretrained: str) -> None:
    """The command stays the same over all attempts; a missing source does not matter any more then."""
    store = MemoryStore()
    program = Program()
    with program.session(store, init_from=pretrained) as run:
        train(program, run, 2)
    again = Program()
    with again.session(store, init_from=f"{pretrained}-deleted") as run:
        assert run.step == 2
        assert again.of(ev.RunStarted)[0].initialized_from is None
        assert again.weights() == program.weights()


@pytest.mark.parametrize("source", ["-missing", "@77", "@best:accuracy"])
def test_init_from_a_source_that_is_not_there(pretrained: str, source: str) -> None:
    """An error that says which option and what is there; no start with random weights, and no attempt is claimed."""
    program, store = Program(), MemoryStore()
    before = program.weights()
    with (
        pytest.raises(spotsafe.CheckpointNotFound, match=f"init_from='{pretrained}{source}'"),
        program.session(store, init_from=f"{pretrained}{source}"),
    ):
        pytest.fail("it started")
    assert program.weights() == before
    assert not store.objects


def test_init_from_whose_shapes_differ(pretrained: str) -> None:
    """Every mismatch is named, nothing was changed, and no attempt is claimed."""
    program, store = Program(width=6), MemoryStore()
    before = program.weights()
    with (
        pytest.raises(
            spotsafe.StateMismatch, match=r"init_from=[^:]*: [\s\S]*model\.first\.weight"
        ) as caught,
        program.session(store, init_from=pretrained),
    ):
        pytest.fail("it started")
    assert len(caught.value.problems) == 4
    assert program.weights() == before
    assert not store.objects


def test_init_from_that_finds_nothing_of_the_program(pretrained: str) -> None:
    """Other names are no partial success."""
    net, store = torch.nn.Linear(1, 1), MemoryStore()
    with (
        pytest.raises(spotsafe.StateMismatch, match=r"net.* are tracked.*model"),
        spotsafe.session(store, watch=None, net=net, init_from=pretrained),
    ):
        pytest.fail("it started")
    assert not store.objects


# -- save_every -----------------------------------------------------------------------------------------------------


def epochs_of(program: Program, run: spotsafe.Run, count: int) -> None:
    for _ in run.epochs(count):
        for step, batch in run.steps(program.loader):
            program.train(step, batch)
            run.wait()


@pytest.mark.parametrize(
    ("save_every", "steps"),
    [
        (1, [1, 2, 3, 4, 5, 6, 7, 8, 8]),  # the last step, and the end of its epoch
        (3, [3, 6, 8]),
        ("epoch", [4, 8]),
        (None, [8]),
        (spotsafe.every_steps(3) | spotsafe.every_epoch(), [3, 4, 6, 8]),
        (spotsafe.every_steps(100), [8]),
    ],
    ids=str,
)
def test_save_every_decides_at_which_steps(save_every: Any, steps: list[int]) -> None:
    """Two epochs of four steps; the end of the run is always saved."""
    program = Program()
    with program.session(MemoryStore(), save_every=save_every) as run:
        epochs_of(program, run, 2)
    assert program.checkpoint_steps() == steps


def test_every_epoch_saves_once_an_epoch_behind_its_tail() -> None:
    """Not at the last step too: what the tail changed is in it, and no checkpoint is written for nothing."""
    store = MemoryStore()
    program = Program()
    with pytest.raises(Cut), program.session(store, save_every="epoch") as run:
        for epoch in run.epochs(3):
            for step, batch in run.steps(program.loader):
                program.train(step, batch)
            if epoch == 2:
                raise Cut
            run.wait()  # on a busy machine the save before may still be written, and this one would be left out
            run.values["tail"] = epoch
    assert program.checkpoint_steps() == [4, 8]
    with Program().session(store) as run:
        assert run.values == {"tail": 1}
    flat = Program()
    with flat.session(MemoryStore(), save_every="epoch") as run:
        train(flat, run, 10)
    assert flat.checkpoint_steps() == [4, 8, 10]


@pytest.mark.parametrize(
    ("save_every", "steps"), [(timedelta(seconds=25), [3, 6, 9, 10]), ("auto", [6, 10])], ids=["time", "auto"]
)
def test_save_every_by_time_goes_by_the_clock(save_every: Any, steps: list[int]) -> None:
    """Ten seconds a step; auto saves after the first minute, and then by what a save costs."""
    clock = ManualClock()
    program = Program()
    with program.session(MemoryStore(), save_every=save_every, clock=clock) as run:
        for step, batch in run.steps(program.loader, until=10):
            program.train(step, batch)
            clock.advance(10)
            run.wait()
    assert program.checkpoint_steps() == steps


def test_the_interval_counts_on_over_a_resume() -> None:
    """Every third step is every third step of the run, not of the attempt."""
    store = MemoryStore()
    trained(store, until=4, save_every=3)
    again = trained(store, until=10, save_every=3)
    assert again.checkpoint_steps() == [6, 9, 10]


# -- asking for a save ----------------------------------------------------------------------------------------------


def test_a_save_in_the_body_is_made_at_its_end_with_its_metrics() -> None:
    """Asked for twice they are joined; the reason is in the manifest."""
    store = MemoryStore()
    program = Program()
    with program.session(store, save_every=None, keep=10) as run:
        for step, batch in run.steps(program.loader, until=4):
            if step == 1:
                run.save(metrics={"loss": 1, "kept": 1.0})
                run.save(metrics={"loss": torch.tensor(0.5)})
            program.train(step, batch)
    found = manifests(store)
    assert list(found) == [2, 4]
    assert found[2].metrics == {"loss": 0.5, "kept": 1.0}
    assert (found[2].reason, found[4].reason) == ("asked", "end")
    assert found[4].metrics == {}


def test_a_save_in_the_tail_is_of_the_whole_epoch() -> None:
    """Behind the inner loop, before the end of the epoch's body: the tail's changes are in it."""
    store = MemoryStore()
    program = Program()
    with program.session(store, save_every=None, keep=10) as run:
        for epoch in run.epochs(2):
            for step, batch in run.steps(program.loader):
                program.train(step, batch)
            run.save(metrics={"accuracy": epoch / 10})
            run.values["tail"] = epoch
    assert {step: dict(one.metrics) for step, one in manifests(store).items()} == {
        4: {"accuracy": 0.0},
        8: {"accuracy": 0.1},
    }
    with Program().session(store, resume="must") as run:
        assert run.values == {"tail": 1}


def test_a_save_outside_the_loops_is_made_at_once() -> None:
    """Before, between and behind them; the metrics of an evaluation after training belong to the end."""
    store = MemoryStore()
    program = Program()
    with program.session(store, save_every=None, keep=10) as run:
        run.save()
        run.wait()
        assert steps_there(store) == [0]
        train(program, run, 3, wait=False)
        run.save(metrics={"accuracy": 0.25})
        run.wait()
        assert steps_there(store) == [3, 0]
        for _ in run.range(2):
            pass
        run.save(metrics={"accuracy": 0.75})
    found = manifests(store)
    assert list(found) == [0, 3, 5]
    assert [one.metrics.get("accuracy") for one in found.values()] == [None, 0.25, 0.75]


def test_wait_returns_when_all_is_published_and_raises_what_failed() -> None:
    """Behind it the checkpoint exists; a failure does not wait for the end of the block."""
    from spotsafe.testing.faults import FailingStore

    broken = [False]

    def fail(name: str, path: str, number: int) -> Exception | None:
        return (
            spotsafe.StorageRefused(f"{path}: no", path=path) if broken[0] and name == "put_large" else None
        )

    store = MemoryStore()
    program = Program()
    with program.session(FailingStore(store, fail=fail), save_every=None, keep=10) as run:
        for step, batch in run.steps(program.loader, until=3):
            program.train(step, batch)
            if step == 1:
                run.wait()
                assert steps_there(store) == [1]
            run.save()
        run.wait()
        assert steps_there(store)[0] == 3
        broken[0] = True
        run.save()
        with pytest.raises(spotsafe.SaveFailed, match="no") as caught:
            run.wait()
        assert len(caught.value.failures) == 1
        assert len(run.failures) == 1
        run.wait()


# -- what can be read -----------------------------------------------------------------------------------------------


def test_what_can_be_read_over_attempts() -> None:
    """Step, epoch, id, attempt, resumed_from, replaying and notice, in the first attempt and the second."""
    store = MemoryStore()

    def life(cut: int | None) -> list[tuple[Any, ...]]:
        program, told = Program(), []
        try:
            with program.session(store, save_every=3, keep=10) as run:
                told.append((run.id, run.attempt, run.resumed_from, run.step, run.notice))
                for epoch in run.epochs(2):
                    for step, batch in run.steps(program.loader):
                        assert run.epoch == epoch
                        told.append((step, run.step, run.replaying))
                        if step == cut:
                            raise Cut
                        program.train(step, batch)
                        run.wait()
        except Cut:
            pass
        return told

    first = life(5)
    assert first[0][1:] == (1, None, 0, None)
    assert len(first[0][0]) == 8
    assert first[1:] == [(step, step, False) for step in range(6)]
    second = life(None)
    assert second[0][:2] == (first[0][0], 2)
    assert second[0][2].startswith("a000001-s000000003-")
    assert second[0][3:] == (3, None)
    assert second[1:] == [(step, step, step < 5) for step in range(3, 8)]


def test_the_epoch_of_a_loader_without_epochs_loop() -> None:
    """run.steps(loader, until=...) goes through the loader again and again; run.epoch tells which time it is."""
    program = Program()
    with program.session(MemoryStore()) as run:
        epochs = [run.epoch for _ in run.steps(program.loader, until=9)]
        assert run.epoch == 0
    assert epochs == [0, 0, 0, 0, 1, 1, 1, 1, 2]


# -- restart loops --------------------------------------------------------------------------------------------------


def fails(store: Any, **options: Any) -> None:
    """An attempt that dies by an error of its own before it has saved anything."""
    program = Program()
    with (
        pytest.raises(ZeroDivisionError),
        program.session(store, save_every=None, **options) as run,
    ):
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            raise ZeroDivisionError


def test_three_failures_without_a_checkpoint_stop_the_fourth_start(capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 93, the reason on the console and in the ledger; the person who starts again gets a start."""
    store = MemoryStore()
    for _ in range(3):
        fails(store, restart_limits=None)
    capfd.readouterr()
    with (
        pytest.raises(spotsafe.RestartLoop, match="attempts 1 to 3 failed") as caught,
        Program().session(store, restart_limits=None),
    ):
        pytest.fail("it started")
    assert caught.value.code == EXIT_RESTART_LOOP
    assert not isinstance(caught.value, Exception)
    said = capfd.readouterr().err
    assert said.count("attempts 1 to 3 failed by an error of their own") == 1
    assert "stopped as a restart loop" in said
    end = read_end(store, 4)
    assert end is not None
    assert (end.outcome, end.code) == ("restart_loop", EXIT_RESTART_LOOP)
    with Program().session(store, restart_limits=None) as run:
        assert run.attempt == 5


def test_a_checkpoint_or_a_higher_limit_is_no_restart_loop() -> None:
    """A run that gets on may fail as often as it likes; and the limit is an option."""
    store = MemoryStore()
    for _ in range(2):
        fails(store, restart_limits=None)
    program = Program()
    with pytest.raises(ZeroDivisionError), program.session(store, save_every=1, restart_limits=None) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            run.wait()
            if step:
                raise ZeroDivisionError
    fails(store, restart_limits=None)
    fails(store, restart_limits=None)
    fails(store, restart_limits=None)
    fails(store, restart_limits=Limits(fruitless=5))


def test_a_storage_that_was_ill_at_three_starts_is_no_restart_loop() -> None:
    """An outage says nothing about the program: when it is over, the run goes on."""
    from spotsafe.testing.faults import FailingStore

    store, _, newer = run_of_two()

    def fail(name: str, path: str, number: int) -> Exception | None:
        return spotsafe.StorageUnavailable(f"{path}: ill", path=path) if name == "read_into" else None

    for _ in range(4):
        with (
            pytest.raises(spotsafe.StorageUnavailable),
            Program().session(FailingStore(store, fail=fail), restart_limits=None),
        ):
            pytest.fail("it started")
    with Program().session(store, restart_limits=None) as run:
        assert run.resumed_from == str(newer)


def test_three_starts_that_the_store_ended_while_saving_are_no_restart_loop() -> None:
    """Three failed saves in a row raise, in each of them; the store's error is the cause, and stands in the ledger."""
    from spotsafe.testing.faults import FailingStore

    store = MemoryStore()

    def fail(name: str, path: str, number: int) -> Exception | None:
        return spotsafe.StorageFull(f"{path}: no space", path=path) if name == "put_large" else None

    for attempt in (1, 2, 3):
        program = Program()
        with (
            pytest.raises(spotsafe.SaveFailed, match=r"3 save\(s\) failed") as caught,
            program.session(FailingStore(store, fail=fail), restart_limits=None) as run,
        ):
            for step, batch in run.steps(program.loader, until=10):
                program.train(step, batch)
                run._attempt.saver.drain(30)
        assert isinstance(caught.value.__cause__, spotsafe.StorageFull)
        assert len(program.seen) == 4  # the fourth safe point finds three failures
        end = read_end(store, attempt)
        assert end is not None
        assert end.outcome == program.of(ev.RunEnded)[0].outcome == "storage_failed"
    program = Program()
    with program.session(store, restart_limits=None) as run:
        train(program, run)
    assert program.of(ev.RunEnded)[0].outcome == "finished"


def test_the_21st_start_within_an_hour_is_stopped() -> None:
    """Whatever ended the others; an hour later it is let in."""
    store, clock = MemoryStore(), ManualClock()
    for _ in range(20):
        with spotsafe.session(store, watch=None, clock=clock):
            clock.advance(60)
    with (
        pytest.raises(spotsafe.RestartLoop, match="21 starts within an hour"),
        spotsafe.session(store, watch=None, clock=clock),
    ):
        pytest.fail("it started")
    clock.advance(3600)
    with spotsafe.session(store, watch=None, clock=clock) as run:
        assert run.attempt == 22


# -- another job on the folder --------------------------------------------------------------------------------------


@pytest.fixture
def another_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Turns this process into one of another job."""
    return lambda: monkeypatch.setenv("SLURM_JOB_ID", "77")


class Elsewhere(MemoryStore):
    """The same objects under another url, as another process would see them."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__("memory://elsewhere")
        self.objects = store.objects


def start_in_thread(
    store: MemoryStore, clock: ManualClock, **options: Any
) -> tuple[threading.Thread, list[Any]]:
    """Start a session in a thread, since it waits for the clock; what came of it."""
    result: list[Any] = []

    def start() -> None:
        try:
            with spotsafe.session(store, watch=None, clock=clock, **options) as run:
                result.append(run.attempt)
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    return thread, result


def watch_heartbeats(clock: ManualClock, thread: threading.Thread) -> None:
    """Let time pass until the other start has made up its mind."""
    for _ in range(200):
        thread.join(0.02)
        if not thread.is_alive():
            return
        clock.advance(2)
    pytest.fail("it never made up its mind")


def test_another_jobs_live_run_is_in_use(another_job: Callable[[], None]) -> None:
    """Its heart beats while we watch, which is said: an error that names it, and no claim; it is not disturbed."""
    store, clock, sink = MemoryStore(), ManualClock(), RecordingSink()
    with spotsafe.session(store, watch=None, clock=clock) as run:
        another_job()
        thread, result = start_in_thread(Elsewhere(store), clock, events=sink)
        watch_heartbeats(clock, thread)
        [error] = result
        assert sum("whether it is alive" in event.message for event in sink.of(ev.Warned)) == 1
        assert isinstance(error, spotsafe.RunInUse)
        assert "takeover=True" in str(error)
        assert "attempt 1" in str(error)
        assert run.attempt == 1
    assert attempts(store) == (1,)


def test_takeover_starts_all_the_same(another_job: Callable[[], None]) -> None:
    """At once, without watching; the other one is superseded by it."""
    store, clock = MemoryStore(), ManualClock()
    with pytest.raises(spotsafe.Superseded), spotsafe.session(store, watch=None, clock=clock) as run:
        another_job()
        thread, result = start_in_thread(Elsewhere(store), clock, takeover=True)
        thread.join(60)
        assert result == [2]
        list(run.range(1))


def test_another_job_that_is_over_or_dead_is_no_obstacle(
    another_job: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that recorded its end is not watched at all; one whose heart stands still only for an interval."""
    store, clock = MemoryStore(), ManualClock()
    with spotsafe.session(store, watch=None, clock=clock):
        pass
    another_job()
    with spotsafe.session(store, watch=None, clock=clock) as run:
        assert run.attempt == 2

    silent = Elsewhere(store)
    for path in [path for path in store.objects if path.startswith("ledger/000002/events")]:
        del store.objects[path]
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    before = clock.monotonic()
    thread, result = start_in_thread(silent, clock)
    watch_heartbeats(clock, thread)
    assert result == [3]
    assert clock.monotonic() - before >= 30


def test_the_same_job_again_waits_for_nothing() -> None:
    """A restart of the same command after a kill is the normal case."""
    store, clock = MemoryStore(), ManualClock()
    session = spotsafe.session(store, watch=None, clock=clock).start()
    thread, result = start_in_thread(Elsewhere(store), clock)
    thread.join(60)
    assert result == [2]
    session.close()


# -- life cycle -----------------------------------------------------------------------------------------------------


def test_off_the_main_thread_no_handler_is_installed() -> None:
    """It says so once, and everything else works."""
    import signal

    before = signal.getsignal(signal.SIGTERM)
    program, handlers, errors = Program(), [], []

    def life() -> None:
        try:
            with program.session(MemoryStore()) as run:
                handlers.append(signal.getsignal(signal.SIGTERM))
                train(program, run)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=life)
    thread.start()
    thread.join(60)
    assert errors == []
    assert handlers == [before]
    assert len([event for event in program.of(ev.Warned) if "main thread" in event.message]) == 1
    assert program.of(ev.RunStarted)[0].watching == ()
    assert program.checkpoint_steps()[-1] == 6


def test_start_and_close_in_a_notebook(tmp_path: Path) -> None:
    """Cells instead of a block, with an error in one of them; what was trained is saved at close."""
    program = Program()
    run = program.session(tmp_path, save_every=None, restart_limits=MANY_STARTS).start()
    with pytest.raises(ZeroDivisionError):
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 2:
                raise ZeroDivisionError
    run.close()
    assert steps_there(LocalStore(str(tmp_path))) == [3]
    assert program.of(ev.RunEnded)[0].outcome == "left"


def test_a_path_object_and_a_url_are_the_same_place(tmp_path: Path) -> None:
    """pathlib works where a string does; what is neither is a TypeError."""
    with spotsafe.session(tmp_path / "run", watch=None) as run:
        list(run.range(2))
    with spotsafe.session(f"file://{tmp_path}/run", watch=None) as run:
        assert run.step == 2
    for wrong in (None, 3, b"bytes", object()):
        with pytest.raises(TypeError, match="url"):
            spotsafe.session(wrong)
