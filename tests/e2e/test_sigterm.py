"""SIGTERM to a real process: its exit status, what it says, who else it reaches, and whose handler hears it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotsafe.errors import EXIT_RECLAIMED
from tests.e2e.harness import SCRIPTS, TRAIN, Attempt, Bench, Record
from tests.e2e.processes import PATIENCE_S, Launcher, Process, members, until
from tests.proof import record as write_down

pytestmark = pytest.mark.slow

MakeBench = Callable[..., Bench]
GONE_S = 30.0
"""Workers must have ended so many seconds after their trainer."""


@pytest.mark.parametrize("fails", [[1], list(range(1, 100))], ids=["once", "for good"])
def test_a_failed_save_does_not_hide_the_reclaim(make_bench: MakeBench, fails: list[int]) -> None:
    """Captured by its caller's pipes, it ends with 143, not 1; the failure is told; the same command goes on."""
    bench = make_bench()
    bench.start(kill_at="CheckpointPublished", lockstep=True).end()
    before = bench.published
    record = captured(bench, fail_data_of=fails, terminate_at="SaveFailed")

    assert record.status == EXIT_RECLAIMED == 143, record.log
    assert "failed: the disk of this test is gone" in record.log
    assert "Traceback" not in record.log
    assert ("save(s) failed" in record.log) is (len(fails) > 1)
    assert (bench.published == before) is (len(fails) > 1)
    assert set(before) <= set(bench.published)
    bench.finish()


def captured(bench: Bench, **options: Any) -> Record:
    """An attempt whose caller waits at its pipes, as many launchers do."""
    out = bench.folder / "captured"
    told = {"url": str(bench.run), "out": str(out), **options}
    done = subprocess.run(
        [sys.executable, str(TRAIN)],
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "TRAIN_OPTIONS": json.dumps(told)},
    )
    assert done.stdout == ""
    out.with_suffix(".log").write_text(done.stderr)
    return Attempt(bench, Process(0, lambda _: done.returncode), out).record(done.returncode)


def with_workers(bench: Bench, hold_at: int) -> tuple[Attempt, list[int]]:
    """An attempt that is in the body of a step, and the processes of its session: itself and its two workers."""
    attempt = bench.start(workers=2, hold_at=hold_at)
    until(lambda: len(attempt.steps()) > hold_at, what=f"step {hold_at}")
    session = members(attempt.process.pid)
    assert len(session) == 3
    return attempt, session


def test_signalled_with_its_workers(make_bench: MakeBench) -> None:
    """To the group: one final checkpoint, made by the trainer; workers are neither in its way nor left behind."""
    bench = make_bench(workers=2)
    attempt, session = with_workers(bench, hold_at=5)
    os.killpg(session[0], signal.SIGTERM)
    attempt.go()
    record = left_with_workers(attempt)

    assert record.saves("notice") == [6]
    assert record.of("SaveFailed") == []
    assert bench.newest is not None
    assert bench.newest.step == 6
    assert bench.finish().steps[0].number == 6


def test_signalled_each_by_itself(make_bench: MakeBench) -> None:
    """DataLoader may raise for a dead worker in the body; it is a reclaim all the same, and nothing saved is lost."""
    bench = make_bench(workers=2)
    attempt, session = with_workers(bench, hold_at=5)
    for pid in session:
        with contextlib.suppress(ProcessLookupError):  # it has left already
            os.kill(pid, signal.SIGTERM)
    attempt.go()
    record = left_with_workers(attempt)

    assert record.saves("notice") in ([6], [])
    assert "Traceback" not in record.log
    bench.finish()


def left_with_workers(attempt: Attempt) -> Record:
    """Reclaimed, and nobody is left."""
    record = attempt.end()
    until(lambda: not members(attempt.process.pid), what="the end of the workers", patience_s=GONE_S)
    assert record.status == EXIT_RECLAIMED, record.log
    assert [one["outcome"] for one in record.of("RunEnded")] == ["reclaimed"]
    return record


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("signals", [6, pytest.param(40, marks=pytest.mark.prove)])
def test_signalled_at_any_instant(
    make_bench: MakeBench, reference: Record, workers: int, signals: int
) -> None:
    """Once the session has begun it leaves as reclaimed, with what was committed, wherever the signal found it."""
    choose, outcomes, runs = random.Random(signals + workers), Counter[int](), 0
    while outcomes[EXIT_RECLAIMED] < signals:
        runs += 1
        bench, status = make_bench(f"run{runs}", workers=workers), -1
        while status and outcomes[EXIT_RECLAIMED] < signals:
            attempt = bench.start()
            if attempt.process.wait(choose.uniform(0, reference.seconds)) is None:
                until(lambda pid=attempt.process.pid: os.getpgid(pid) == pid, what="its process group")
                os.killpg(attempt.process.pid, signal.SIGTERM)
            record = attempt.end()
            until(lambda pid=attempt.process.pid: not members(pid), what="no orphan", patience_s=GONE_S)
            status = record.status
            outcomes[status] += 1
            judge_left(bench, record)
        if status:
            bench.finish()
        else:
            bench.judge_end(record)
    write_down(
        f"SIGTERM at uniform instants, {workers} workers",
        reclaimed=outcomes[EXIT_RECLAIMED],
        before_or_after_the_session=outcomes[-signal.SIGTERM],
        identical_runs=runs,
    )


def judge_left(bench: Bench, record: Record) -> None:
    """Only outside the session a signal is the end; inside, no step that was made is lost."""
    if record.status == EXIT_RECLAIMED:
        assert record.started is not None
        assert bench.newest is not None or not record.steps
        done = record.steps[-1].number + 1 if record.steps else record.started["step"]
        saved = 0 if bench.newest is None else bench.newest.step
        assert saved == done, record.log
    elif record.status:
        assert record.status == -signal.SIGTERM, record.log
        assert record.started is None or record.of("RunEnded")


def run_handlers(launcher: Launcher, tmp_path: Path, program: str) -> tuple[int, str]:
    environment = {"HANDLERS": program, "RUN": str(tmp_path / "run")}
    log = tmp_path / "log"
    status = launcher.fork(SCRIPTS / "handlers.py", log=log, environment=environment).end()
    return status, log.read_text()


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("user_before", 0),
        ("user_inside", 0),
        ("user_inside_passing_on", 0),
        ("asyncio_before", 0),
        ("asyncio_inside", 0),
        ("off_the_main_thread", 0),
        ("nobody", -signal.SIGTERM),
        ("asyncio_around", -signal.SIGTERM),
    ],
)
def test_handlers_of_others(launcher: Launcher, tmp_path: Path, program: str, status: int) -> None:
    """They work inside the session and after it, as the programs themselves check."""
    ended, log = run_handlers(launcher, tmp_path, program)
    assert ended == status, log


def test_a_program_that_is_not_content_is_noticed(launcher: Launcher, tmp_path: Path) -> None:
    """The programs' own checks reach this test."""
    ended, log = run_handlers(launcher, tmp_path, "missing")
    assert ended == 1
    assert "KeyError: 'missing'" in log
