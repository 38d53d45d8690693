"""The judgement about killed scripts finds what it is there to find, and the scripts do what they are there for."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.harness import Record
from tests.e2e.processes import Launcher
from tests.scripts.trial import LEFT, PROGRAMS, RUNNER, Campaign, Trial, uninterrupted

pytestmark = pytest.mark.slow

NAMES = [path.stem for path in PROGRAMS]
EARLY_STOPPING = PROGRAMS[NAMES.index("early_stopping")]
RETURNING = PROGRAMS[NAMES.index("returning")]


@pytest.fixture(scope="module")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Record:
    return uninterrupted(launcher, RETURNING, tmp_path_factory.mktemp("whole"))


@pytest.fixture
def trial(launcher: Launcher, whole: Record, tmp_path: Path) -> Trial:
    return Trial(launcher, tmp_path / "trial", {"script": str(RETURNING)}, script=RUNNER, whole=whole)


def test_there_is_a_script_of_each_sort() -> None:
    """A script that is renamed away would not be missed otherwise."""
    assert NAMES == [
        "accumulating",
        "dqn",
        "early_stopping",
        "gan",
        "nanogpt",
        "plain_loader",
        "reinforce",
        "returning",
        "two_stages",
    ]


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda path: path.stem)
def test_a_script_is_short(script: Path) -> None:
    """It is what a user would write."""
    assert len(script.read_text(encoding="utf-8").splitlines()) <= 75


def changed_loss(record: Record) -> Record:
    return replace(
        record, steps=(*record.steps[:5], replace(record.steps[5], loss="0x0p+0"), *record.steps[6:])
    )


def changed_ids(record: Record) -> Record:
    return replace(record, steps=(replace(record.steps[0], ids=(0,)), *record.steps[1:]))


def left_out(record: Record) -> Record:
    return replace(record, steps=record.steps[1:])


def swapped(record: Record) -> Record:
    return replace(record, steps=(record.steps[1], record.steps[0], *record.steps[2:]))


@pytest.mark.parametrize("wrong", [changed_loss, changed_ids, left_out, swapped])
def test_any_difference_on_the_way_is_found(
    trial: Trial, whole: Record, wrong: Callable[[Record], Record]
) -> None:
    """A loss, a sample, something left out, another order."""
    plain = replace(whole, events=())
    with pytest.raises(AssertionError, match=r"the same, in the same order|nothing is left out"):
        trial.judge(wrong(plain))
    trial.judge(plain)
    assert trial.lines_left == 0


def test_any_difference_at_the_end_is_found(trial: Trial, whole: Record) -> None:
    """Something that was not made, or that is another."""
    end = replace(whole, events=())
    with pytest.raises(AssertionError, match="everything was made"):
        trial.judge_end(end)
    trial.judge(end)
    trial.judge_end(end)
    assert whole.result is not None
    for part in whole.result:
        with pytest.raises(AssertionError, match=part):
            trial.judge_end(replace(end, result={**whole.result, part: "0"}))


def test_a_resume_from_anywhere_else_is_found(trial: Trial, whole: Record) -> None:
    """A checkpoint that was not there when it started."""
    started = {**whole.of("RunStarted")[0], "resumed_from": "a000009-s000000009-0001-00000000"}
    with pytest.raises(AssertionError):
        trial.judge(replace(whole, steps=(), events=(started,)))


@pytest.mark.slow
def test_a_notice_runs_the_code_behind_the_loop(trial: Trial) -> None:
    """The script leaves by its own code, with everything saved that was made."""
    record = trial.start(terminate_at_line=7).end()
    assert record.status == 75
    assert len(record.steps) == 7
    newest = trial.newest
    assert newest is not None
    assert newest.step == 7
    trial.finish()


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_and_early_stopping_stops(launcher: Launcher, tmp_path: Path) -> None:
    """The script is about something: the best is not among the last, and the limit is not reached."""
    trial = Trial(launcher, tmp_path / "whole", {"script": str(EARLY_STOPPING)}, script=RUNNER)
    record = trial.start().end()
    losses = [float.fromhex(line.loss) for line in record.steps if str(line.number).startswith("validation")]
    best = losses.index(min(losses))
    assert best + 5 == len(losses) < 30
    epochs = [name.step // 3 - 1 for name in trial.published]
    assert epochs[0] == len(losses) - 1
    assert epochs[-1] == best
    assert len(epochs) == 3


@pytest.mark.slow
@pytest.mark.parametrize("line", [12, 13, 14])
def test_a_notice_inside_an_evaluation(launcher: Launcher, line: int, tmp_path: Path) -> None:
    """The evaluation is made again, whole; nothing that was trained before it is lost."""
    whole = uninterrupted(launcher, EARLY_STOPPING, tmp_path / "whole")
    assert str(whole.steps[line - 1].number).startswith("evaluate 1.")
    trial = Trial(launcher, tmp_path / "trial", {"script": str(EARLY_STOPPING)}, script=RUNNER, whole=whole)
    assert trial.start(terminate_at_line=line).end().status == 143
    assert trial.newest is not None
    assert trial.newest.step == 6
    record = trial.finish()
    assert str(record.steps[0].number) == "evaluate 1.0"


@pytest.mark.slow
def test_a_campaign_kills_as_often_as_it_says(launcher: Launcher, whole: Record, tmp_path: Path) -> None:
    """In each way, and SIGTERM once."""
    campaign = Campaign(launcher, RETURNING, tmp_path, whole, random.Random(0))
    campaign.kill(3)
    assert campaign.hits == {"instant": 1, "line": 1, "event": 1, "notice": 1}
    assert campaign.runs >= 1
    assert -signal.SIGKILL not in LEFT
