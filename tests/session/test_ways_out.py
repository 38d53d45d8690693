"""What every way out of the block, and of a loop in it, saves and raises."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.clock import SystemClock
from spotsafe.errors import EXIT_SUPERSEDED
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice
from spotsafe.saver import Saver
from spotsafe.storage.local import LocalStore
from spotsafe.testing.faults import FailingStore
from tests.session.rig import Cut, Program


class Announcer:
    """A watcher that is asked nothing and says what the test wants: the session gets it at once."""

    def __init__(self, run: spotsafe.Run) -> None:
        self._watch = run._attempt.watch  # type: ignore[union-attr] # the run is entered

    def notice(self, *, kind: NoticeKind = NoticeKind.RECLAIM, seconds: float | None = 60.0) -> None:
        now = SystemClock().monotonic()
        deadline = None if seconds is None else now + seconds
        self._watch.report(
            ReclaimNotice(source="test", kind=kind, action="terminate", deadline=deadline, received=now)
        )


def train(program: Program, run: spotsafe.Run, until: int = 6) -> None:
    for step, batch in run.steps(program.loader, until=until):
        program.train(step, batch)


def newest_step(url: Path) -> int | None:
    """The step from which the next attempt would go on."""
    try:
        with Program().session(url, resume="must") as run:
            return run.step
    except spotsafe.CheckpointNotFound:
        return None


# -- after the end, and in other processes --------------------------------------------------------------------------


def test_a_closed_run_can_be_read_and_does_nothing_more(tmp_path: Path) -> None:
    """Whatever would train, save or track says so; nothing is counted that no checkpoint can hold."""
    program = Program()
    with program.session(tmp_path) as run:
        train(program, run, until=2)
    attempts = {
        "steps": lambda: run.steps(program.loader, until=4),
        "epochs": lambda: run.epochs(1),
        "range": lambda: run.range(1),
        "safe_point": run.safe_point,
        "save": run.save,
        "track": lambda: run.track(extra=torch.Generator()),
        "wait": run.wait,
        "stop": lambda: run.stop("late"),
        "interruptible": lambda: run.interruptible([]),
    }
    for attempt in attempts.values():
        with pytest.raises(spotsafe.RunError, match="closed"):
            attempt()
    assert (run.step, run.attempt, run.failures) == (2, 1, ())


def test_an_interruption_while_leaving_leaves_nothing_behind(tmp_path: Path) -> None:
    """A second Ctrl-C, at the last event: no thread and no handler stays, and the folder can be used again."""

    class Impatient:
        def emit(self, event: ev.Event) -> None:
            if isinstance(event, ev.RunEnded):
                raise KeyboardInterrupt

    handler, threads = signal.getsignal(signal.SIGTERM), set(threading.enumerate())
    program = Program()
    with pytest.raises(KeyboardInterrupt), program.session(tmp_path, events=[Impatient()]) as run:
        train(program, run, until=2)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert {one for one in threading.enumerate() if one.name.startswith("spotsafe")} <= threads
    assert newest_step(tmp_path) == 2


def test_how_a_run_ended_is_told_once_whatever_its_clean_up_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while its memory is given back does not make a finished run one that failed to start."""

    def interrupted(_: Saver) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Saver, "close", interrupted)
    program = Program()
    with pytest.raises(KeyboardInterrupt), program.session(tmp_path) as run:
        train(program, run, until=2)
    ends = program.sink.of(ev.RunEnded)
    assert [(one.outcome, one.newest is None) for one in ends] == [("finished", False)]


@pytest.mark.parametrize("way", ["raise", "continue"])
def test_a_forked_child_leaves_the_run_to_its_parent(tmp_path: Path, way: str) -> None:
    """It goes out through the block at once, although the threads that drain saves are not in it."""
    program, child = Program(), None
    try:
        with program.session(tmp_path) as run:
            for step, batch in run.steps(program.loader, until=4):
                program.train(step, batch)
                if step == 1:
                    child = os.fork()
                    if child == 0 and way == "raise":
                        raise Cut
    except BaseException as error:
        if child == 0:
            os._exit(7 if isinstance(error, Cut | spotsafe.RunError) else 8)
        raise
    if child == 0:
        os._exit(9)
    assert child is not None
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert program.checkpoint_steps()[-1] == 4
    assert program.of(ev.SaveFailed) == []


# -- clean ends -----------------------------------------------------------------------------------------------------


