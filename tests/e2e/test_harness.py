"""The harness itself: a forked child is a real process, and what is judged is judged right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import Bench, Record, read_lines

pytestmark = pytest.mark.slow

MakeBench = Callable[..., Bench]


def record(*events: dict[str, Any]) -> Record:
    return Record(status=-9, seconds=1.0, steps=(), events=events, result=None, log="")


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"event": name, **fields}


STARTED = event("SaveStarted", checkpoint="one")
PUBLISHED = event("CheckpointPublished", checkpoint="one")
FAILED = event("SaveFailed", checkpoint="one")
RESUMED = event("RunStarted", resumed_from="one")
FRESH = event("RunStarted", resumed_from=None)


@pytest.mark.parametrize(
    ("events", "inside"),
    [
        ([], False),
        ([STARTED], True),
        ([STARTED, PUBLISHED], False),
        ([STARTED, FAILED], False),
        ([STARTED, PUBLISHED, event("SaveStarted", checkpoint="two")], True),
    ],
)
def test_inside_a_save_is_from_its_start_to_its_publication(
    events: list[dict[str, Any]], inside: bool
) -> None:
    """Only a save that was begun and neither published nor given up counts."""
    assert record(*events).in_save is inside


def test_inside_a_restore_is_from_its_start_to_its_end() -> None:
    """A restore that is verified and not loaded is still inside."""
    begun, verified, finished = map(event, ("RestoreStarted", "RestoreVerified", "RestoreFinished"))
    assert [record(*events).in_restore for events in ([], [begun], [begun, verified], [begun, finished])] == [
        False,
        True,
        True,
        False,
    ]


def test_before_the_first_save_counts_only_after_a_resume() -> None:
    """A fresh start has nothing to lose yet; one that has saved is past it."""
    assert record(RESUMED).before_first_save
    assert record(RESUMED, event("FirstStep")).before_first_save
    assert not record(FRESH).before_first_save
    assert not record(RESUMED, STARTED).before_first_save
    assert not record().before_first_save


def test_a_torn_line_is_not_read(tmp_path: Path) -> None:
    """What a process was about to write when it died is no line."""
    path = tmp_path / "lines"
    assert read_lines(path) == []
    path.write_text("[1]\n[2]\n[3")
    assert read_lines(path) == [[1], [2]]


def test_a_forked_child_is_as_good_as_a_new_interpreter(make_bench: MakeBench, reference: Record) -> None:
    """`python train.py` gives, bit for bit, what the forked child of the reference gave."""
    bench = make_bench()
    bench.fresh = True
    fresh = bench.finish()
    assert fresh.steps == reference.steps
    assert len({step.loss for step in fresh.steps}) == len(fresh.steps) == 24


@pytest.mark.parametrize("part", ["weights", "optimizer", "scheduler", "rng"])
def test_any_difference_at_the_end_is_found(make_bench: MakeBench, reference: Record, part: str) -> None:
    """One wrong digest is enough."""
    bench = make_bench()
    assert reference.result is not None
    bench.records.append(reference)
    bench.judge_end(reference)
    wrong = replace(reference, result={**reference.result, part: "0"})
    with pytest.raises(AssertionError, match=part):
        bench.judge_end(wrong)


def test_a_step_that_differs_is_found(make_bench: MakeBench, reference: Record) -> None:
    """A loss or a sample that is not the reference's, a gap, and a missing step."""
    bench = make_bench()
    first = reference.steps[0]
    for wrong in (replace(first, loss="0x0p+0"), replace(first, ids=(0,))):
        with pytest.raises(AssertionError, match="redone"):
            bench.judge(replace(reference, steps=(wrong,), events=()))
    with pytest.raises(AssertionError, match="follow"):
        bench.judge(replace(reference, steps=reference.steps[1:], events=()))
    with pytest.raises(AssertionError, match="every step"):
        bench.judge_end(replace(reference, events=()))


def test_losing_a_checkpoint_is_found(make_bench: MakeBench) -> None:
    """A checkpoint that was said to be published must be there."""
    lost = event("CheckpointPublished", checkpoint="a000001-s000000002-0001-00000000")
    with pytest.raises(AssertionError, match="said to be"):
        make_bench().judge(record(lost))
