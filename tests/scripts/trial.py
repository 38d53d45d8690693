"""A script that is killed again and again, and the judgement about what it did."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from tests.e2e.harness import Bench, Record
from tests.e2e.processes import Launcher

PROGRAMS = sorted(Path(__file__).with_name("programs").glob("*.py"))
"""The scripts."""
RUNNER = Path(__file__).with_name("runner.py")
EVENTS = (
    "RestoreStarted",
    "RestoreVerified",
    "RunStarted",
    "FirstStep",
    "SaveStarted",
    "SaveStaged",
    "FileWritten",
    "IndexWritten",
    "CheckpointPublished",
    "CheckpointRetired",
)
"""Where kills at events are aimed."""
LEFT = (143, 75, -signal.SIGTERM)
"""How a script ends on SIGTERM: reclaimed, by its own code, or before the session was there."""


@dataclass
class Trial(Bench):
    """One run folder of a script."""

    whole: Record | None = None
    """The uninterrupted run; None if this is it."""
    reached: int = 0
    """Lines of its trace that were made so far."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.alone = False  # what the base then leaves out is judged here, by lines instead of steps

    @property
    def lines_left(self) -> int:
        assert self.whole is not None
        return len(self.whole.steps) - self.reached

    def judge(self, record: Record) -> None:
        """It went on from the newest checkpoint, and what it did is a piece of the uninterrupted run."""
        expected = None if self._newest is None else str(self._newest)
        super().judge(record)
        if record.started is not None:
            assert record.started["resumed_from"] == expected, record.log
        if self.whole is None or not record.steps:
            return
        names = [line.number for line in self.whole.steps]
        first = names.index(record.steps[0].number)
        assert first <= self.reached, f"nothing is left out before {record.steps[0]}"
        end = first + len(record.steps)
        assert record.steps == self.whole.steps[first:end], f"the same, in the same order, from line {first}"
        self.reached = max(self.reached, end)

    def judge_end(self, record: Record) -> None:
        """Everything that was trained is, bit for bit, what it would be."""
        assert self.whole is not None
        assert record.status == 0, record.log
        assert record.result is not None, record.log
        expected = self.whole.result or {}
        others = [name for name in expected if record.result[name] != expected[name]]
        assert not others, f"{others} are not those of the uninterrupted run\n{record.log}"
        assert self.lines_left == 0, "everything was made"
        if record.of("CheckpointPublished"):
            self._judge_folder()


@dataclass
class Campaign:
    """Kills a script in all ways until each was done so often, in one run folder after the other."""

    launcher: Launcher
    script: Path
    folder: Path
    whole: Record
    dice: random.Random
    trial: Trial | None = None
    runs: int = 0
    hits: dict[str, int] = field(default_factory=dict)

    def kill(self, kills: int) -> None:
        """So many kills, in turn at any instant, behind any line and at any event; then SIGTERM once, anywhere."""
        ways = [*islice(cycle(["instant", "line", "event"]), kills), "notice"]
        self.dice.shuffle(ways)
        for way in ways:
            while not self._hit(way):
                pass
        if self.trial is not None:
            self.trial.finish()
            self._again()

    def _hit(self, way: str) -> bool:
        """One start; false if it came to its end before anything hit it."""
        if self.trial is None:
            self.runs += 1
            folder = self.folder / f"run{self.runs}"
            self.trial = Trial(
                self.launcher, folder, {"script": str(self.script)}, script=RUNNER, whole=self.whole
            )
        record = getattr(self, f"_{way}")(self.trial)
        if record.status == 0:
            self.trial.judge_end(record)
            self.trial = None
            return False
        assert record.status in (LEFT if way == "notice" else [-signal.SIGKILL]), record.log
        self.hits[way] = self.hits.get(way, 0) + 1
        return True

    def _instant(self, trial: Trial) -> Record:
        return trial.start().kill_after(
            self.dice.uniform(0, self.whole.seconds), machine=self.dice.random() < 0.5
        )

    def _line(self, trial: Trial) -> Record:
        return trial.start(kill_at_line=self._some_line(trial)).end()

    def _event(self, trial: Trial) -> Record:
        return trial.start(kill_at=f"{self.dice.choice(EVENTS)}:{self.dice.randint(1, 4)}").end()

    def _notice(self, trial: Trial) -> Record:
        return trial.start(terminate_at_line=self._some_line(trial)).end()

    def _some_line(self, trial: Trial) -> int:
        return self.dice.randint(1, max(1, trial.lines_left // 2))

    def _again(self) -> None:
        """The same command once more does nothing."""
        assert self.trial is not None
        before = self.trial.published
        record = self.trial.finish()
        assert self.trial.published == before
        assert record.of("CheckpointPublished") == []


def uninterrupted(launcher: Launcher, script: Path, folder: Path) -> Record:
    """The whole run in one process."""
    record = Trial(launcher, folder, {"script": str(script)}, script=RUNNER).start().end()
    assert record.status == 0, record.log
    assert record.result is not None
    names = [line.number for line in record.steps]
    assert len(set(names)) == len(names), "each name comes once"
    return record