def test_a_finished_run_saves_its_end_and_the_same_command_does_nothing(tmp_path: Path) -> None:
    """Again: no step, no new checkpoint, the same weights; a larger limit goes on."""
    first = Program()
    with first.session(tmp_path, save_every=None) as run:
        train(first, run)
    assert first.checkpoint_steps() == [6]

    again = Program()
    with again.session(tmp_path, save_every=None) as run:
        train(again, run)
        assert run.resumed_from is not None
    assert again.seen == []
    assert again.checkpoint_steps() == []
    assert again.weights() == first.weights()
    assert again.of(ev.RunEnded)[0].outcome == "finished"

    more = Program()
    with more.session(tmp_path, save_every=None) as run:
        train(more, run, until=8)
    assert [step for step, _, _ in more.seen] == [6, 7]


def test_a_break_out_of_a_progress_bar_saves_what_was_trained(tmp_path: Path) -> None:
    """The bar still holds the loop when the run is left; the steps since the last save are not lost with it."""
    program = Program()
    with program.session(tmp_path, save_every=None) as run:
        loop = run.steps(program.loader, until=6)
        for step, batch in (item for item in iter(lambda: next(loop), None)):
            program.train(step, batch)
            if step == 2:
                break
    assert program.checkpoint_steps() == [3]
    assert newest_step(tmp_path) == 3
    assert next(loop, None) is None


def test_a_break_saves_what_is_committed_and_stays_resumable(tmp_path: Path) -> None:
    """Nothing is lost by leaving, and the run is not taken for finished."""
    program = Program()
    with program.session(tmp_path, save_every=None) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 3:
                break
    assert program.checkpoint_steps() == [4]
    assert program.of(ev.RunEnded)[0].outcome == "left"
    assert newest_step(tmp_path) == 4


def test_a_break_before_the_update_saves_the_safe_point_before(tmp_path: Path) -> None:
    """The body that was not finished is made again."""
    program = Program()
    with program.session(tmp_path, save_every=None) as run:
        for step, batch in run.steps(program.loader, until=6):
            if step == 3:
                break
            program.train(step, batch)
        torch.rand(5)  # what the program draws after the loop is not part of the safe point
    whole = Program()
    with whole.session(tmp_path / "whole", save_every=None) as run:
        train(whole, run)
    rest = Program()
    with rest.session(tmp_path, save_every=None) as run:
        train(rest, run)
    assert program.seen + rest.seen == whole.seen
    assert rest.weights() == whole.weights()


def test_what_an_unfinished_body_changed_does_not_count_twice(tmp_path: Path) -> None:
    """A value or a scheduler touched before the break: the save before stands, and that is said."""
    program = Program()
    with program.session(tmp_path, save_every=2) as run:
        for step, batch in run.steps(program.loader, until=6):
            run.wait()
            if step == 3:
                run.values["looked at"] = run.values.get("looked at", 0) + 1
                break
            program.train(step, batch)
    assert program.checkpoint_steps() == [2]
    assert ["besides the tensors" in event.message for event in program.of(ev.Warned)] == [True]
    with Program().session(tmp_path) as run:
        assert run.values == {}


def test_a_break_between_two_updates_saves_nothing_half(tmp_path: Path) -> None:
    """One of two optimizers has stepped: the live state is no safe point, so the last saved one stays the newest."""
    program = Program()
    other = torch.optim.SGD(program.model.second.parameters(), lr=0.1)
    with program.session(tmp_path, save_every=2, other=other) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 3:
                break
            program.loss(batch).backward()
            other.step()
        run.wait()
    assert program.checkpoint_steps() == [2]


def test_islice_and_return_save_what_is_committed(tmp_path: Path) -> None:
    """Both end the loop from outside."""
    program = Program()

    def leave_by_return(run: spotsafe.Run) -> None:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 1:
                return

    with program.session(tmp_path / "return", save_every=None) as run:
        leave_by_return(run)
    assert program.checkpoint_steps() == [2]

    sliced = Program()
    with sliced.session(tmp_path / "islice", save_every=None) as run:
        for step, batch in itertools.islice(run.steps(sliced.loader, until=6), 3):
            sliced.train(step, batch)
    assert sliced.checkpoint_steps() == [3]


def test_an_exception_saves_nothing_new_and_goes_on(tmp_path: Path) -> None:
    """The body's own exception wins; what was saved before stays."""
    program = Program()
    with pytest.raises(Cut), program.session(tmp_path, save_every=3) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 4:
                raise Cut
    assert program.checkpoint_steps() == [3]
    assert program.of(ev.RunEnded)[0].outcome == "failed"
    assert newest_step(tmp_path) == 3


