"""The trainer, its writer process, or both are killed at each event of a save.

What was completely staged when the trainer died is published, what was not never is, and a start at once afterwards
goes on from it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spotsafe.checkpoint.candidates import candidates, look
from spotsafe.checkpoint.verify import verify
from spotsafe.reader import load_verified
from spotsafe.storage.local import LocalStore
from spotsafe.writer.process import can_run
from tests.e2e.processes import Launcher, Process
from tests.writer.processes import PATIENCE_S, lives, stopped, the_writer, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_run(), reason="this system cannot have a writer process"),
]

SCRIPT = Path(__file__).with_name("scripts") / "trainer.py"
EVENTS = [
    "SaveStarted",
    "SaveStaged",
    "FileWritten",
    "IndexWritten",
    "CheckpointPublished",
    "CheckpointRetired",
]
STAGED = EVENTS[1:]
"""Events from which on a save is completely staged."""


@dataclass(frozen=True)
class Told:
    """What a process has written."""

    lines: tuple[str, ...]

    def steps(self, event: str) -> list[int]:
        """Of the checkpoints that the events of this type name."""
        names = [line.split()[-1] for line in self.lines if line.startswith(f"{event} ")]
        return [int(name.split("-")[1][1:]) for name in names]

    @property
    def writer(self) -> int:
        """The process that was there when the plan was carried out."""
        [line] = [one for one in self.lines if one.startswith("striking ")]
        return int(line.split()[1])


class Bench:
    """Starts trainers on one run, and judges it."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self._launcher, self._folder, self._count = launcher, folder, 0
        self.run = folder / "run"

    def environment(self, plan: Mapping[str, Any]) -> dict[str, str]:
        return {"RUN": str(self.run), "PLAN": json.dumps(plan), "XDG_RUNTIME_DIR": str(self._folder)}

    def start(self, **plan: Any) -> tuple[Process, Callable[[], Told]]:
        """A trainer, and what reads what it has said."""
        self._count += 1
        log = self._folder / f"{self._count}.log"
        log.touch()
        process = self._launcher.fork(SCRIPT, log=log, environment=self.environment(plan))
        return process, lambda: Told(tuple(log.read_text().splitlines()))

    def published(self) -> list[int]:
        """Steps of all that is published, newest first; each is whole and of one single step."""
        store, steps = LocalStore(self.run), []
        for one in candidates(store, look(store)):
            if one.manifest is None:
                continue
            assert verify(store, one.name) == []
            tensors = load_verified(store, one, threads=1).saved.tensors
            values = {value for tensor in tensors.values() for value in tensor.unique().tolist()}
            assert values == {one.name.step}, f"{one.name} holds {values}"
            steps.append(one.name.step)
        return steps


@pytest.fixture
def bench(launcher: Launcher, tmp_path: Path) -> Bench:
    return Bench(launcher, tmp_path)


def which(event: str) -> int:
    """Which event of this type: one of the second save, or the first of retention."""
    return 1 if event == "CheckpointRetired" else 2


def gone(pid: int) -> None:
    """Wait for the end of a process that nobody here has started."""
    until(lambda: not lives(pid), what=f"process {pid} ends by itself")


@pytest.mark.parametrize("event", EVENTS)
def test_the_trainer_is_killed(bench: Bench, event: str) -> None:
    """The writer finishes the save if it was completely staged, and ends by itself."""
    process, told = bench.start(at=event, count=which(event), who="trainer", until=9)
    assert process.end() == -signal.SIGKILL, told()
    gone(told().writer)
    started = told().steps("SaveStarted")[-1]
    newest = bench.published()[0]
    staged = told().steps("SaveStaged")
    assert newest == (started if event in STAGED else started - 1)
    assert not staged or newest >= staged[-1]
    again, told = bench.start(until=newest + 1)
    assert again.end() == 0, told()
    assert f"resumed {newest} " in "\n".join(told().lines)
    assert bench.published()[0] == newest + 1


@pytest.mark.parametrize("size", [1000, 6 << 20], ids=["one-file", "several-files"])
def test_the_trainer_is_killed_while_it_copies(bench: Bench, size: int) -> None:
    """Half a copy is never published; what was there before stays."""
    process, told = bench.start(at="copy", count=2, who="trainer", size=size)
    assert process.end() == -signal.SIGKILL, told()
    gone(told().writer)
    assert bench.published() == [1]
    again, told = bench.start(until=2, size=size)
    assert again.end() == 0, told()
    assert bench.published()[0] == 2


