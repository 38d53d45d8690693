"""Real SIGKILL, again and again, of a process that does nothing but save: no torn load, nothing published is lost.

Of every five kills one comes at an instant of our clock; three come at a system call or a request, one of each part of
a save; and one between two saves. The next process looks, verifies and resumes, and is killed in its turn.
"""

from __future__ import annotations

import random
import signal
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from spotsafe.events import CheckpointPublished, Event
from spotsafe.storage.local import LocalStore
from spotsafe.storage.store import Store
from tests.crashes.lives import STRIDE, Seen, judge, names_in
from tests.crashes.places import Disk, Place, Seaweed
from tests.crashes.process import phase_after, said, start, train
from tests.crashes.steps import Steps
from tests.e2e.processes import Launcher, Process
from tests.proof import record as write_down

pytestmark = pytest.mark.slow

PHASES = ("writing", "publish", "retention")
"""Of a save: its files and indexes; what makes it exist; what is deleted behind it."""
SAVES = 3


@dataclass
class Timeline:
    """How many steps an undisturbed process makes in each part of its saves, each time."""

    steps: Steps = field(default_factory=Steps)
    lengths: dict[str, list[int]] = field(default_factory=dict)
    phase: str = "start"
    begun: int = 0

    def tell(self, event: Event) -> None:
        """Something begins."""
        after, done = phase_after(said(event), self.phase), len(self.steps.made)
        if after != self.phase:
            self.lengths.setdefault(self.phase, []).append(done - self.begun)
            self.phase, self.begun = after, done


def timeline(place: Place, store: Store, *, stride: int) -> dict[str, list[int]]:
    """Of a process that resumes, and saves three times."""
    train(store, lambda _: None, saves=SAVES, stride=stride)
    line = Timeline()
    with place.faulty(store, "inside", line.steps) as watched:
        train(watched, line.tell, saves=SAVES, stride=stride)
    return line.lengths


@dataclass
class Campaign:
    """Kills, and counts what was hit."""

    launcher: Launcher
    folder: Path
    run: dict[str, object]
    """Which run, for the processes."""
    lengths: dict[str, list[int]]
    """Of each phase, each time: in steps."""
    life_s: float
    """Within so many seconds come those at instants of our clock."""
    chance: random.Random
    seen: Seen = field(default_factory=set)
    hits: Counter[str] = field(default_factory=Counter)
    checkpoints: int = 0

    def kill(self, number: int) -> None:
        """Start a process, and kill it; the number decides how."""
        ways = ("clock", "between", *PHASES)
        way = ways[number % len(ways)]
        log = self.folder / f"{number}.log"
        if way == "clock":
            process = self._start(log)
            process.wait(self.chance.uniform(0.0, self.life_s))
            status = process.kill()
        else:
            count = self.chance.randrange(SAVES - 1)
            aim = {
                "phase": way,
                "count": count + 1,
                "at": self.chance.randint(1, self.lengths[way][count] or 1),
            }
            status = self._start(log, aim=aim, kind=self.chance.choice(["before", "after"])).end()
        text = log.read_text()
        assert status == -signal.SIGKILL, text
        self._judge(text, way)

    def _start(self, log: Path, **options: object) -> Process:
        told = {"life": "train", "level": "inside", "die": "kill", **self.run, **options}
        return start(self.launcher, log, told)

    def prove(self, kills: int, store: Store, what: str) -> None:
        """Kill so often, judge what is left, and write down what was hit."""
        for number in range(kills):
            self.kill(number)
        judge(store, self.seen)
        assert all(self.hits[phase] >= kills // 10 for phase in ("between", *PHASES)), self.hits
        counts = {name.replace(" ", "_"): count for name, count in self.hits.items()}
        write_down(what, kills=kills, **counts, checkpoints=self.checkpoints)

    def _judge(self, text: str, way: str) -> None:
        phase = "start"
        for line in text.splitlines():
            word = line.split()[0]
            phase, names = phase_after(word, phase), names_in(line)
            if word in {"found", CheckpointPublished.__name__}:
                self.checkpoints += len(names - self.seen)
                self.seen |= names
            if word == "found":  # one of which nobody was told may be among them
                newest = sorted(self.seen, reverse=True)[:2]
                assert newest == sorted(names, reverse=True)[:2], "nothing published is lost"
        assert "Traceback" not in text, text
        self.hits[phase] += 1
        self.hits["by the clock"] += way == "clock"


@pytest.mark.parametrize("kills", [60, pytest.param(300, marks=pytest.mark.prove)])
def test_killed_while_saving(launcher: Launcher, tmp_path: Path, kills: int) -> None:
    """Each process finds the newest two checkpoints that any before it has announced, and all that it finds whole."""
    lengths = timeline(Disk(tmp_path), LocalStore(tmp_path / "timeline"), stride=1)
    run: dict[str, object] = {"run": str(tmp_path / "run")}
    campaign = Campaign(launcher, tmp_path, run, lengths, life_s=0.3, chance=random.Random(kills))
    campaign.prove(kills, LocalStore(tmp_path / "run"), "SIGKILL of a process that saves on local disk")


@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.prove)])
def test_killed_while_saving_to_seaweedfs(
    launcher: Launcher, bucket: Seaweed, tmp_path: Path, kills: int
) -> None:
    """The same by boto3: bodies are cut short, and requests come to an end when nobody waits for them any more."""
    name = uuid.uuid4().hex
    lengths = timeline(bucket, bucket.store(f"{name}-timeline"), stride=STRIDE)
    run: dict[str, object] = {"run": name, "endpoint": bucket.endpoint, "stride": STRIDE}
    campaign = Campaign(launcher, tmp_path, run, lengths, life_s=2.0, chance=random.Random(kills))
    campaign.prove(kills, bucket.store(name), "SIGKILL of a process that saves on SeaweedFS")