def test_a_keyboard_interrupt_is_never_a_reclaim(tmp_path: Path) -> None:
    """It ends as KeyboardInterrupt, also while a notice is pending."""
    program = Program()
    with pytest.raises(KeyboardInterrupt), program.session(tmp_path) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 2:
                Announcer(run).notice()
                raise KeyboardInterrupt
    assert program.of(ev.RunEnded)[0].outcome == "interrupted"


def test_code_behind_a_finished_loop_is_saved_too(tmp_path: Path) -> None:
    """The final checkpoint holds the values of the end of the block."""
    program = Program()
    with program.session(tmp_path) as run:
        train(program, run)
        run.wait()
        run.values["test accuracy"] = 0.5
    with Program().session(tmp_path) as run:
        assert run.values == {"test accuracy": 0.5}


def test_start_and_close_do_what_the_block_does(tmp_path: Path) -> None:
    """In a notebook there is no block; closing twice is harmless."""
    program = Program()
    run = program.session(tmp_path, save_every=None).start()
    train(program, run)
    run.close()
    run.close()
    assert program.checkpoint_steps() == [6]
    with pytest.raises(spotsafe.RunError, match="once"):
        run.start()


# -- reclaims -------------------------------------------------------------------------------------------------------


def reclaimed_at(program: Program, url: Path, at: int, **options: Any) -> spotsafe.Reclaimed:
    with pytest.raises(spotsafe.Reclaimed) as caught, program.session(url, save_every=None, **options) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == at:
                Announcer(run).notice()
    return caught.value


def test_a_notice_saves_at_the_end_of_the_body_and_exits(tmp_path: Path) -> None:
    """Code 143, nothing lost, and the rest of the run is as if nothing had happened."""
    whole = Program()
    with whole.session(tmp_path / "whole") as run:
        train(whole, run)
    first = Program()
    leaving = reclaimed_at(first, tmp_path / "run", 2)
    assert leaving.code == 143
    assert first.checkpoint_steps() == [3]
    assert first.of(ev.RunEnded)[0].outcome == "reclaimed"

    rest = Program()
    with rest.session(tmp_path / "run") as run:
        train(rest, run)
    assert first.seen + rest.seen == whole.seen
    assert rest.weights() == whole.weights()


def test_the_exit_code_can_be_chosen(tmp_path: Path) -> None:
    """Some launchers restart on other codes."""
    assert reclaimed_at(Program(), tmp_path, 2, exit_code=75).code == 75


def test_except_exception_does_not_swallow_a_reclaim(tmp_path: Path) -> None:
    """A training loop inside a broad except still ends."""
    program = Program()
    with pytest.raises(spotsafe.Reclaimed), program.session(tmp_path) as run:
        try:
            for step, batch in run.steps(program.loader, until=6):
                program.train(step, batch)
                Announcer(run).notice()
        except Exception:
            pytest.fail("swallowed")


def test_return_ends_the_loops_and_runs_the_code_behind_them(tmp_path: Path) -> None:
    """on_reclaim="return": the notice stays readable, later loops yield nothing, saves there change nothing."""
    program = Program()
    after = []
    with program.session(tmp_path, save_every=None, on_reclaim="return") as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 1:
                Announcer(run).notice()
        after.append(run.notice)
        after += list(run.range(3))
        run.save(metrics={"half": 0.0})
    assert len(after) == 1
    assert after[0] is not None
    assert program.checkpoint_steps() == [2]
    assert program.of(ev.RunEnded)[0].outcome == "reclaimed"
    assert newest_step(tmp_path) == 2


@pytest.mark.parametrize(
    "error", [RuntimeError("DataLoader worker (pid 1) is killed"), BrokenPipeError("pipe")]
)
def test_any_error_while_a_notice_is_pending_means_the_machine_goes(tmp_path: Path, error: Exception) -> None:
    """A dead worker is part of the reclaim: leave as reclaimed, with the error chained."""
    program = Program()
    with pytest.raises(spotsafe.Reclaimed) as caught, program.session(tmp_path, save_every=2) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 3:
                Announcer(run).notice()
                raise error
    assert caught.value.__cause__ is error
    assert newest_step(tmp_path) == 2


