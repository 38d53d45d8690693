"""Real SIGKILL at any instant of a process's life: the run ends bit for bit as if nothing had happened.

The instants are uniform over the life of a process. Then kills at events are added until what matters most - inside a
save, inside a restore, after a resume and before its first save - was hit often enough, as the event logs that the
killed processes themselves have written prove.
"""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Callable
from itertools import cycle

import pytest

from tests.e2e.harness import Bench, Record
from tests.proof import record as write_down

MakeBench = Callable[..., Bench]

MINIMA = {"in_save": 10, "in_restore": 5, "before_first_save": 3}
"""How often each must have been hit."""
AIMS = {
    "in_save": ("SaveStarted", "SaveStaged", "FileWritten", "IndexWritten"),
    "in_restore": ("RestoreStarted", "RestoreVerified"),
    "before_first_save": ("RunStarted", "IntervalChosen", "FirstStep"),
}
"""The events at which a kill hits it."""


class Campaign:
    """Kills runs, one after the other, and counts what was hit."""

    def __init__(self, make_bench: Callable[[str], Bench], *, seed: int, life_s: float) -> None:
        self._make_bench = make_bench
        self._random = random.Random(seed)
        self._life_s = life_s
        self._bench: Bench | None = None
        self.hits: Counter[str] = Counter()
        self.runs = 0

    @property
    def bench(self) -> Bench:
        """The run that is being killed; a new one if the last is finished."""
        if self._bench is None:
            self.runs += 1
            self._bench = self._make_bench(f"run{self.runs}")
        return self._bench

    def kill_at_any_instant(self) -> None:
        """Once, half of the times with its writer; one that had ended does not count, and its run is finished."""
        attempt = self.bench.start()
        machine = self._random.random() < 0.5
        self._count(attempt.kill_after(self._random.uniform(0, self._life_s), machine=machine), "uniform")

    def kill_inside(self, kind: str) -> None:
        """Kill at events until this kind was hit once more."""
        wanted = self.hits[kind] + 1
        events = list(AIMS[kind])
        self._random.shuffle(events)
        for event in cycle(events):
            if self.hits[kind] >= wanted:
                return
            if kind != "in_save" and self.bench.newest is None:  # nothing to resume from yet
                self._count(self.bench.start(kill_at="CheckpointPublished").end(), "aimed")
            count = self._random.randint(1, 4) if kind == "in_save" else 1
            self._count(self.bench.start(kill_at=f"{event}:{count}").end(), "aimed")

    def finish(self) -> None:
        """Let the last run come to its end."""
        if self._bench is not None:
            self._bench.finish()
            self._bench = None

    def _count(self, record: Record, how: str) -> None:
        if record.status == 0:
            self.bench.judge_end(record)
            self._bench = None
            return
        assert record.status == -signal.SIGKILL, record.log
        self.hits[how] += 1
        for kind in (*MINIMA, "in_start"):
            self.hits[kind] += getattr(record, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [15, pytest.param(60, marks=pytest.mark.prove)])
def test_killed_at_any_instant(make_bench: MakeBench, reference: Record, kills: int) -> None:
    """Weights, optimizer, scheduler, generators, the loss and the samples of every step, redone ones too."""
    campaign = Campaign(make_bench, seed=kills, life_s=reference.seconds)
    while campaign.hits["uniform"] < kills:
        campaign.kill_at_any_instant()
    for kind, minimum in MINIMA.items():
        while campaign.hits[kind] < minimum:
            campaign.kill_inside(kind)
    campaign.finish()
    assert all(campaign.hits[kind] >= minimum for kind, minimum in MINIMA.items())
    write_down("SIGKILL at uniform instants and at events", **campaign.hits, identical_runs=campaign.runs)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "aimed"), [(1, 1), pytest.param(10, 3, marks=pytest.mark.prove)])
def test_new_interpreters_killed(make_bench: MakeBench, kills: int, aimed: int) -> None:
    """The same with `python train.py`, whose life is for the most part imports."""

    def fresh(name: str) -> Bench:
        bench = make_bench(name)
        bench.fresh = True
        return bench

    campaign = Campaign(fresh, seed=kills, life_s=fresh("whole").finish().seconds)
    while campaign.hits["uniform"] < kills:
        campaign.kill_at_any_instant()
    for kind in MINIMA if aimed > 1 else ["in_save"]:
        while campaign.hits[kind] < aimed:
            campaign.kill_inside(kind)
    campaign.finish()
    write_down("SIGKILL of new interpreters", **campaign.hits, identical_runs=campaign.runs)


@pytest.mark.slow
def test_killed_again_and_again_before_the_first_save(make_bench: MakeBench) -> None:
    """Twenty starts in a row that get nowhere change nothing, and the twenty-first goes on."""
    bench = make_bench()
    bench.start(kill_at="CheckpointPublished:3", lockstep=True).end()
    before = bench.published
    for event in ["RestoreStarted", "RestoreVerified", "RestoreFinished", "RunStarted", "FirstStep"] * 4:
        assert bench.start(kill_at=event).end().status == -signal.SIGKILL
    assert bench.published == before
    assert bench.finish().of("RunStarted")[0]["attempt"] == 22
