"""The process is killed while DataLoader's workers live: they go too, and the run ends as if nothing had happened."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable

import pytest

from tests.e2e.harness import Bench, Record
from tests.e2e.processes import members, until
from tests.proof import record as write_down

pytestmark = pytest.mark.slow

MakeBench = Callable[..., Bench]
GONE_S = 30.0
"""Workers must have ended so many seconds after their trainer."""


def gone(session: int) -> None:
    """No orphan is left."""
    until(lambda: not members(session), what=f"the end of {members(session)}", patience_s=GONE_S)


def test_killed_in_a_step(make_bench: MakeBench) -> None:
    """Both workers are alive at the kill, provably."""
    bench = make_bench(workers=2)
    attempt = bench.start(hold_at=9)
    until(lambda: len(attempt.steps()) > 9, what="step 9")
    pid = attempt.process.pid
    assert len(members(pid)) == 3
    attempt.record(attempt.process.kill())
    gone(pid)
    bench.finish()
    gone(attempt.process.pid)


@pytest.mark.parametrize("kills", [6, pytest.param(20, marks=pytest.mark.prove)])
def test_killed_at_any_instant(make_bench: MakeBench, reference: Record, kills: int) -> None:
    """Also while the workers are being started, or are being shut down."""
    choose, killed, runs = random.Random(kills), 0, 0
    life_s = make_bench("whole", workers=2).finish().seconds
    while killed < kills:
        runs += 1
        bench, status = make_bench(f"run{runs}", workers=2), -signal.SIGKILL
        while status and killed < kills:
            attempt = bench.start()
            record = attempt.kill_after(choose.uniform(0, life_s), machine=choose.random() < 0.5)
            status = record.status
            killed += status == -signal.SIGKILL
            gone(attempt.process.pid)
        if status:
            bench.finish()
        else:
            bench.judge_end(record)
    write_down("SIGKILL at uniform instants, two workers", kills=killed, orphans=0, identical_runs=runs)


@pytest.mark.parametrize("event", ["SaveStaged", "FileWritten", "IntervalChosen"])
def test_killed_at_an_event(make_bench: MakeBench, event: str) -> None:
    """In the middle of a save, and right before the workers start."""
    bench = make_bench(workers=2)
    attempt = bench.start(kill_at=f"{event}:1")
    assert attempt.end().status == -signal.SIGKILL
    gone(attempt.process.pid)
    bench.finish()