def test_a_notice_in_an_evaluation_is_acted_on_at_once(tmp_path: Path) -> None:
    """No optimizer stepped since the safe point, so that point is saved; the evaluation is made again whole."""
    whole, first, rest = [], [], []

    def body(program: Program, run: spotsafe.Run, evaluated: list[Any], *, announce: bool) -> None:
        for epoch in run.epochs(3):
            for step, batch in run.steps(program.loader):
                program.train(step, batch)
            for number in run.interruptible(range(4)):
                evaluated.append((epoch, number, torch.rand(1).item()))
                if announce and (epoch, number) == (1, 2):
                    Announcer(run).notice()

    reference = Program()
    with reference.session(tmp_path / "whole") as run:
        body(reference, run, whole, announce=False)
    program = Program()
    with pytest.raises(spotsafe.Reclaimed), program.session(tmp_path / "run", save_every=None) as run:
        body(program, run, first, announce=True)
    assert program.checkpoint_steps() == [8]
    second = Program()
    with second.session(tmp_path / "run") as run:
        body(second, run, rest, announce=False)

    assert first[:4] + rest == whole
    assert program.seen + second.seen == reference.seen
    assert second.weights() == reference.weights()


def test_a_notice_in_an_evaluation_after_an_update_publishes_the_newest_staged(tmp_path: Path) -> None:
    """The weights are half way between two safe points: nothing new is saved."""
    program = Program()
    with pytest.raises(spotsafe.Reclaimed), program.session(tmp_path, save_every=1) as run:
        for step, batch in run.steps(program.loader, until=6):
            run.wait()
            program.train(step, batch)
            for number in run.interruptible(range(4)):
                if (step, number) == (2, 1):
                    Announcer(run).notice()
    assert program.checkpoint_steps()[-1] == 2
    assert newest_step(tmp_path) == 2


def test_a_risk_saves_early_and_does_not_stop(tmp_path: Path) -> None:
    """A rebalance recommendation is followed by no termination more often than not."""
    program = Program()
    with program.session(tmp_path, save_every=None) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 1:
                Announcer(run).notice(kind=NoticeKind.RISK)
        run.wait()
        assert run.notice is None
    assert program.checkpoint_steps() == [2, 6]


def test_a_notice_after_the_last_step_lets_the_run_finish(tmp_path: Path) -> None:
    """All loops are at their ends: the run is finished, not reclaimed."""
    program = Program()
    with program.session(tmp_path) as run:
        train(program, run)
        Announcer(run).notice()
    assert program.of(ev.RunEnded)[0].outcome == "finished"


def test_nothing_new_is_begun_when_no_time_is_left(tmp_path: Path) -> None:
    """With no seconds left the newest published stays the newest, and the exit is at once."""
    program = Program()
    with pytest.raises(spotsafe.Reclaimed), program.session(tmp_path, save_every=2) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            run.wait()
            if step == 2:
                Announcer(run).notice(seconds=0.0)
    assert program.checkpoint_steps() == [2]
    assert newest_step(tmp_path) == 2


# -- failures in the background ---------------------------------------------------------------------------------------


def broken_store(url: Path, *, broken: list[bool]) -> FailingStore:
    """A store that refuses data while `broken` holds True."""

    def fail(operation: str, path: str, number: int) -> Exception | None:
        if broken[0] and operation == "put_large":
            return spotsafe.StorageFull(f"{path}: no space left", path=path)
        return None

    return FailingStore(LocalStore(str(url)), fail=fail)


def test_a_failed_save_is_told_and_training_goes_on(tmp_path: Path) -> None:
    """It is in run.failures and in the events; a later save that succeeds makes it history."""
    broken = [True]
    program = Program()
    with program.session(broken_store(tmp_path, broken=broken), save_every=2) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 2:
                program.sink.wait_for(ev.SaveFailed)
                broken[0] = False
        failures = run.failures
    assert len(failures) == 1
    assert "no space left" in failures[0]
    assert program.checkpoint_steps()[-1] == 6
    assert len(program.seen) == 6


def test_a_failure_is_raised_when_the_block_ends_cleanly(tmp_path: Path) -> None:
    """Nobody learns only at the next resume that nothing was saved."""
    program = Program()
    with (
        pytest.raises(spotsafe.SaveFailed, match="no space left"),
        program.session(broken_store(tmp_path, broken=[True]), save_every=None) as run,
    ):
        train(program, run)


