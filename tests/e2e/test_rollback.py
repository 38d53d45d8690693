"""`spotsafe rollback` beside a process that trains: it ends as superseded, and the same command goes on from there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.errors import EXIT_SUPERSEDED
from tests.e2e.harness import Attempt, Bench
from tests.e2e.processes import until

pytestmark = pytest.mark.slow


def spotsafe(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spotsafe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def rollback(bench: Bench, name: CheckpointName, *options: str) -> dict[str, Any]:
    done = spotsafe("rollback", f"{bench.run}@{name}", "--json", *options)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def two_checkpoints(make_bench: Callable[..., Bench]) -> tuple[Bench, Attempt, CheckpointName]:
    """A run whose second attempt holds in the middle of a step; the older of its two checkpoints."""
    bench = make_bench(save_every=2)
    bench.alone = False
    before = bench.start(hold_at=7)
    until(lambda: len(before.steps()) > 7 and bench.published, what="step 7 and a checkpoint")
    before.record(before.process.kill())
    attempt = bench.start(hold_at=15)
    until(lambda: attempt.events("CheckpointPublished"), what="a checkpoint of the second attempt")
    until(lambda: attempt.steps() and attempt.steps()[-1].number == 15, what="step 15")
    until(
        lambda: len(attempt.events("CheckpointPublished")) == len(attempt.events("SaveStarted")),
        what="nothing in flight",
    )
    until(lambda: len(bench.published) == 2, what="what is not kept being retired")
    return bench, attempt, bench.published[1]


def test_a_living_run_is_rolled_back(make_bench: Callable[..., Bench]) -> None:
    """What it publishes after that is set aside; the next start repeats its steps to the same end, to the last bit."""
    bench, older, target = two_checkpoints(make_bench)

    refused = spotsafe("rollback", f"{bench.run}@{target}")
    assert refused.returncode == 1
    assert "is alive" in refused.stderr, "its heart beats, and that is seen within an interval"
    answer = rollback(bench, target, "--takeover")
    assert answer["step"] == target.step
    older.go()
    ended = older.end()

    assert ended.status == EXIT_SUPERSEDED
    assert "CheckpointRetired" not in [one["event"] for one in ended.events[-5:]]
    record = bench.start().end()
    assert record.started is not None
    assert record.started["resumed_from"] == str(target)
    assert record.steps[0].number == target.step
    bench.judge_end(record)
    listed = json.loads(spotsafe("ls", str(bench.run), "--json").stdout)["checkpoints"]
    aside = [one for one in listed if one["set_aside"]]
    assert aside
    assert all(one["usable"] for one in aside), "whole, to be gone back to"


def test_a_killed_run_is_rolled_back_and_killed_again(make_bench: Callable[..., Bench]) -> None:
    """Kills before and after a rollback: what was set aside is never resumed from."""
    bench, first, target = two_checkpoints(make_bench)
    first.record(first.process.kill())
    rollback(bench, target)  # its process is dead, which is known at once

    for hold_at in (target.step, target.step + 1):
        again = bench.start(hold_at=hold_at)
        until(lambda at=hold_at, one=again: one.steps() and one.steps()[-1].number == at, what="its step")
        record = again.record(again.process.kill())
        assert record.started is not None
        assert record.started["resumed_from"] == str(target)
    last = bench.start().end()
    assert last.started is not None
    assert last.started["resumed_from"] == str(target)
    bench.judge_end(last)
