"""The same command is started while it still runs: the older process ends as superseded, the newer one goes on."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from spotsafe.errors import EXIT_SUPERSEDED
from tests.e2e.harness import Attempt, Bench, Record
from tests.e2e.processes import until
from tests.proof import record as write_down

pytestmark = pytest.mark.slow

MakeBench = Callable[..., Bench]


def started(attempt: Attempt) -> None:
    until(lambda: attempt.events("RunStarted"), what="the claim and the restore")


def end_all(attempts: list[Attempt]) -> list[Record]:
    """Judge them only when all are over: retention of one may take away what the judge is reading of another."""
    statuses = [attempt.process.end() for attempt in attempts]
    return [attempt.record(status) for attempt, status in zip(attempts, statuses, strict=True)]


def judge_superseded(record: Record) -> None:
    """It found out, deleted nothing from then on, and said so."""
    assert record.status == EXIT_SUPERSEDED == 94, record.log
    names = [one["event"] for one in record.events]
    assert "CheckpointRetired" not in names[names.index("AttemptSuperseded") :]
    assert record.of("RunEnded")[0]["outcome"] == "superseded"
    assert "superseded" in record.log
    assert "Traceback" not in record.log


def test_the_older_one_ends_and_the_newer_one_goes_on(make_bench: MakeBench) -> None:
    """The second is a new interpreter: the same command, typed again."""
    bench = make_bench()
    bench.alone = False
    older = bench.start(hold_at=7)
    until(lambda: len(older.steps()) > 7 and older.events("CheckpointPublished"), what="step 7")
    bench.fresh = True
    newer = bench.start(hold_at=12)
    started(newer)
    older.go()
    assert older.process.end() == EXIT_SUPERSEDED
    assert newer.process.wait(0) is None, "the newer one is still at work"
    newer.go()
    first, second = end_all([older, newer])

    judge_superseded(first)
    assert second.started is not None
    assert second.started["resumed_from"] is not None
    bench.judge_end(second)


def test_found_out_by_the_last_save_but_one(make_bench: MakeBench) -> None:
    """A save in flight when the loop ends tells it: that is its end too, not a failure."""
    bench = make_bench(save_every=23)
    bench.alone = False
    older = bench.start(hold_at=22)
    until(lambda: len(older.steps()) > 22, what="step 22")
    newer = bench.start()
    started(newer)
    older.go()
    first, second = end_all([older, newer])

    judge_superseded(first)
    bench.judge_end(second)


def test_four_at_once(make_bench: MakeBench) -> None:
    """All but the last end as superseded, whatever they write at the same time."""
    bench = make_bench()
    bench.alone = False
    attempts: list[Attempt] = []
    for hold_at in (5, 9, 13, 17):
        attempts.append(bench.start(hold_at=hold_at))
        until(
            lambda at=hold_at, one=attempts[-1]: one.steps() and one.steps()[-1].number == at, what="its step"
        )
    for attempt in attempts:
        attempt.go()
    *older, last = end_all(attempts)

    for record in older:
        judge_superseded(record)
    bench.judge_end(last)
    assert bench.newest is not None
    assert bench.newest.attempt == 4


@pytest.mark.parametrize("rounds", [6, pytest.param(30, marks=pytest.mark.prove)])
def test_the_second_comes_at_any_instant(make_bench: MakeBench, reference: Record, rounds: int) -> None:
    """Nothing is torn, and the newer one's end is the reference's, whatever the older one was doing."""
    choose = random.Random(rounds)
    superseded = 0
    for number in range(rounds):
        bench = make_bench(f"run{number}")
        bench.alone = False
        older = bench.start()
        older.process.wait(choose.uniform(0, reference.seconds))
        first, second = end_all([older, bench.start()])
        assert first.status in {0, EXIT_SUPERSEDED}, first.log
        superseded += first.status == EXIT_SUPERSEDED
        last = second
        if second.status == EXIT_SUPERSEDED:  # the one that was started first was the second to claim
            assert first.status == 0, second.log
            last = first
        bench.judge_end(last)
    write_down("the same command started twice", rounds=rounds, superseded=superseded, identical=rounds)