def test_three_failures_in_a_row_are_raised_at_once(tmp_path: Path) -> None:
    """By then it is no accident."""
    program = Program()
    with (
        pytest.raises(spotsafe.SaveFailed),
        program.session(broken_store(tmp_path, broken=[True]), save_every=1) as run,
    ):
        for step, batch in run.steps(program.loader, until=500):
            program.train(step, batch)
            started = len(program.of(ev.SaveStarted))
            program.sink.wait_for(ev.SaveFailed, count=started)
    assert len(program.of(ev.SaveStarted)) == 3
    assert len(program.seen) < 500


def test_the_bodys_own_exception_wins_over_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is in the log."""
    program = Program()
    with (
        caplog.at_level(logging.ERROR, "spotsafe"),
        pytest.raises(Cut),
        program.session(broken_store(tmp_path, broken=[True]), save_every=1) as run,
    ):
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 1:
                raise Cut
    assert "no space left" in caplog.text


def test_a_reclaim_keeps_its_exit_code_when_the_save_fails(tmp_path: Path) -> None:
    """143, not 1: the launcher has to restart it."""
    program = Program()
    with (
        pytest.raises(spotsafe.Reclaimed) as caught,
        program.session(broken_store(tmp_path, broken=[True]), save_every=None) as run,
    ):
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            if step == 2:
                Announcer(run).notice()
    assert caught.value.code == 143


def test_the_older_of_two_attempts_ends_as_superseded(tmp_path: Path) -> None:
    """It publishes what is whole, deletes nothing more and must not be restarted."""
    old, new = Program(), Program()
    store = LocalStore(str(tmp_path))
    with pytest.raises(spotsafe.Superseded) as caught, old.session(store, save_every=1) as run:
        for step, batch in run.steps(old.loader, until=50):
            old.train(step, batch)
            if step == 2:
                run.wait()
                take_over(new, tmp_path)
            if step > 2:
                old.sink.wait_for(ev.AttemptSuperseded)
    assert caught.value.code == EXIT_SUPERSEDED
    assert old.of(ev.RunEnded)[0].outcome == "superseded"
    assert [event.newer for event in old.of(ev.AttemptSuperseded)] == [2]
    assert new.seen[-1][0] == 5
    assert newest_step(tmp_path) == 6


def take_over(program: Program, url: Path) -> None:
    """Another process of the same command: its store has another spelling, so this process does not refuse it."""

    class Elsewhere(LocalStore):
        @property
        def url(self) -> str:
            return f"elsewhere:{url}"

    with program.session(Elsewhere(str(url)), save_every=1) as run:
        train(program, run)


def test_leaving_waits_only_so_long_and_says_so(tmp_path: Path) -> None:
    """A drain that does not end in time is an error, not a hang."""
    import threading

    gate = threading.Event()

    def fail(operation: str, path: str, number: int) -> Exception | None:
        if operation == "put_large":
            gate.wait(30)
        return None

    program = Program()
    run = program.session(
        FailingStore(LocalStore(str(tmp_path)), fail=fail),
        save_every=None,
        drain_timeout=timedelta(milliseconds=50),
    ).start()
    train(program, run)
    try:
        with pytest.raises(spotsafe.SaveFailed, match="drain_timeout"):
            run.close()
        assert program.of(ev.RunEnded)[0].in_flight, "what is still written may come after the end"
    finally:
        gate.set()


def test_a_failed_save_leaves_its_steps_unsaved(tmp_path: Path) -> None:
    """A notice in the evaluation right behind it saves that safe point again, and loses nothing."""
    broken = [True]
    program = Program()
    with (
        pytest.raises(spotsafe.Reclaimed),
        program.session(broken_store(tmp_path, broken=broken), save_every=3) as run,
    ):
        for step, batch in run.steps(program.loader, until=6):
            if step == 3:
                program.sink.wait_for(ev.SaveFailed)
                broken[0] = False
                for _ in run.interruptible(range(3)):
                    Announcer(run).notice()
            program.train(step, batch)
    assert program.checkpoint_steps() == [3]
    assert newest_step(tmp_path) == 3


def test_a_failed_last_save_is_made_up_for_at_the_end(tmp_path: Path) -> None:
    """The store is well again when the block ends: nothing is lost and nothing is raised."""
    broken = [True]
    program = Program()
    with program.session(broken_store(tmp_path, broken=broken), save_every=6) as run:
        train(program, run)
        program.sink.wait_for(ev.SaveFailed)
        broken[0] = False
    assert program.checkpoint_steps() == [6]
    assert program.of(ev.RunEnded)[0].outcome == "finished"
