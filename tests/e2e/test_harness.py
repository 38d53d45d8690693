"""The harness itself: a forked child is a real process, and what is judged is judged right."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.harness import ONE_THREAD, Bench, Launcher, Record, members, read_lines, until

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


def test_waiting_for_what_never_comes_ends() -> None:
    """With an error that says what was waited for."""
    with pytest.raises(TimeoutError, match="the moon"):
        until(lambda: False, what="the moon", patience_s=0.01)


def test_a_forked_child_is_as_good_as_a_new_interpreter(make_bench: MakeBench, reference: Record) -> None:
    """`python train.py` gives, bit for bit, what the forked child of the reference gave."""
    bench = make_bench()
    bench.fresh = True
    fresh = bench.finish()
    assert fresh.steps == reference.steps
    assert len({step.loss for step in fresh.steps}) == len(fresh.steps) == 24


def test_a_forked_child_is_a_process_of_its_own(launcher: Launcher, tmp_path: Path) -> None:
    """It leads its session, has no descriptor of the server's, and ends with the script's own status."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, threading\n"
        "print(os.getpid(), os.getsid(0), os.getpgrp(), sorted(map(int, os.listdir('/proc/self/fd')))[:3],\n"
        "    len(os.listdir('/proc/self/fd')), threading.active_count(), sys.argv, os.environ['WORD'], __name__)\n"
        "sys.exit(7)\n"
    )
    log = tmp_path / "log"
    process = launcher.fork(script, log=log, environment={"WORD": "hello"})
    assert process.end() == 7
    pid = process.pid
    expected = (
        f"{pid} {pid} {pid} [0, 1, 2] 4 1 {[str(script)]} hello __main__\n"  # the fourth is the listing's own
    )
    assert log.read_text() == expected


def test_the_way_a_child_ends_is_told(launcher: Launcher, tmp_path: Path) -> None:
    """A signal, an exception, and a message as exit status are told apart as the interpreter does it."""
    script = tmp_path / "script.py"
    for text, status in (
        (f"import os\nos.kill(os.getpid(), {int(signal.SIGKILL)})", -signal.SIGKILL),
        ("raise ValueError('odd')", 1),
        ("raise SystemExit('in words')", 1),
        ("raise SystemExit", 0),
        ("import os\nos._exit(9)", 9),
    ):
        script.write_text(text)
        assert launcher.fork(script, log=tmp_path / "log", environment={}).end() == status
    assert "ValueError: odd" in (tmp_path / "log").read_text()
    assert "in words" in (tmp_path / "log").read_text()


def test_members_of_a_session(launcher: Launcher, tmp_path: Path) -> None:
    """A process and what it started are found, whatever their process groups, until they are gone."""
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.fork() == 0:\n    os.setpgid(0, 0)\ntime.sleep(600)\n")
    process = launcher.fork(script, log=tmp_path / "log", environment={})
    found = until(lambda: members(process.pid)[1:] and members(process.pid), what="the child of the child")
    assert found[0] == process.pid
    assert process.kill() == -signal.SIGKILL
    assert members(process.pid) == found[1:]
    os.kill(found[1], signal.SIGKILL)
    until(lambda: not members(process.pid), what="the end of all")


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


def test_one_thread_everywhere() -> None:
    """Sums must not depend on how many cores a machine has."""
    assert set(ONE_THREAD.values()) == {"1"}