def test_two_saves_outlive_the_trainer(bench: Bench) -> None:
    """The one being written and the one behind it, both staged completely."""
    process, told = bench.start(at="SaveStaged", count=3, who="trainer", stops=1, until=9)
    assert process.end() == -signal.SIGKILL, told()
    writer = told().writer
    assert bench.published() == [1]
    os.kill(writer, signal.SIGCONT)
    gone(writer)
    assert bench.published() == [3, 2, 1]
    again, told = bench.start(until=4)
    assert again.end() == 0, told()
    assert "resumed 3 " in "\n".join(told().lines)


TWO = {"stops": 1, "goes_on": 3, "until": 9}
"""The first save is published; the next two are staged while the writer stands still, which then goes on."""
OF_THE_FIRST_OF_TWO = {
    "FileWritten": {"count": 2},
    "IndexWritten": {"count": 2},
    "CheckpointPublished": {"count": 2},
    "CheckpointRetired": {"count": 1, "keep": 1, "stops": 2, "goes_on": 4},  # two always stay
}


@pytest.mark.parametrize("who", ["trainer", "writer", "both"])
@pytest.mark.parametrize("event", OF_THE_FIRST_OF_TWO)
def test_with_another_save_behind_it(bench: Bench, event: str, who: str) -> None:
    """A save is being written and the next one staged: both are published, or what they held is saved again."""
    process, told = bench.start(at=event, who=who, **{**TWO, **OF_THE_FIRST_OF_TWO[event]})
    ended = process.end()
    assert ended == (0 if who == "writer" else -signal.SIGKILL), told()
    gone(told().writer)
    done, newest = told().steps("CheckpointPublished"), bench.published()[0]
    assert newest >= max(done)
    assert not any(line.startswith("SaveFailed") for line in told().lines)
    if who == "trainer":
        assert bench.published() == ([4, 3] if event == "CheckpointRetired" else [3, 2, 1])
    elif who == "writer":
        assert any(line.startswith("WriterReplaced") for line in told().lines)
        assert newest == TWO["until"]
    again, told = bench.start(until=newest + 1)
    assert again.end() == 0, told()
    assert f"resumed {newest} " in "\n".join(told().lines)
    assert bench.published()[0] == newest + 1


@pytest.mark.parametrize("who", ["trainer", "writer", "both"])
@pytest.mark.parametrize("event", ["SaveStarted", "SaveStaged"])
def test_while_the_writer_stands_still(bench: Bench, event: str, who: str) -> None:
    """A save waits for it and another is begun: what was staged is published if the writer lives on, and else lost."""
    process, told = bench.start(at=event, count=3, who=who, stops=1, until=6)
    if who == "trainer":
        assert process.end() == -signal.SIGKILL, told()
        os.kill(told().writer, signal.SIGCONT)
    else:
        assert process.end() == (0 if who == "writer" else -signal.SIGKILL), told()
    gone(told().writer)
    staged = 2 if event == "SaveStarted" else 3
    newest = {"trainer": staged, "writer": 6, "both": 1}[who]
    assert bench.published()[0] == newest
    again, told = bench.start(until=newest + 1)
    assert again.end() == 0, told()
    assert bench.published()[0] == newest + 1


@pytest.mark.parametrize("event", EVENTS)
def test_the_writer_is_killed(bench: Bench, event: str) -> None:
    """Another one takes its place, the save is made again, and training has not felt it."""
    process, told = bench.start(at=event, count=which(event), who="writer", until=6)
    assert process.end() == 0, told()
    assert any(line.startswith("WriterReplaced") for line in told().lines)
    assert not any(line.startswith("SaveFailed") for line in told().lines)
    assert bench.published()[0] == 6
    assert len(bench.published()) >= 2


@pytest.mark.parametrize("event", EVENTS)
def test_both_are_killed(bench: Bench, event: str) -> None:
    """What was told to be published is there, and the next attempt goes on."""
    process, told = bench.start(at=event, count=which(event), who="both", until=9)
    assert process.end() == -signal.SIGKILL, told()
    gone(told().writer)
    done = told().steps("CheckpointPublished")
    newest = bench.published()[0]
    assert newest >= max(done)
    again, told = bench.start(until=newest + 1)
    assert again.end() == 0, told()
    assert bench.published()[0] == newest + 1


