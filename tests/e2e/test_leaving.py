"""Reclaimed under a launcher: real torchrun, and processes that believe to be in a job of Slurm or SkyPilot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotsafe.checkpoint.catalog import resolve
from spotsafe.errors import EXIT_RECLAIMED
from spotsafe.storage.local import LocalStore
from spotsafe.testing.aws import FakeAwsMetadata
from tests.e2e.processes import PATIENCE_S, until

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("scripts") / "leaving.py"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]


@pytest.fixture
def cloud() -> Iterator[FakeAwsMetadata]:
    with FakeAwsMetadata() as fake:
        yield fake


class Job:
    """One process, or torchrun and its rank."""

    def __init__(self, folder: Path, *, agent: bool, **environ: str) -> None:
        self.run, self._log = folder / "run", folder / "log"
        self._log.touch()
        told = {"RUN": str(self.run), "LOG": str(self._log), "XDG_RUNTIME_DIR": str(folder)}
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        self.process = subprocess.Popen(
            [sys.executable, *(TORCHRUN if agent else []), str(SCRIPT)],
            env={**os.environ, **environ, **told, "PYTHONPATH": path},
            stderr=subprocess.DEVNULL,
        )

    def lines(self, word: str) -> list[str]:
        return [line for line in self._log.read_text().splitlines() if line.partition(" ")[0] == word]

    def wait_for(self, word: str, count: int = 1) -> None:
        until(lambda: len(self.lines(word)) >= count, what=word)

    def saved_for(self) -> str:
        newest = resolve(LocalStore(self.run)).manifest
        assert newest is not None
        return newest.reason

    def end(self) -> int:
        return self.process.wait(PATIENCE_S)


@pytest.fixture
def start(tmp_path: Path, cloud: FakeAwsMetadata) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def start_(*, agent: bool = False, **environ: str) -> Job:
        jobs.append(Job(tmp_path, agent=agent, **{**cloud.environ, **environ}))
        jobs[-1].wait_for("FirstStep")
        return jobs[-1]

    yield start_
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()


def test_torchrun_ends_instead_of_starting_again_on_a_doomed_machine(
    start: Callable[..., Job], cloud: FakeAwsMetadata
) -> None:
    """A notice by metadata reaches only the rank: it saves, and asks the agent to end. No restart is used up."""
    job = start(agent=True)
    cloud.notice()
    assert job.end() != 0
    assert len(job.lines("started")) == 1
    assert job.lines("EndAwaited") == ["EndAwaited"]
    assert job.saved_for() == "notice"


def test_an_exit_makes_torchrun_start_again_at_once(
    start: Callable[..., Job], cloud: FakeAwsMetadata
) -> None:
    """The test above can fail: this is what the same script does without the way out."""
    job = start(agent=True, AT_ONCE="1")
    cloud.notice()
    job.wait_for("started", 2)
    job.process.terminate()
    job.end()


def test_torchrun_that_was_told_is_not_asked(start: Callable[..., Job]) -> None:
    """It has passed the signal on, and ends when its ranks have."""
    job = start(agent=True)
    job.process.terminate()
    assert job.end() != 0
    assert len(job.lines("started")) == 1
    assert job.lines("EndAwaited") == []
    assert job.saved_for() == "notice"


@pytest.mark.parametrize(
    "environ", [{"SLURM_JOB_ID": "7"}, {"SKYPILOT_TASK_ID": "sky-7"}], ids=["Slurm", "SkyPilot"]
)
def test_alive_until_it_is_killed(
    environ: dict[str, str], start: Callable[..., Job], cloud: FakeAwsMetadata
) -> None:
    """Everything is saved and on record; then it waits, and the first signal ends it."""
    job = start(**environ)
    cloud.notice()
    job.wait_for("RunEnded")
    assert job.lines("EndAwaited") == ["EndAwaited"]
    assert job.saved_for() == "notice"
    assert job.process.poll() is None

    def ends() -> bool:  # the handlers of the run go a moment after its last event
        job.process.terminate()
        return job.process.poll() is not None

    until(ends, what="the end")
    assert job.end() in (-signal.SIGTERM, EXIT_RECLAIMED)


def test_the_end_of_a_jobs_time_leaves_the_batch_script_the_rest(start: Callable[..., Job]) -> None:
    """`--signal=TERM@300`: the process leaves at once, so that what follows it can queue the job again."""
    job = start(SLURM_JOB_ID="7", SLURM_JOB_END_TIME=str(int(time.time()) + 300))
    job.process.terminate()
    assert job.end() == EXIT_RECLAIMED
    assert job.lines("EndAwaited") == []