def test_a_start_at_once_waits_for_the_writer(bench: Bench) -> None:
    """The writer of a killed trainer is still writing: the start waits, says so, and resumes from that very save."""
    process, told = bench.start(at="SaveStaged", count=2, who="pause")
    until(lambda: "striking" in "\n".join(told().lines), what="staged")
    writer = told().writer
    with stopped(writer):
        process.kill()
        # The second save may be published already: then there is nothing to wait for, but the writer has not ended.
        again, after = bench.start(until=3)
        until(lambda: any(line.startswith("WriterAwaited") for line in after().lines), what="told")
        assert not any(line.startswith("RunStarted") for line in after().lines)
    assert again.end() == 0, after()
    assert any(line.startswith("resumed 2 ") for line in after().lines)
    assert bench.published()[0] == 3


def test_a_whole_group_is_killed(bench: Bench) -> None:
    """A launcher ends its workers by their group: the writer is in none of its groups."""
    process, told = bench.start(at="SaveStaged", count=2, who="pause")
    until(lambda: "striking" in "\n".join(told().lines), what="staged")
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
    assert process.end() == -signal.SIGKILL
    gone(told().writer)
    assert bench.published()[0] == 2


def test_an_agent_of_torchrun_ends_its_workers(bench: Bench, tmp_path: Path) -> None:
    """It kills the group of each: the writer publishes what is staged, and a start at once waits for it."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--shutdown-timeout",
        "1",
        str(SCRIPT),
    ]

    def start(log: Path, **plan: Any) -> tuple[subprocess.Popen[bytes], Callable[[], Told]]:
        environment = {**os.environ, **bench.environment(plan), "PYTHONPATH": path}
        with log.open("wb") as file:
            process = subprocess.Popen(agent, env=environment, stdout=file, stderr=subprocess.DEVNULL)
        return process, lambda: Told(tuple(log.read_text().splitlines()))

    first, told = start(tmp_path / "first.log", at="SaveStaged", count=2, who="pause")
    with first:
        until(lambda: "striking" in "\n".join(told().lines), what="staged")
        writer = told().writer
        with stopped(writer):
            first.terminate()
            assert first.wait(PATIENCE_S) != 0
            assert lives(writer)
            second, after = start(tmp_path / "second.log", until=3)
            with second:
                until(lambda: any(line.startswith("WriterAwaited") for line in after().lines), what="told")
                assert not any(line.startswith("RunStarted") for line in after().lines)
                os.kill(writer, signal.SIGCONT)
                assert second.wait(PATIENCE_S) == 0
    assert any(line.startswith("resumed 2 ") for line in after().lines)
    assert bench.published()[0] == 3


def test_every_process_is_told_to_end(bench: Bench) -> None:
    """SIGTERM to each process, the writer too, is a reclaim like any other: the last step is saved."""
    process, told = bench.start(at="SaveStaged", count=2, who="nobody", until=100_000)
    until(lambda: told().steps("CheckpointPublished")[-1:] > [5], what="training")
    for pid in (the_writer(process.pid), process.pid):
        os.kill(pid, signal.SIGTERM)
    assert process.end() == 143, told()
    assert bench.published()[0] == max(told().steps("SaveStarted"))


def test_the_first_process_of_a_container(bench: Bench, tmp_path: Path) -> None:
    """The kernel ends the writer with PID 1. It is told at the start, and nothing half written counts."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    able = subprocess.run([*command, "true"], capture_output=True, check=False)
    if able.returncode:
        pytest.skip(f"no pid namespace can be made here: {able.stderr.decode().strip()}")
    plan = {"at": "FileWritten", "count": 2, "who": "pause"}
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    with subprocess.Popen(
        [*command, sys.executable, str(SCRIPT)],
        env={**os.environ, **bench.environment(plan), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as outer:
        assert outer.stdout is not None
        lines = []
        while not (lines and lines[-1].startswith("striking")):
            lines.append(outer.stdout.readline())
            assert lines[-1], lines
        outer.kill()  # and the kernel its child, which nobody inside of the namespace could
        lines += outer.stdout.readlines()
    told = Told(tuple(lines))
    assert any(line.startswith("Warned") and "PID 1" in line for line in told.lines), told
    assert set(bench.published()) >= set(told.steps("CheckpointPublished"))
    again, told = bench.start(until=3)
    assert again.end() == 0, told()
    assert bench.published()[0] == 3


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """Its module is never imported again: there is nothing that would run it twice."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, spotsafe\n"
        "os.write(1, b'once ')\n"
        "weight = torch.zeros(3)\n"
        f"with spotsafe.session({str(tmp_path / 'run')!r}, weight=weight, save_every=1, writer='process') as run:\n"
        "    for step in run.range(2):\n"
        "        weight += 1\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "once "
    assert "warning" not in done.stderr
